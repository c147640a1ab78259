"""Limits on the GPU memory of tests, for pytest.

    @pytest.mark.limit_gpu_memory("2 GB")       # fails if the test needs more at its worst moment
    @pytest.mark.limit_gpu_leaks("10 MB")       # fails if more is in use after the test than before it

`pytest --gpumem` prints the tests that need the most memory, and `--gpumem-baseline FILE` compares each test with an earlier run: the file
is written where it is missing, and `--gpumem-update` writes it again. A test with a limit fails if its memory cannot be measured.
"""

import collections
import contextlib
import json
import os
import re

import pytest

from ._trace import GPUMemTrace

_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
_KEY = "gpumem"
# A test may need this much more than in its baseline: PyTorch's cache grows in such steps.
_TOLERANCE = 2**20
# A failure names at most this many places.
_MOST_PLACES = 5


def parse(size):
    """Returns a number of bytes: of `"10 MB"` or `"1.5GiB"`, with units of powers of 1024, or of a number."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)I?B\s*", str(size).upper())
    if match is None:
        raise pytest.UsageError(f"{size!r} is not a size of memory; write for example '512 MB' or '2 GB'")
    return int(float(match[1]) * _UNITS[match[2] + "B"])


def text(size):
    for unit in ("GB", "MB", "KB"):
        if abs(size) >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{size} B"


def pytest_addoption(parser):
    group = parser.getgroup("gpumem", "GPU memory of tests")
    group.addoption("--gpumem", action="store_true", default=None, help="print the tests that need the most GPU memory")
    group.addoption("--gpumem-most", type=int, metavar="N", help="how many tests --gpumem prints (10)")
    group.addoption("--gpumem-baseline", metavar="FILE", help="fail tests that need more GPU memory than in this file")
    group.addoption("--gpumem-update", action="store_true", help="write the file of --gpumem-baseline again")
    parser.addini("gpumem", "whether to print the tests that need the most GPU memory", type="bool", default=False)
    parser.addini("gpumem_most", "how many tests --gpumem prints", default="10")
    parser.addini("gpumem_baseline", "the file of --gpumem-baseline")


def pytest_configure(config):
    config.addinivalue_line("markers", "limit_gpu_memory(size, device=None): fail if the test needs more GPU memory")
    config.addinivalue_line("markers", "limit_gpu_leaks(size, device=None, filter_fn=None): fail if more GPU memory is in use after the test")
    config.pluginmanager.register(Plugin(config), "gpumem-plugin")


class Plugin:
    def __init__(self, config):
        self.config = config
        self.prints = config.getoption("--gpumem") or config.getini("gpumem")
        most = config.getoption("--gpumem-most")
        most = config.getini("gpumem_most") if most is None else most
        if not str(most).isdecimal() or int(most) == 0:
            raise pytest.UsageError(f"gpumem_most must be a number of tests, not {most!r}")
        self.most = int(most)
        path = config.getoption("--gpumem-baseline") or config.getini("gpumem_baseline")
        self.path = os.path.join(str(config.rootpath), path) if path else None
        self.updates = config.getoption("--gpumem-update")
        self.baseline, self.found, self.failed = {}, {}, None
        if self.updates and not self.path:
            raise pytest.UsageError("--gpumem-update needs --gpumem-baseline FILE")
        if self.path and not os.path.isdir(os.path.dirname(self.path)):
            raise pytest.UsageError(f"the folder of {self.path} does not exist; create it for the baseline of gpumem")
        if self.path and os.path.exists(self.path) and not os.path.isfile(self.path):
            raise pytest.UsageError(f"{self.path} is not a regular file; name another one for the baseline of gpumem")
        is_new = self.path and not os.path.exists(self.path)
        if (is_new or self.updates) and not hasattr(config, "workerinput"):
            # This must not fail after all tests.
            try:
                self._write("")
                os.remove(self._new_path)
            except OSError as why:
                raise pytest.UsageError(f"the baseline of gpumem cannot be written: {why}") from None
        if self.path and os.path.exists(self.path):
            try:
                with open(self.path) as file:
                    self.baseline = {name: int(size) for name, size in json.load(file).items()}
            except (OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError) as why:
                if self.updates:
                    return
                raise pytest.UsageError(f"{self.path} is not a baseline of gpumem: {why}; --gpumem-update writes it again") from None

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item):
        # The closest mark of each name counts, as with other marks.
        closest = map(item.get_closest_marker, ("limit_gpu_memory", "limit_gpu_leaks"))
        marks = [mark for mark in closest if mark is not None]
        if not (marks or self.prints or self.path):
            yield
            return
        limits = [(mark.name, *_arguments(mark)) for mark in marks]
        devices = {device for _, _, device, _ in limits} or {None}
        traces = {device: GPUMemTrace(silent=True, ctx=item.nodeid, device=device, all_threads=True) for device in devices}
        outcome = yield
        for trace in traces.values():
            trace.stop()
        first = next(iter(traces.values()))
        if first.is_measured:
            item.user_properties.append((_KEY, first.peak))
        # The result of the test itself counts more.
        if outcome.excinfo is None:
            try:
                failures = list(self._failures(item.nodeid, limits, traces, first))
            except Exception as error:
                # So ended a function that filters.
                outcome.force_exception(error)
                return
            if failures:
                outcome.force_exception(pytest.fail.Exception("\n".join(failures), pytrace=False))

    def _failures(self, test, limits, traces, first):
        for limit in limits:
            failure = _failure(*limit, traces[limit[2]])
            if failure:
                yield failure
        if not first.is_measured:
            if self.path:
                yield "the GPU memory of the test cannot be compared with the baseline, because it was not measured"
            return
        before = self.baseline.get(test)
        if before is not None and not self.updates and first.peak > before + _TOLERANCE:
            yield f"the test needed {text(first.peak)} of GPU memory, and {text(before)} in {self.path}"

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self.found.update((report.nodeid, value) for key, value in report.user_properties if key == _KEY)

    def pytest_sessionfinish(self, session):
        # With xdist, the workers' reports reach the first process.
        if self.path and not hasattr(self.config, "workerinput") and self.found and (self.updates or not os.path.exists(self.path)):
            # Other tests may not have run.
            rows = dict(sorted({**self.baseline, **self.found}.items()))
            try:
                self._write(json.dumps(rows, indent=1) + "\n")
                os.replace(self._new_path, os.path.realpath(self.path))
            except OSError as why:
                self.failed = f"the baseline of gpumem is not written: {why}"
                session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    @property
    def _new_path(self):
        return os.path.realpath(self.path) + ".new"

    def _write(self, content):
        """Writes the file that replaces the baseline once it is complete."""
        try:
            with open(self._new_path, "w") as file:
                file.write(content)
        except OSError:
            with contextlib.suppress(OSError):
                os.remove(self._new_path)
            raise

    def pytest_terminal_summary(self, terminalreporter):
        if self.failed:
            terminalreporter.write_line(self.failed, red=True)
        new = self.found.keys() - self.baseline.keys() if self.baseline and not self.updates else ()
        if new:
            terminalreporter.write_line(f"{len(new)} tests are not in {self.path}; --gpumem-update adds them")
        if not self.prints or self.config.getoption("collectonly", False):
            return
        terminalreporter.section("GPU memory")
        for name, peak in sorted(self.found.items(), key=lambda row: -row[1])[: self.most]:
            terminalreporter.write_line(f"{text(peak):>12}  {name}")
        if not self.found:
            terminalreporter.write_line("nothing was measured")


def _arguments(mark):
    def read(size, device=None):
        return parse(size), device, None

    def read_leaks(size, device=None, filter_fn=None):
        if filter_fn is not None and not callable(filter_fn):
            raise TypeError
        return parse(size), device, filter_fn

    try:
        return (read_leaks if mark.name == "limit_gpu_leaks" else read)(*mark.args, **mark.kwargs)
    except TypeError:
        filters = " and filter_fn=f for those leaks that count" if mark.name == "limit_gpu_leaks" else ""
        raise pytest.UsageError(
            f"write @pytest.mark.{mark.name}('512 MB'), with device=1 for another GPU than the current one{filters}"
        ) from None


def _failure(name, limit, device, filter_fn, trace):
    if not trace.is_measured:
        return f"the limit of {text(limit)} was not checked, because GPU memory cannot be measured here"
    if not trace.is_exact:
        return f"the limit of {text(limit)} was not checked, because allocations were missed"
    if name == "limit_gpu_memory":
        peak = trace.peak
        return f"the test needed {text(peak)} of GPU memory, which is more than its limit of {text(limit)}" if peak > limit else None
    if filter_fn is None:
        used, rows = trace.used, ()
    else:
        rows = [row for row in trace.live() if filter_fn(row)]
        used = sum(row["bytes"] for row in rows)
    if used <= limit:
        return None
    places = collections.Counter()
    for row in rows or trace.live():
        places[row["line"] or row["library"] or "a line that is not known"] += row["bytes"]
    where = "".join(f"\n  {text(size)} from {place}" for place, size in places.most_common(_MOST_PLACES))
    if len(places) > _MOST_PLACES:
        where += f"\n  and {len(places) - _MOST_PLACES} more places"
    return f"{text(used)} more of GPU memory is in use after the test, and its limit is {text(limit)}:{where}"

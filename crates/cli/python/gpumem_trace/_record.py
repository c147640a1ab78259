"""Recordings of a part of the program, which the command `gpumem` reads."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import weakref

from . import _pytorch
from ._library import Error, check, library, unlocked


# The code that records the history of PyTorch's allocator.
_history = {}
# The recording that has started and not ended.
_running = None


class record:
    """Records the whole process, with the lines that allocate, while a `with` block runs.

        with gpumem_trace.record(layers=True) as recording:
            step()
        print(recording.report())       # what `gpumem report` prints
        recording                       # at the end of a notebook's cell: the memory over time as a picture

    path: the file of the recording. Without it, the file is deleted together with the object.
    layers: whether the layers and classes of PyTorch's tensors are recorded. It needs PyTorch 2.10.

    A process is recorded once at a time, and under `gpumem run` it already is: the start then raises an error. The reports need the command
    `gpumem`, which is in the same wheel.
    """

    def __init__(self, path=None, layers=False):
        if path is None:
            folder = tempfile.mkdtemp(prefix="gpumem-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            path = os.path.join(folder, "part.capture")
        self.path = os.fspath(path)
        # `is_complete` says whether there is a recording that has ended.
        self._layers, self._was_kept, self.is_complete = layers, False, False

    def start(self):
        global _running
        if _running is not None:
            raise Error(f"cannot record to {self.path}: this process is recorded already, to {_running.path}")
        if _pytorch.is_pending and "torch" in sys.modules:
            _pytorch.observe()
        file = os.fsencode(os.path.abspath(self.path))
        # The history takes longer to start, and would be missing at the start of the recording.
        has_history = "torch" in sys.modules
        if has_history:
            self._start_history(file)
        why = unlocked().gpumem_record(file)
        if why is not None and has_history:
            self._end_history()
            with contextlib.suppress(OSError):
                os.remove(file + b".torch")
        check(why)
        _running, self.is_complete = self, False

    def _start_history(self, file):
        if not _history:
            exec(library().gpumem_torch_code().decode(), _history)
            _history["observe"] = _history["observe_modules"]
        _history["observe_modules"] = _history["observe"] if self._layers else None
        self._was_kept = _keeps_history()
        _history["begin"](file + b".torch", 500_000)

    def _end_history(self):
        if _history:
            _history["finish"]()
            if not self._was_kept and _keeps_history():
                sys.modules["torch"].cuda.memory._record_memory_history(enabled=None)

    def stop(self):
        global _running
        if _running is self:
            self._end_history()
            unlocked().gpumem_record_end()
            _running, self.is_complete = None, True

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.stop()

    def report(self, *options):
        """Returns what `gpumem report` prints, with its options: `recording.report("--table")`."""
        return _command("report", *options, self.path)

    def data(self):
        """Returns the report as a dict: what `gpumem report --json` prints."""
        return json.loads(self.report("--json"))

    def svg(self):
        """Returns a picture of the memory over time."""
        return self.report("--format", "svg")

    # A notebook shows this.
    _repr_svg_ = svg


def _keeps_history():
    """Returns whether PyTorch keeps the history of its allocator."""
    c = getattr(sys.modules.get("torch"), "_C", None)
    return getattr(c, "_cuda_isHistoryEnabled", bool)()


def _command(*words):
    """Runs the command `gpumem`, and returns what it prints."""
    scripts = sysconfig.get_path("scripts")
    command = shutil.which("gpumem", path=os.pathsep.join([scripts, os.environ.get("PATH", "")]))
    if command is None:
        raise Error(f"the command gpumem is neither in {scripts} nor in a folder of PATH; install gpumem-trace with pip")
    # The command is a program of its own.
    env = {name: value for name, value in os.environ.items() if name != "CUDA_INJECTION64_PATH"}
    done = subprocess.run([command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    if done.returncode:
        raise Error(f"`gpumem {' '.join(words)}` failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode()

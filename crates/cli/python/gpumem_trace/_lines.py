"""The memory of each line of a function."""

import functools
import linecache
import sys
import threading

from ._trace import _ASYNC_GENERATOR, _COROUTINE, _GENERATOR, _code_and_name, _traced, exact, peak_of, show

_MIB = 2**20
# The calls of measured functions that run on a thread, the innermost last.
_running = threading.local()
# Held while a thread adds to the table of a function, or registers the tool.
_lock = threading.RLock()
# The id of this tool, after its registration.
_tool = None


class Table:
    """The memory of each line of a function: of one call, or of all (`function.table`).

    `rows` has a dict for each line that ran, in the order of the lines: `line`, `text`, `calls` (how often it ran), `used` (how much more memory
    is in use after it than before it) and `peak` (the most that was in use while it ran, compared with the start of the function). Sizes are in
    bytes; of several runs, `used` is the sum and `peak` the largest. `is_exact` is false if a number may be wrong.
    """

    def __init__(self, name, file):
        self.name, self.file, self.is_exact, self._lines = name, file, True, {}

    def _add(self, line, used, peak, calls=1):
        used_before, peak_before, calls_before = self._lines.get(line, (0, 0, 0))
        self._lines[line] = used_before + used, max(peak_before, peak), calls_before + calls

    def _join(self, other):
        with _lock:
            self.is_exact = self.is_exact and other.is_exact
            for line, (used, peak, calls) in other._lines.items():
                self._add(line, used, peak, calls)

    @property
    def rows(self):
        with _lock:
            lines = sorted(self._lines.items())
        return [
            {"line": line, "text": linecache.getline(self.file, line).rstrip(), "calls": calls, "used": used, "peak": peak}
            for line, (used, peak, calls) in lines
        ]

    def frame(self):
        """Returns the rows as a DataFrame of pandas."""
        import pandas

        return pandas.DataFrame(self.rows, columns=["line", "text", "calls", "used", "peak"])

    def __str__(self):
        known = "" if self.is_exact else ", not exact"
        lines = [f"{self.name} ({self.file}), in MB{known}:", f"{'used':>8} {'peak':>8} {'calls':>6}   line"]
        for row in self.rows:
            lines.append(f"{row['used'] / _MIB:8,.0f} {row['peak'] / _MIB:8,.0f} {row['calls']:6,} {row['line']:6}  {row['text']}")
        return "\n".join(lines)

    __repr__ = __str__


class Call:
    """Measures the lines of code while it runs in a `with` block. Passes their table to `done`, unless nothing is measured."""

    def __init__(self, code, name, device, done):
        self.code, self.done, self.table = code, done, Table(name, code.co_filename)
        self.trace = _traced(name, (code.co_filename, code.co_firstlineno), device)
        self.line, self.used, self.frame = None, 0, None

    def __enter__(self):
        # Events of lines make Python slow.
        self.is_on = self.trace.is_measured
        if not self.is_on:
            return
        if hasattr(sys, "monitoring"):
            # It only slows the lines of this code.
            _running.__dict__.setdefault("calls", []).append(self)
            _monitor(self.code)
        else:
            self.before = sys.gettrace()
            sys.settrace(self.of_all)

    def __exit__(self, *error):
        if not self.is_on:
            return
        if hasattr(sys, "monitoring"):
            _running.calls.pop()
        else:
            sys.settrace(self.before)
        self.next_line(None)
        self.trace.stop()
        if self.trace.is_measured:
            self.done(self.table)

    def of_all(self, frame, event, arg):
        """The trace function for Python before 3.12. A debugger's own one is called, too."""
        other = self.before(frame, event, arg) if self.before else None
        if frame.f_code is not self.code or self.line is not None:
            return other

        def own(frame, event, arg):
            nonlocal other
            if event == "line":
                self.next_line(frame.f_lineno)
            other = other(frame, event, arg) if other else None
            return own

        return own

    def next_line(self, line):
        values = self.trace._values(is_next=True)
        peak = self.used + peak_of(values)
        self.used += values.used
        self.table.is_exact = self.table.is_exact and exact(values)
        if line is None and not self.table._lines and self.line is None:
            # Newer versions of Python do not report the line of a function that has only one.
            self.line = self.code.co_firstlineno
        if self.line is not None:
            self.table._add(self.line, values.used, peak)
        self.line = line


def lines(func=None, *, ctx=None, device=None, silent=False):
    """Measures each line of a function. Each call prints a table at its end, unless it is `silent`.

        @gpumem_trace.lines
        def forward(x): ...

    `forward.table` is the sum of all calls so far.
    """
    if func is None:
        return functools.partial(lines, ctx=ctx, device=device, silent=silent)
    code, name = _code_and_name(func)
    if code is None or code.co_flags & (_GENERATOR | _COROUTINE | _ASYNC_GENERATOR):
        raise TypeError(f"the lines of {name} cannot be measured: it is not a plain function written in Python")
    name = ctx if ctx is not None else name

    @functools.wraps(func)
    def traced(*args, **kwargs):
        def done(table):
            traced.table._join(table)
            if not silent:
                show(f"{table}\n")

        with Call(code, name, device, done):
            return func(*args, **kwargs)

    traced.table = Table(name, code.co_filename)
    return traced


def _line_started(code, line):
    calls = _running.__dict__.get("calls")
    if calls and calls[-1].code is code:
        call, frame = calls[-1], id(sys._getframe(1))
        # The function may call itself without its decorator.
        call.frame = call.frame or frame
        if call.frame == frame:
            call.next_line(line)


def _monitor(code):
    """Lets Python report each line of the code."""
    global _tool
    monitoring = sys.monitoring
    with _lock:
        if _tool is None:
            free = [tool for tool in (4, 3, 1, 0, 2, 5) if monitoring.get_tool(tool) is None]
            if not free:
                raise RuntimeError("all tools of sys.monitoring are in use, so the lines of functions cannot be measured")
            monitoring.use_tool_id(free[0], "gpumem_trace")
            monitoring.register_callback(free[0], monitoring.events.LINE, _line_started)
            _tool = free[0]
        # A free-threaded Python stops all threads to change this.
        if monitoring.get_local_events(_tool, code) != monitoring.events.LINE:
            monitoring.set_local_events(_tool, code, monitoring.events.LINE)

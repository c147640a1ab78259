"""The guard and the decorator."""

import collections
import ctypes
import functools
import sys
import types

from . import _pytorch
from ._library import Error, Values, library, note, number, opened

# What `gpumem_trace_set` and `gpumem_trace_report` do.
_RESET, _START, _STOP, _ENTER, _LEAVE, _CLOSE, _CLOSE_LATEST = range(1, 8)
_REPORT, _REPORT_AND_RESET, _EXIT, _EXIT_AND_CLOSE, _TEXT = range(1, 6)

# The threads that `gpumem_trace_open` counts: the own one and those in no trace, those that run a task, or all.
_OWN, _TASK, _ALL = range(3)

# Flags of code objects.
_GENERATOR, _COROUTINE, _ITERABLE_COROUTINE, _ASYNC_GENERATOR = 0x20, 0x80, 0x100, 0x200

Data = collections.namedtuple("Data", ["used", "peaked"])
Data.__doc__ = "How much more memory is in use than at the start, and how much was needed on top of that. In MB, rounded towards 0."


# Libraries whose allocators keep freed memory.
_caches = {"torch": "PyTorch", "jax": "JAX", "cupy": "CuPy", "tensorflow": "TensorFlow"}
# The number of modules that were imported when this was last looked at.
_modules = 0


def _note_caches():
    """Says once for each library with a cache, before the first line, what the lines count."""
    global _modules
    if len(sys.modules) == _modules:
        return
    _modules = len(sys.modules)
    for module in [module for module in list(_caches) if sys.modules.get(module)]:
        # Another thread may say it at the same time.
        name = _caches.pop(module, None)
        if name is None or name == "PyTorch" and not _pytorch.is_pending:
            continue
        note(f"{name} keeps freed memory, and the lines count what it takes from the driver: a second call often shows 0 0")


def show(text):
    """Prints lines. What cannot be written is lost: the program that is measured must not fail because of it."""
    try:
        try:
            sys.stdout.write(text)
        except UnicodeError:
            encoding = getattr(sys.stdout, "encoding", None) or "ascii"
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except Exception:
        pass


def _bytes(text):
    """Returns the text as a function of the library takes it. None stays None."""
    if text is None:
        return None
    # Half of a surrogate pair, which a file name may contain, has no bytes, and C ends a text at a zero.
    return str(text).encode(errors="replace").replace(b"\0", b"?")


def peak_of(values):
    """Returns how many bytes more than at the start were in use at the worst moment."""
    return max(values.used, 0) + values.peaked


def exact(values):
    """Returns whether each allocation was counted."""
    return values.gauge == 0 and values.lost == values.untracked == 0


class _NotStarted:
    """What a trace lacks before its constructor has run."""

    def __get__(self, trace, owner):
        raise Error(f"this trace was not started: `{owner.__name__}.__init__` has to call `super().__init__()`")


class GPUMemTrace:
    """Traces the GPU memory of a piece of code, from the moment when it is created.

        with GPUMemTrace(ctx="load"):
            weights = load()        # prints: △Used Peaked MB:     20      0 (load: exit)

    `used` is how much more memory is in use than at the start. `peaked` is how much was needed on top of that at the worst moment. Both are
    exact to the byte if `is_exact`.

    ctx: the name of the trace in its reports. Without a name, the trace is known by its line.
    silent: if true, `report` prints nothing. It is an attribute that may be changed.
    on_exit_report: whether the end of a `with` block prints a report.
    device: the CUDA number of a GPU. The default is the current one.

    all_threads: whether it counts all threads of the process. By default it counts its own, and threads that are in no trace.

    A trace may be read on any thread. MB are 2^20 bytes.
    """

    silent, on_exit_report, ctx, _is_open = False, True, None, False
    # The id of the trace, and functions of the library.
    _trace = _c_set = _c_report = _c_read = _c_live = _NotStarted()

    def __init__(self, silent=False, ctx=None, on_exit_report=True, device=None, all_threads=False):
        if isinstance(silent, (str, bytes)):
            raise TypeError(f"the name of a trace is its argument ctx: GPUMemTrace(ctx={silent!r})")
        frame = sys._getframe(1)
        self._open(ctx, (frame.f_code.co_filename, frame.f_lineno), device, _ALL if all_threads else _OWN)
        self.silent, self.on_exit_report = silent, on_exit_report

    def _open(self, ctx, place, device, threads):
        if self._is_open:
            # The constructor was called before.
            self.__del__()
        self.ctx, self._trace = ctx, _open(_bytes(ctx), place, device, threads)
        self._is_open = True

    def __reduce_ex__(self, _):
        raise TypeError("a trace cannot be copied or stored")

    def __del__(self):
        if self._is_open:
            self._is_open = False
            self._c_set(self._trace, _CLOSE)

    def _set(self, what):
        self._c_set(self._trace, what)

    def _report(self, what, subctx=None):
        _show_report(self._c_report(self._trace, what, _bytes(subctx)))

    def report(self, subctx=None):
        """Prints the current values: `△Used Peaked MB:     10     15 (ctx: subctx)`."""
        if not self.silent:
            self._report(_REPORT, subctx)

    def report_n_reset(self, subctx=None):
        """Prints the current values, and then starts the measurement again from this reading."""
        if self.silent:
            self.reset()
        else:
            self._report(_REPORT_AND_RESET, subctx)

    def reset(self):
        """Starts the measurement again, if the trace is running."""
        self._set(_RESET)

    def start(self):
        """Starts the measurement: of a trace that is stopped, or again of one that is running."""
        self._set(_START)

    def stop(self):
        """Ends the measurement. The last values stay."""
        self._set(_STOP)

    def _values(self, is_next=False):
        values = Values()
        self._c_read(self._trace, ctypes.byref(values), is_next)
        return values

    def data(self):
        """Returns the current values in MB, rounded towards 0: `used, peaked = trace.data()`."""
        values = self._values()
        return Data(int(values.used / 2**20), int(values.peaked / 2**20))

    @property
    def used(self):
        """How many bytes more are in use than at the start."""
        return self._c_read(self._trace, None, 0)

    @property
    def peaked(self):
        """How many bytes were needed on top of `used` at the worst moment."""
        return self._values().peaked

    @property
    def peak(self):
        """How many bytes more than at the start were in use at the worst moment."""
        return peak_of(self._values())

    @property
    def is_exact(self):
        """Whether each allocation was counted. If not, the memory was sampled, or nothing is measured, or something was missed."""
        return exact(self._values())

    @property
    def is_measured(self):
        """Whether anything is measured. Without a GPU, all values are 0 and mean nothing."""
        return self._values().gauge != 3

    def live(self):
        """Returns what the trace's thread allocated on its device since the trace was created and is still in use, the largest first; with
        `all_threads`, what all threads allocated.

        Each is a dict with `bytes`, `device`, `line` (such as `train.py:31`), `caller` (the line that called the function of that line),
        `library`, `scopes` (the names of the open traces) and `frames` (the functions, the innermost first). The lines are known for 1 MB or
        more, with Python 3.11 to 3.15 on Linux, and are None otherwise. In a free-threaded Python 3.14 or later,
        other threads than the main one have them only with PYTHON_TLBC=0 in the environment; otherwise `line` is the file.
        """
        import json

        return json.loads(self._c_live(self._trace))

    def __enter__(self):
        self._c_set(self._trace, _START)
        return self

    def __exit__(self, *error):
        if self.on_exit_report and not self.silent:
            self._report(_EXIT)
        else:
            self._c_set(self._trace, _STOP)

    def __str__(self):
        return (self._c_report(self._trace, _TEXT, None) or b"").decode()

    __repr__ = __str__


# The ids of the lines that start traces, by file and line.
_places = {}


def _new_place(place):
    """Returns the id of a line. The first trace calls this, so it makes the functions of the library attributes of the class."""
    lib, this = library(), GPUMemTrace
    this._c_open, this._c_set, this._c_report = lib.gpumem_trace_open, lib.gpumem_trace_set, lib.gpumem_trace_report
    this._c_read, this._c_live = lib.gpumem_trace_read, lib.gpumem_trace_live
    file, line = place
    _places[place] = lib.gpumem_trace_place(_bytes(file), line)
    return _places[place]


def _open(ctx, place, device, threads):
    """Starts a trace of a file and a line, and returns its id. `ctx` is None or bytes."""
    if _pytorch.is_pending and "torch" in sys.modules:
        _pytorch.observe()
    place = _places.get(place) or _new_place(place)
    device = -1 if device is None else number(device)
    try:
        trace = GPUMemTrace._c_open(place, ctx, device, threads)
    except ctypes.ArgumentError as error:
        # So says ctypes when the recursion is too deep.
        raise RecursionError(str(error)) from None
    except BaseException:
        # A signal, such as Ctrl-C, came during the call, and its handler has raised this. Older versions of Python may call the handler
        # before the call.
        if sys.version_info >= (3, 11):
            GPUMemTrace._c_set(0, _CLOSE_LATEST)
        raise
    return trace or opened(trace)


def _traced(ctx, place, device, threads=_OWN):
    """Starts the trace of a decorated function."""
    trace = GPUMemTrace.__new__(GPUMemTrace)
    trace._open(ctx, place, device, threads)
    return trace


def _show_report(text):
    if text is not None:
        _note_caches()
        show(text.decode())


def gpu_mem_trace(func=None, *, ctx=None, device=None):
    """Traces each call of a function, a method, an async function or a generator, and prints a report at its end.

        @gpu_mem_trace
        def forward(x): ...         # △Used Peaked MB:     10     15 (forward: exit)

    An async function or a generator counts only while it runs itself: not what others do while it waits. Its report comes when it ends.
    `ctx` is the name in reports instead of the function's, and `device` the CUDA number of a GPU instead of the current one.
    """
    if func is None:
        return functools.partial(gpu_mem_trace, ctx=ctx, device=device)
    if isinstance(func, (staticmethod, classmethod)):
        return type(func)(gpu_mem_trace(func.__func__, ctx=ctx, device=device))
    if isinstance(func, type) or not callable(func):
        raise TypeError(f"{func!r} cannot be traced: write @gpu_mem_trace, or @gpu_mem_trace(ctx='name'), above a function")
    code, name = _code_and_name(func)
    name = ctx if ctx is not None else name
    flags = code.co_flags if code else 0
    place = (code.co_filename, code.co_firstlineno) if code else ("", 0)

    if flags & (_COROUTINE | _ITERABLE_COROUTINE):

        @functools.wraps(func)
        async def traced(*args, **kwargs):
            inner = func(*args, **kwargs)
            # The function itself decides how long its arguments live.
            del args, kwargs
            return await _steps(inner, _traced(name, place, device, _TASK))

    elif flags & _ASYNC_GENERATOR:

        @functools.wraps(func)
        async def traced(*args, **kwargs):
            trace, inner, ended = _traced(name, place, device, _TASK), func(*args, **kwargs), None
            del args, kwargs
            try:
                step = [_first(inner)]
                while ended is None:
                    try:
                        step.append(inner.asend((yield await _async_step(step, trace))))
                    except _Ended as end:
                        ended = end.args[0]
                    except GeneratorExit:
                        await _steps(inner.aclose(), trace, False)
                        raise
                    except BaseException as error:
                        if step:
                            # The step was not called, because the recursion is too deep.
                            raise
                        step.append(inner.athrow(error))
                if not isinstance(ended, StopAsyncIteration):
                    raise ended
            finally:
                ended = None
                trace.__exit__()

    elif flags & _GENERATOR:

        @functools.wraps(func)
        def traced(*args, **kwargs):
            inner = func(*args, **kwargs)
            del args, kwargs
            return (yield from _driven(inner, _traced(name, place, device, _TASK)))

    else:
        encoded = _bytes(name)

        @functools.wraps(func)
        def traced(*args, **kwargs):
            trace = _open(encoded, place, device, _OWN)
            try:
                return func(*args, **kwargs)
            finally:
                _show_report(GPUMemTrace._c_report(trace, _EXIT_AND_CLOSE, None))

    return traced


def _code_and_name(func):
    # This is what `inspect` does, whose import takes longer than all else here.
    while isinstance(func, functools.partial):
        func = func.func
    name = getattr(func, "__qualname__", type(func).__name__).rpartition("<locals>.")[2]
    return getattr(func, "__code__", None), name


class _Ended(Exception):
    """Wraps the exception with which a generator has ended, so that it differs from one that was thrown into it."""


def _step(next_step, trace):
    """Runs a step. Nothing here refers to what it yields, so that the program can free it."""
    trace._set(_ENTER)
    try:
        function, value = next_step.pop()
        return function(value)
    except BaseException as error:
        raise _Ended(error) from None
    finally:
        trace._set(_LEAVE)


def _first(inner):
    """Returns the first step of an async generator. The loop does not get to know it, because it would close it besides the one around it."""
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        return inner.__anext__()
    finally:
        sys.set_asyncgen_hooks(*hooks)


async def _async_step(next_step, trace):
    try:
        return await _steps(next_step.pop(), trace, False)
    except BaseException as error:
        raise _Ended(error) from None


def _driven(inner, trace, ends=True):
    """Runs a generator or a coroutine. The thread is in the scope of the trace during each step."""
    next_step, ended = [(inner.send, None)], None
    try:
        while ended is None:
            try:
                next_step.append((inner.send, (yield _step(next_step, trace))))
            except _Ended as end:
                ended = end.args[0]
            except GeneratorExit:
                trace._set(_ENTER)
                try:
                    inner.close()
                finally:
                    trace._set(_LEAVE)
                raise
            except BaseException as error:
                if next_step:
                    # The step was not called, because the recursion is too deep.
                    raise
                next_step.append((inner.throw, error))
        if isinstance(ended, StopIteration):
            return ended.value
        raise ended
    finally:
        # Its traceback refers to this frame.
        ended = None
        if ends:
            trace.__exit__()


@types.coroutine
def _steps(awaited, trace, ends=True):
    # What an async generator returns for a step is an iterator, not a coroutine, and has the same methods.
    return (yield from _driven(awaited, trace, ends))

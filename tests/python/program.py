"""Compares the stacks that gpumem reads with those that Python knows. Arguments: the library, the name of a check."""

import ctypes
import os
import sys
import sysconfig
import threading

# Read when the library begins: stacks go on in Python, and no device is needed.
os.environ.update(GPUMEM_BACKTRACE="python", GPUMEM_SIM="1GiB")
LIBRARY = sys.argv[1]
without_lock = ctypes.CDLL(LIBRARY)
with_lock = ctypes.PyDLL(LIBRARY)
for library in without_lock, with_lock:
    for name in "lines", "recorded":
        getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        getattr(library, name).restype = ctypes.c_size_t
    library.nanoseconds.restype = ctypes.c_double
    library.lines_of_another_thread.restype = ctypes.c_size_t
    library.lines_later.restype = ctypes.c_size_t
    library.lines_of_waiting.restype = ctypes.c_size_t
    library.is_waiting.restype = ctypes.c_bool
    library.lines_later.argtypes = [ctypes.c_uint64]

MOST = 128
buffer = threading.local()


def text(function):
    if not hasattr(buffer, "bytes"):
        buffer.bytes = ctypes.create_string_buffer(1 << 20)
    length = function(buffer.bytes, 1 << 20)
    return buffer.bytes.raw[:length].decode()


def has_lines():
    """Returns whether the lines of this thread can be read. Each thread of a free-threaded Python has its own instructions."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main or sys.version_info < (3, 14) or not sysconfig.get_config_var("Py_GIL_DISABLED")


def known(frame):
    """What Python knows of a frame and its callers. Its own walk: `traceback` would read source files."""
    lines, is_line_known = [], has_lines()
    while frame is not None and len(lines) < MOST:
        code = frame.f_code
        lines.append(f"{code.co_filename}:{frame.f_lineno if is_line_known else 0} {code.co_qualname}")
        frame = frame.f_back
    return lines


compared = 0


def compare(library=without_lock):
    """Each function of this file calls this on the line that is compared."""
    global compared
    found = text(library.lines).split("\n")
    # The innermost two are `text` and this function, on other lines.
    assert [line.rsplit(" ", 1)[1] for line in found[:2]] == ["text", "compare"], found[:2]
    expected = known(sys._getframe(1))[: MOST - 2]
    assert found[2:] == expected, "\n".join(["found", *found[2:], "expected", *expected])
    compared += 1


def recurse(depth):
    if depth == 0:
        compare()
    else:
        recurse(depth - 1)


class Model:
    def __init__(self):
        self.layers = [self.layer() for _ in range(2)]

    def layer(self):
        compare()
        return lambda: compare(with_lock)

    @property
    def size(self):
        compare()
        return 1

    def __call__(self, *, depth):
        return [layer() for layer in self.layers] + [
            recurse(depth)
        ]


def generated():
    compare()
    received = yield 1
    compare(with_lock)
    yield received


async def awaited(depth):
    compare()
    if depth:
        await awaited(depth - 1)


def called_by_native_code(a, b):
    compare()
    return (a > b) - (a < b)


def check_shapes():
    compare()
    model = Model()
    model(depth=3)
    model.size
    for _ in generated():
        compare()
    import asyncio

    asyncio.run(awaited(2))
    import functools

    sorted([3, 1, 2], key=functools.cmp_to_key(called_by_native_code))
    list(map(lambda number: compare(), range(2)))
    (
        compare(),
        [
            compare()
            for _ in range(2)
        ],
    )
    try:
        raise ValueError
    except ValueError:
        compare()
    finally:
        compare()
    exec(compile("compare()\n\n\ncompare(with_lock)", "<in a text>", "exec"))
    exec(compile("def größe():\n    compare()\ngröße()", "/tmp/größe 模型.py", "exec"))
    eval("compare()")
    for depth in 1, 30, 125, 126, 127, 128, 500:
        recurse(depth)
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda number: compare() or 0)
    callback(1)

    class OnDelete:
        def __del__(self):
            compare()

    OnDelete()


def check_threads():
    def work():
        for depth in range(50):
            recurse(depth % 20)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        recurse(5)
        assert without_lock.lines_of_another_thread() == 0
    for thread in threads:
        thread.join()


def check_reuse():
    """New code objects get the addresses of old ones. A recorded stack must have the new line."""
    global compared
    different, addresses = set(), set()
    for number in range(3000):
        lines = "\n" * (number % 7)
        code = compile(f"{lines}def f{number}():\n    return text(without_lock.recorded)\n", f"/tmp/{number}.py", "exec")
        scope = {"text": text, "without_lock": without_lock}
        exec(code, scope)
        function = scope[f"f{number}"]
        addresses.add(id(function.__code__))
        recorded = function()
        expected = f"f{number} at /tmp/{number}.py:{number % 7 + 2}"
        assert expected in recorded.split("\n"), f"{expected} is not in\n{recorded}"
        different.add(expected)
        compared += 1
        del function, scope, code
    assert len(addresses) < len(different) == 3000, "no address was reused"


def check_recorded():
    """A recorded stack begins in native code and goes on in Python, without the interpreter."""
    global compared
    def here():
        return text(without_lock.recorded), sys._getframe().f_lineno

    recorded, line = here()
    lines = recorded.split("\n")
    python = [at for at, text in enumerate(lines) if ".py:" in text]
    assert lines[python[0]].startswith("text at "), recorded
    assert lines[python[0] + 1] == f"check_recorded.<locals>.here at {__file__}:{line}", recorded
    assert lines[-1].startswith("<module> at "), recorded
    assert python == list(range(python[0], len(lines))) and python[0] > 0, recorded
    assert not any("PyEval" in text or "libpython" in text for text in lines), recorded
    numbers = {without_lock.number() for _ in range(10)}
    assert len(numbers) == 1
    assert numbers != {without_lock.number()}, "another line"
    compared += len(numbers)


def check_subinterpreters():
    try:
        import _interpreters as interpreters
    except ImportError:
        try:
            import _xxsubinterpreters as interpreters
        except ImportError:
            print("skipped: no subinterpreters")
            return
    before = text(without_lock.lines)
    created = interpreters.create()
    # `ctypes` cannot be imported there: the time of this code is what is compared, from another thread.
    reader = threading.Thread(target=lambda: [recurse(3) for _ in range(200)])
    reader.start()
    (getattr(interpreters, "exec", None) or interpreters.run_string)(created, "for i in range(100000): pass")
    reader.join()
    interpreters.destroy(created)
    assert text(without_lock.lines).split("\n")[1:] != [] and before


def check_end():
    """Threads that are in native code while the interpreter ends, and functions that it calls then."""
    import atexit

    for milliseconds in 5, 20, 60:
        threading.Thread(target=without_lock.lines_later, args=(milliseconds,), daemon=True).start()

    class AtTheEnd:
        def __del__(self, lines=without_lock.lines, buffer=ctypes.create_string_buffer(1 << 16)):
            lines(buffer, 1 << 16)

    sys.modules["kept"] = AtTheEnd()
    atexit.register(lambda: compare())
    atexit.register(lambda: without_lock.lines_later(10))


def check_deleted():
    """The end of the interpreter deletes the states of threads that are in native code. Such a thread has no functions."""
    import os

    states = []

    def work():
        get = ctypes.pythonapi.PyThreadState_Get
        get.restype = ctypes.c_void_p
        states.append(get())
        without_lock.lines_when_told()

    threading.Thread(target=work, daemon=True).start()
    while not without_lock.is_waiting():
        pass
    ctypes.pythonapi.PyThreadState_Clear(ctypes.c_void_p(states[0]))
    ctypes.pythonapi.PyThreadState_Delete(ctypes.c_void_p(states[0]))
    found = without_lock.lines_of_waiting()
    print(f"deleted: {found} functions", flush=True)
    # The interpreter must not end: it knows that thread no longer.
    os._exit(found != 0)


def check_busy_end():
    """Threads that read their stacks at every moment while the interpreter ends."""
    for _ in range(4):
        threading.Thread(target=without_lock.lines_for_ever, daemon=True).start()


def check_lines_of_code():
    """Each instruction of some modules has the line that Python finds in the table."""
    global compared
    import argparse, ast, asyncio.base_events, dataclasses, inspect, types, typing

    with_lock.line_at.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_ssize_t]
    with_lock.line_at.restype = ctypes.c_uint32
    codes = [compile(inspect.getsource(module), module.__file__, "exec") for module in
             (argparse, ast, asyncio.base_events, dataclasses, inspect, typing)]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        table, first = code.co_linetable, code.co_firstlineno
        for begin, end, line in code.co_lines():
            for offset in {begin, end - 2}:
                found = with_lock.line_at(table, len(table), first, offset)
                assert found == (line or 0), (code, offset, found, line)
                compared += 1


def check_monitored():
    """Coverage tools change what Python keeps of a code object. The lines stay right meanwhile, also without Python's lock."""
    if not hasattr(sys, "monitoring"):
        print("skipped: no sys.monitoring before 3.12")
        return
    monitoring, tool = sys.monitoring, 3
    monitoring.use_tool_id(tool, "gpumem")
    monitoring.register_callback(tool, monitoring.events.LINE, lambda code, line: None)
    threads = []
    for _ in range(2):
        threads.append(threading.Thread(target=lambda: [recurse(3) for _ in range(100)]))
        threads[-1].start()
    while any(thread.is_alive() for thread in threads):
        for events in monitoring.events.LINE, 0, monitoring.events.INSTRUCTION, 0:
            monitoring.set_events(tool, events)
            recurse(2)
    monitoring.free_tool_id(tool)


def check_cost():
    def deeper(depth):
        if depth:
            return deeper(depth - 1)
        python = [line for line in text(without_lock.recorded).split("\n") if ".py:" in line]
        assert len(python) >= 30, "what is not recorded costs nothing"
        return without_lock.nanoseconds()

    recursion = 30 - len(known(sys._getframe())) - 1
    print(f"cost: {deeper(recursion):.0f} ns for 30 functions")


getattr(sys.modules[__name__], f"check_{sys.argv[2]}")()
print(f"{sys.argv[2]}: {compared} stacks compared, Python {sys.version.split()[0]}")

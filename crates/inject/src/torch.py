# Runs in the recorded program, in its own namespace. Turns on the history of PyTorch's allocator, notes when backward passes run, and
# writes both to a file when the program ends. Prints nothing and lets no exception escape.
#
# The file contains JSON values, one per line. Until it is complete, its name ends in `.part`.

import atexit
import collections
import functools
import os
import sys
import time

# The id of the process in which `begin` ran. The child process of a `fork` inherits the handlers.
process = None
# The path of the file, as bytes.
path = None
# The number of events that PyTorch keeps for each device.
most = 0
is_on = False
# The function of `modules.py`, with `--modules`. If it fails, it returns the reason.
observe_modules = None
# The function of `modules.py` that undoes this.
leave_modules = None
# The reason why the modules are missing.
missing_modules = None
# True if the handlers for the end of the program are set.
is_awaited = False
# The latest backward passes: `[start, end, frames]`. The times are in microseconds, and the frames belong to the line that started the
# pass.
passes = collections.deque(maxlen=50_000)
# The frames of lines that started a pass, with their code objects, by the `id` and the instruction of each code object.
lines = {}
MOST_LINES = 1_000
MOST_FRAMES = 64
is_noting = False


def begin(to, entries):
    """Turns the history on as soon as PyTorch has initialised CUDA. `to` is the path of the file."""
    global process, path, most, is_on
    try:
        process, path, most, is_on = os.getpid(), to, entries, False
        await_end()
        if not look():
            # PyTorch is imported later, or is being imported now.
            sys.meta_path.insert(0, Watch)
    except BaseException as error:
        note(why=words(error))


def await_end():
    global is_awaited
    if is_awaited:
        return
    is_awaited = True
    atexit.register(finish)
    # Children that multiprocessing has started end with `os._exit`, which runs these first.
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, finish, exitpriority=100)


def look():
    """Turns the history on now, or when PyTorch initialises CUDA. Returns whether PyTorch has been imported."""
    cuda = sys.modules.get("torch.cuda")
    queue = getattr(cuda, "_queued_calls", None)
    if queue is None:
        return False
    if cuda._initialized:
        enable()
    else:
        # `torch.cuda._lazy_call` does the same, but it would wait for a lock that this thread may hold: this may run inside `_lazy_init`.
        queue.append((enable, ["gpumem run --torch\n"]))
    return True


class Watch:
    """A finder that is called for each import and never finds a module."""

    is_over = False

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        # The finder is not removed here, because the interpreter is iterating over the list of finders.
        if not cls.is_over and name.startswith("torch."):
            try:
                cls.is_over = look()
            except BaseException as error:
                cls.is_over = True
                note(why=words(error))
        return None


def enable():
    """Turns the history on. Runs when PyTorch has initialised CUDA."""
    global is_on, missing_modules
    try:
        if is_on or os.getpid() != process:
            return
        if Watch in sys.meta_path:
            sys.meta_path.remove(Watch)
        torch = sys.modules["torch"]
        memory = torch.cuda.memory
        backend = getattr(memory, "get_allocator_backend", lambda: "native")()
        if backend != "native":
            note(why="its allocator is %s, which keeps no history" % backend)
            return
        is_enabled = getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)()
        if not is_enabled:
            # The stacks of frees are not kept, because reports show the line that allocated.
            memory._record_memory_history("all", context="alloc", stacks="python", max_entries=most)
        is_on = True
        note_backward(torch)
        if observe_modules:
            missing_modules = observe_modules(torch)
        note(is_own=is_enabled)
    except TypeError as error:
        note(why="it is older than 2.1 (%s)" % words(error))
    except BaseException as error:
        note(why=words(error))


def note_backward(torch):
    """Notes when backward passes run and which lines start them, because the threads on which PyTorch runs them have no Python lines."""
    global is_noting
    graph = sys.modules.get("torch.autograd.graph")
    run = getattr(graph, "_engine_run_backward", None)
    code = getattr(run, "__code__", None)
    pass_of_thread = getattr(torch._C, "_current_graph_task_id", None)
    if is_noting or code is None or pass_of_thread is None:
        # PyTorch is older than 2.3.
        return
    is_noting = True
    first = {"filename": code.co_filename, "line": code.co_firstlineno, "name": code.co_name}

    @functools.wraps(run)
    def noted(*arguments, **keywords):
        # A pass that starts inside another one belongs to that one.
        if not is_on or pass_of_thread() != -1:
            return run(*arguments, **keywords)
        entry = [time.time_ns() // 1000, None, frames_from(sys._getframe(1), first)]
        passes.append(entry)
        try:
            return run(*arguments, **keywords)
        finally:
            entry[1] = time.time_ns() // 1000

    # torch.compile does not compile functions of this folder, and reports omit Python frames whose file does not end in `.py`.
    file = os.path.join(os.path.dirname(code.co_filename), "<gpumem>")
    noted.__code__ = noted.__code__.replace(co_filename=file)
    graph._engine_run_backward = noted
    if getattr(torch.autograd, "_engine_run_backward", None) is run:
        torch.autograd._engine_run_backward = noted


def frames_from(frame, first):
    """Returns `first` and the frames from this one on, in the form of PyTorch. Equal lines have the same list."""
    key, at = [], frame
    while at is not None and len(key) < 2 * MOST_FRAMES:
        key += id(at.f_code), at.f_lasti
        at = at.f_back
    key = tuple(key)
    known = lines.get(key)
    if known is None:
        if len(lines) >= MOST_LINES:
            lines.clear()
        # As long as a code object is kept, no other one has the same `id`.
        frames, codes = [first], []
        while frame is not None and len(codes) < MOST_FRAMES:
            code = frame.f_code
            codes.append(code)
            frames.append({"filename": code.co_filename, "line": frame.f_lineno or 0, "name": code.co_name})
            frame = frame.f_back
        known = lines[key] = frames, codes
    return known[0]


def words(error):
    text = str(error).split("\n")[0][:300]
    return "%s: %s" % (type(error).__name__, text) if text else type(error).__name__


def version():
    return str(getattr(sys.modules.get("torch"), "__version__", ""))


def begun():
    """Opens a new file, which its owner can read whatever the umask of the program is."""
    # Another process may have put a pipe there. The open must not wait for it.
    file = open(path + b".part", "w", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666))
    os.fchmod(file.fileno(), (os.fstat(file.fileno()).st_mode & 0o777) | 0o600)
    return file


def note(**what):
    """Replaces the content of the file by one line for the report."""
    try:
        import json

        if os.getpid() != process:
            return
        with begun() as file:
            file.write(json.dumps({"torch": version(), **what}) + "\n")
    except BaseException:
        # For example, the disk is full.
        pass


def finish():
    """Writes the history: at the end of the program, or when the recording ends."""
    global process, is_on
    if os.getpid() != process:
        return
    try:
        if is_on:
            is_on = False
            write(sys.modules["torch"])
        elif getattr(sys.modules.get("torch.cuda"), "_initialized", False) and not os.path.exists(path + b".part"):
            note(why="it initialised CUDA before gpumem could request its history")
    except BaseException as error:
        note(why=words(error))
    try:
        os.rename(path + b".part", path)
    except OSError:
        # PyTorch was not used.
        pass
    # The recording may have ended before the program. Then this runs again at the end of the program, and must do nothing.
    process = None
    if Watch in sys.meta_path:
        sys.meta_path.remove(Watch)
    if leave_modules:
        leave_modules()


def write(torch):
    import json

    is_enabled = getattr(torch._C, "_cuda_isHistoryEnabled", lambda: True)()
    # References are searched before this code creates more objects. Objects of the program may raise anything.
    try:
        held = holders(torch) if observe_modules else []
        if observe_modules:
            mark_gradients(torch)
    except Exception:
        held = []
    snapshot = torch.cuda.memory._snapshot()
    with begun() as file:
        put = file.write
        line = lambda value: put(json.dumps(value) + "\n")
        line({"torch": version(), "is_enabled": is_enabled, "most": most, "missing_modules": missing_modules})
        for times, tensors in marks if observe_modules else []:
            line({"mark": times, "tensors": tensors})
        for device, address, words in held:
            line({"held": address, "on": device, "by": words})
        # Frames have ids by object, because several events share an object and the snapshot keeps it. They also have ids by content,
        # because the same line at two times is two objects.
        frame_objects, frame_lines, stack_objects, stack_lines, module_numbers = {}, {}, {}, {}, {}

        def frame(known):
            number = frame_objects.get(id(known))
            if number is None:
                content = known["filename"], known["line"], known["name"]
                number = frame_lines.get(content)
                if number is None:
                    number = frame_lines[content] = len(frame_lines)
                    line({"frame": number, "file": content[0], "line": content[1], "name": content[2]})
                frame_objects[id(known)] = number
            return number

        def stack(frames):
            number = stack_objects.get(id(frames))
            if number is None:
                content = tuple(map(frame, frames))
                number = stack_lines.get(content)
                if number is None:
                    number = stack_lines[content] = len(stack_lines) + 1
                    line({"stack": number, "frames": content})
                stack_objects[id(frames)] = number
            return number

        def module(path):
            number = module_numbers.get(path)
            if number is None:
                number = module_numbers[path] = len(module_numbers) + 1
                line({"module": number, "path": path})
            return number

        times = {}
        for begin, end, frames in list(passes):
            times.setdefault(stack(frames), []).append((begin, end or time.time_ns() // 1000))
        for number, of_stack in times.items():
            line({"passes": of_stack, "from": number})
        settings = snapshot.get("allocator_settings") or {}
        line({"settings": {key: value for key, value in settings.items() if key != "PYTORCH_CUDA_ALLOC_CONF"}})
        figures = "allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current", "reserved_bytes.all.peak"
        for device, trace in enumerate(snapshot["device_traces"]):
            if not trace and not any(segment["device"] == device for segment in snapshot["segments"]):
                continue
            try:
                stats = torch.cuda.memory.memory_stats(device)
                said = [stats[name] for name in figures]
            except Exception:
                said = None
            line({"device": device, "said": said})
            for event in trace:
                frames = event.get("frames")
                number = stack(frames) if frames else 0
                address = event.get("addr")
                if address is None:
                    address = 0
                path = event.get("user_metadata")
                put(
                    '["%s",%d,%d,%d,%d,%d,%d]\n'
                    % (event["action"], address, event["size"], event["stream"], event.get("time_us", 0), number,
                       module(path) if path and observe_modules else 0)
                )
            for segment in snapshot["segments"]:
                if segment["device"] != device:
                    continue
                about = {"segment": segment["address"], "bytes": segment["total_size"], "stream": segment.get("stream", 0)}
                about.update(is_expandable=bool(segment.get("is_expandable")), pool=segment.get("segment_pool_id"))
                line(about)
                address = segment["address"]
                for block in segment["blocks"]:
                    frames = block.get("frames")
                    number = stack(frames) if frames else 0
                    put(
                        '["%s",%d,%d,%d,%d]\n'
                        % (block["state"], address, block["size"], block.get("requested_size", block["size"]), number)
                    )
                    address += block["size"]
        line({"end": True})
        file.flush()
        del snapshot

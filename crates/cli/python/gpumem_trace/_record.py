"""Recordings of a part of the program, which the command `gpumem` reads."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import weakref

from . import _pytorch
from ._library import Error, check, library, note, unlocked

# The code that records the history of PyTorch's allocator.
_history = {}
# The recording that has started and not ended, as a weak reference. The lock is held while it starts or ends.
_running, _lock = None, threading.Lock()


def _forget():
    """In the child of a fork, nothing is recorded, and another thread may have held the lock."""
    global _running, _lock
    _running, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _remove(folder, process):
    # A child of a fork inherits the object, too.
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


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
            weakref.finalize(self, _remove, folder, os.getpid())
            path = os.path.join(folder, "part.capture")
        self.path = os.path.abspath(os.fsdecode(path))
        if "\0" in self.path:
            raise ValueError(f"{self.path!r} is not a path: it contains a null character")
        # `is_complete` says whether there is a recording that has ended.
        self._layers, self.is_complete = layers, False

    def start(self):
        global _running
        with _lock:
            known = _running and _running()
            if known is not None:
                raise Error(f"cannot record to {self.path}: this process is recorded already, to {known.path}")
            if _running is not None:
                # Nobody can end it any more.
                _end()
            # Ctrl-C may come at any line.
            _running, self.is_complete = weakref.ref(self), False
            try:
                self._start()
            except BaseException:
                _end()
                raise

    def _start(self):
        if "torch" in sys.modules:
            if _pytorch.is_pending:
                _pytorch.observe()
            # The history takes longer to start, and would be missing at the start of the recording.
            self._start_history(os.fsencode(self.path) + b".torch")
        why = unlocked().gpumem_record(os.fsencode(self.path))
        if why is not None:
            _end_history()
            with contextlib.suppress(OSError):
                os.remove(self.path + ".torch")
        check(why)

    def _start_history(self, file):
        if "observe" not in _history:
            exec(library().gpumem_torch_code().decode(), _history)
            _history["observe"] = _history["observe_modules"]
        _history["observe_modules"] = _history["observe"] if self._layers else None
        _history["was_kept"] = _keeps_history()
        _history["begin"](file, 500_000)

    def stop(self):
        with _lock:
            if _running is not None and _running() is self:
                _end()
                self.is_complete = True

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.stop()

    def report(self, *options):
        """Returns what `gpumem report` prints, with its options: `recording.report("--table")`."""
        if not self.is_complete:
            is_on = _running is not None and _running() is self
            raise Error("the recording has not ended; leave its `with` block first" if is_on else "nothing was recorded yet")
        return _command("report", *options, self.path)

    def data(self):
        """Returns the report as a dict: what `gpumem report --json` prints."""
        return json.loads(self.report("--json"))

    def svg(self):
        """Returns a picture of the memory over time."""
        return self.report("--format", "svg")

    # A notebook shows this.
    _repr_svg_ = svg


def _end():
    """Ends the recording that runs, if it has started."""
    global _running
    try:
        _end_history()
    finally:
        try:
            unlocked().gpumem_record_end()
        finally:
            _running = None


def _end_history():
    if "was_kept" in _history:
        _history["finish"]()
        if not _history.pop("was_kept") and _keeps_history():
            sys.modules["torch"].cuda.memory._record_memory_history(enabled=None)


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
    why = done.stderr.decode(errors="replace").strip()
    if done.returncode and not done.stdout:
        raise Error(f"`gpumem {' '.join(words)}` failed: {why}")
    if why:
        # The recording is not complete, for example because the disk is full.
        note(why)
    return done.stdout.decode()

"""Loads the library, which is the one that `gpumem run` puts into programs, and declares its functions."""

import ctypes
import functools
import os
import sys

VERSION = 5
# The library, after the first use.
_loaded = None


class Error(RuntimeError):
    """A reading or a trace that is not possible. The text says why."""


class Values(ctypes.Structure):
    _fields_ = [
        ("used", ctypes.c_int64),
        ("peaked", ctypes.c_uint64),
        ("lost", ctypes.c_uint64),
        ("untracked", ctypes.c_uint64),
        ("gauge", ctypes.c_uint32),
    ]


def library():
    """Returns the library, which is loaded at the first call."""
    global _loaded
    if _loaded is None:
        _loaded = _load()
    return _loaded


@functools.lru_cache(maxsize=None)
def unlocked():
    """Returns the functions that take long: Python's lock is released while they run."""
    lib = ctypes.CDLL(library()._name)
    lib.gpumem_record.argtypes, lib.gpumem_record.restype = [ctypes.c_char_p], ctypes.c_char_p
    lib.gpumem_record_end.argtypes, lib.gpumem_record_end.restype = [], None
    return lib


def _path():
    """Returns the path of the library. A program under `gpumem run` uses the one that the driver loads into it, so that it is recorded once."""
    injected = os.environ.get("CUDA_INJECTION64_PATH", "")
    if os.path.basename(injected).startswith("libgpumem_inject") and os.path.exists(injected):
        return injected
    return os.environ.get("GPUMEM_LIBRARY") or os.path.join(os.path.dirname(__file__), "libgpumem_inject.so")


def _load():
    path = _path()
    try:
        # These functions are short: Python's lock is not released.
        lib = ctypes.PyDLL(path)
        version = lib.gpumem_trace_version()
    except (OSError, AttributeError) as why:
        raise Error(f"gpumem's library {path} cannot be used: {why}. Install the package again for this machine.") from None
    if version != VERSION:
        raise Error(f"`gpumem run` and the package gpumem-trace have different versions: the command loaded {path}. Install the same version.")
    text, block, size = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint64
    lib.gpumem_why.argtypes, lib.gpumem_why.restype = [], text
    # Without the types of arguments, a call takes half the time: a small integer is an int, bytes are a text, and None is null.
    lib.gpumem_trace_read.restype, lib.gpumem_trace_set.restype = ctypes.c_int64, None
    lib.gpumem_trace_report.restype = lib.gpumem_trace_live.restype = text
    lib.gpumem_memory.argtypes, lib.gpumem_memory.restype = [ctypes.c_int32, ctypes.POINTER(size * 3)], text
    lib.gpumem_devices.argtypes, lib.gpumem_devices.restype = [ctypes.POINTER(ctypes.c_uint32)], text
    lib.gpumem_preload.argtypes, lib.gpumem_preload.restype = [], text
    numbers = ctypes.POINTER(size)
    lib.gpumem_torch_code.argtypes, lib.gpumem_torch_code.restype = [], text
    lib.gpumem_tensors_attach.argtypes = [ctypes.c_uint32, size, numbers, ctypes.c_size_t]
    lib.gpumem_tensors_settle.argtypes = [ctypes.c_uint32, ctypes.c_int64, numbers, ctypes.c_size_t]
    lib.gpumem_tensors_attach.restype = lib.gpumem_tensors_settle.restype = text
    lib.gpumem_tensors_events.argtypes, lib.gpumem_tensors_events.restype = [ctypes.c_uint32], ctypes.c_int64
    lib.gpumem_sim_alloc.argtypes, lib.gpumem_sim_alloc.restype = [ctypes.c_uint32, size], block
    lib.gpumem_sim_free.argtypes, lib.gpumem_sim_free.restype = [block], None
    return lib


def opened(result):
    """Returns what a function has returned: an id or a pointer. Raises the error if it is 0 or null."""
    if not result:
        raise Error(library().gpumem_why().decode())
    return result


def number(device):
    """Returns what the library takes for a device: its CUDA number, or -1 for the current one."""
    if device is None:
        return -1
    if not isinstance(device, int) or not 0 <= device < 2**31:
        raise Error(f"{device!r} is not the CUDA number of a GPU")
    return device


def check(why):
    """Raises the error that a function has returned."""
    if why is not None:
        raise Error(why.decode())


def note(text):
    """Prints a notice. The program that is measured must not fail because of it."""
    try:
        print(f"gpumem: {text}", file=sys.stderr)
    except Exception:
        pass

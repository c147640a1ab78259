# Stands in for PyTorch: the functions that gpumem calls, and tensors in a segment of 20 MiB.
import ctypes
import os
import types

from standin_cuda import MIB, call, enter

__version__ = "2.11.0+cu130"
# The library finds the driver's functions there.
ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
lib = ctypes.CDLL(os.environ["ALLOCATOR"])
lib.segment.restype = ctypes.c_uint64
for function in (lib.release, lib.tensor, lib.drop):
    function.argtypes, function.restype = [ctypes.c_uint64] * 2, None
lib.segment.argtypes = [ctypes.c_uint64]

version = types.SimpleNamespace(cuda="13.0")
calls, segments = [], []
is_ready = False


def init():
    global is_ready
    if not is_ready:
        assert call("cuInit", 0) == 0
        enter(0)
        for lazy in calls:
            lazy()
        is_ready = True


def new_segment():
    init()
    segments.append({"device": 0, "address": lib.segment(20 * MIB), "total_size": 20 * MIB, "is_expandable": False, "blocks": []})
    return segments[-1]


def tensor(segment, at, bytes, rounded):
    lib.tensor(segment["address"] + at, bytes)
    segment["blocks"].append({"size": rounded, "state": "active_allocated"})


def snapshot():
    settings = {"max_split_size": -1, "roundup_power2_divisions": {"1": 0, "256": 0}}
    return {"segments": segments, "device_traces": [], "allocator_settings": settings}


cuda = types.SimpleNamespace(
    memory=types.SimpleNamespace(_snapshot=snapshot),
    is_initialized=lambda: is_ready, _lazy_call=calls.append, device_count=lambda: 1, init=init, is_available=lambda: True
)

"""fastai's queries. Like fastai's, the functions return zeros if there is no GPU or it cannot be read; `GPUMemory` is in MB of 2^20 bytes."""

import collections
import ctypes
import functools
import gc
import sys

from . import _pytorch
from ._library import Error, check, library, number

GPUMemory = collections.namedtuple("GPUMemory", ["total", "free", "used"])
GPUMemory.__doc__ = "The memory of a GPU in MB, rounded down."


def b2mb(num):
    """Converts bytes to MB of 2^20 bytes, rounded down."""
    return int(num / 2**20)


def _bytes(id):
    sizes = (ctypes.c_uint64 * 3)()
    check(library().gpumem_memory(number(id), ctypes.byref(sizes)))
    return tuple(sizes)


def gpu_mem_get(id=None):
    """Returns the total, free and used memory of a GPU in MB: of the one with this CUDA number, or of the current one."""
    number(id)
    try:
        return GPUMemory(*map(b2mb, _bytes(id)))
    except Error:
        # Zeros mean that there is no GPU, and not that there is no such one.
        if _count():
            raise
        return GPUMemory(0, 0, 0)


def gpu_mem_get_all():
    """Returns the memory of all GPUs in MB. Empty without a GPU."""
    return [gpu_mem_get(id) for id in range(_count())]


def gpu_mem_get_free():
    """Returns the free memory of the current GPU in MB, without what PyTorch keeps in its cache."""
    return gpu_mem_get().free


def gpu_mem_get_free_no_cache():
    """Returns the free memory of the current GPU in MB, after PyTorch's cache was emptied."""
    _empty_cache()
    return gpu_mem_get().free


def gpu_mem_get_used():
    """Returns the memory of the current GPU in MB that any process uses."""
    return gpu_mem_get().used


def gpu_mem_get_used_fast(gpu_handle):
    """Returns what `gpu_mem_get_used` does for the GPU with this CUDA number. In fastai it is faster than the others; here all are as fast."""
    return gpu_mem_get(gpu_handle).used


def gpu_mem_get_used_no_cache():
    """Returns the memory of the current GPU in MB that any process uses, after PyTorch's cache was emptied."""
    _empty_cache()
    return gpu_mem_get().used


def gpu_with_max_free_mem():
    """Returns the number of the GPU with the most free memory, and this memory in MB. `(None, 0)` without a GPU."""
    free = [memory.free for memory in gpu_mem_get_all()]
    return (free.index(max(free)), max(free)) if free and max(free) else (None, 0)


def preload_pytorch():
    """Creates the CUDA context, and PyTorch's if it is imported, so that the first trace does not count what they take."""
    try:
        check(library().gpumem_preload())
    except Error:
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.init()
        _pytorch.observe()
        torch.ones((1, 1), device="cuda")


def gpu_mem_restore(func):
    """Frees what a traceback holds, if the function fails because memory ran out: the exception then has no frames with tensors."""

    flags = getattr(getattr(func, "__code__", None), "co_flags", 0)
    if flags & 0x3A0:
        raise TypeError(f"{func.__qualname__} has to be a plain function, not an async function or a generator")

    @functools.wraps(func)
    def restored(*args, **kwargs):
        try:
            return func(*args, **kwargs)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            import traceback

            traceback.clear_frames(error.__traceback__)
            kept = error
        try:
            raise kept.with_traceback(None)
        finally:
            del kept
            gc.collect()
            _empty_cache()

    return restored


def _is_out_of_memory(error):
    return isinstance(error, MemoryError) or "out of memory" in str(error).lower() or type(error).__name__ == "OutOfMemoryError"


def _count():
    count = ctypes.c_uint32()
    try:
        check(library().gpumem_devices(ctypes.byref(count)))
    except Error:
        return 0
    return count.value


def _empty_cache():
    try:
        torch = sys.modules["torch"]
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    except Exception:
        # PyTorch is not imported, or only in part.
        pass

"""PyTorch's tensors as parts of a pool, so that a trace counts them and not PyTorch's cache."""

import ctypes
import functools
import sys

from ._library import check, library, note

# Whether it was not yet tried to observe PyTorch's allocator, and whether PyTorch calls `observe` when it initialises CUDA.
is_pending, _is_waiting = True, False

# The kinds of memory that the library takes.
_SEGMENT, _EXPANDABLE, _TENSOR, _AWAITING = range(4)


def observe(is_initializing=False):
    """Makes traces count PyTorch's tensors, once PyTorch has initialised CUDA. Before that, PyTorch calls this when it does."""
    global is_pending, _is_waiting
    torch = sys.modules.get("torch") if is_pending else None
    try:
        # While PyTorch is being imported, it has no such module.
        cuda = getattr(torch, "cuda", None)
        if not hasattr(cuda, "is_initialized"):
            return
        # PyTorch calls this before it says that it is initialised.
        if not (is_initializing or cuda.is_initialized()):
            if not _is_waiting and hasattr(cuda, "_lazy_call"):
                _is_waiting = True
                cuda._lazy_call(functools.partial(observe, is_initializing=True))
            return
        is_pending = False
        why = _attached(torch)
    except Exception as error:
        is_pending, why = False, error
    if why is not None:
        note(f"PyTorch's tensors are not seen, because {why}; lines count what it takes from the driver")


def _attached(torch):
    """Attaches to the allocator. Returns the reason if it is not possible."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not (2, 2) <= version < (2, 16):
        return f"this version of gpumem-trace knows PyTorch 2.2 to 2.15 and not {torch.__version__}"
    if torch.version.cuda is None:
        return "it was not built for CUDA"
    lib, devices = library(), torch.cuda.device_count()
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    divisions = sorted((int(size), count) for size, count in (settings.get("roundup_power2_divisions") or {}).items())
    divisions = [count for _, count in divisions] if any(count > 1 for _, count in divisions) else []
    # PyTorch writes the largest number as -1.
    split = settings.get("max_split_size", -1)
    check(lib.gpumem_tensors_attach(devices, split & (2**64 - 1), (ctypes.c_uint64 * len(divisions))(*divisions), len(divisions)))
    while True:
        # A segment that another thread gets after this is known by its event.
        events = {device: lib.gpumem_tensors_events(device) for device in range(devices)}
        if all(count < 0 for count in events.values()):
            return None
        held = {device: [] for device in events}
        for segment in torch.cuda.memory._snapshot()["segments"]:
            held[segment["device"]].extend(_rows(segment))
        for device, count in events.items():
            if count >= 0:
                rows = [number for row in held[device] for number in row]
                check(lib.gpumem_tensors_settle(device, count, (ctypes.c_uint64 * len(rows))(*rows), len(rows) // 3))


def _rows(segment):
    """Yields what a segment and its blocks hold, as an address, a size and a kind."""
    address = segment["address"]
    yield address, segment["total_size"], _EXPANDABLE if segment.get("is_expandable") else _SEGMENT
    for block in segment["blocks"]:
        if block["state"] != "inactive":
            yield address, block["size"], _TENSOR if block["state"] == "active_allocated" else _AWAITING
        address += block["size"]

"""The memory of a simulated GPU, for tests without a real one. The environment says how large it is: `GPUMEM_SIM=16GiB`."""

from ._library import library, opened


class Block:
    """A block of simulated memory, from `alloc`. It is freed when nothing refers to it, or by `free`."""

    def __init__(self, device, bytes):
        self._free = library().gpumem_sim_free
        self._block = opened(library().gpumem_sim_alloc, device, bytes)
        self.bytes = bytes

    def free(self):
        """Frees the block. Does nothing if it is freed."""
        block, self._block = self._block, None
        if block is not None:
            self._free(block)

    def __del__(self):
        if getattr(self, "_block", None) is not None:
            self.free()


def alloc(bytes, device=0):
    """Allocates memory of a simulated GPU. Raises `gpumem_trace.Error` if it has too little, or if there is none."""
    return Block(device, bytes)

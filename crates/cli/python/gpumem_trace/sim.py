"""The memory of a simulated GPU, for tests without a real one. The environment says how large it is: `GPUMEM_SIM=16GiB`."""

from ._library import Error, library, number, opened


class Block:
    """A block of simulated memory, from `alloc`. It is freed when nothing refers to it, or by `free`."""

    def __init__(self, device, bytes):
        if not isinstance(bytes, int) or not 0 < bytes < 2**63:
            raise Error(f"{bytes!r} is not a size in bytes")
        self._free = library().gpumem_sim_free
        self._block = opened(library().gpumem_sim_alloc(number(device), bytes))
        self.bytes = bytes

    def free(self):
        """Frees the block. Does nothing if it is freed."""
        # Another thread may free it at the same time.
        block = self.__dict__.pop("_block", None)
        if block is not None:
            self._free(block)

    def __reduce_ex__(self, _):
        raise TypeError("a block cannot be copied or stored")

    def __del__(self):
        self.free()


def alloc(bytes, device=0):
    """Allocates memory of a simulated GPU. Raises `gpumem_trace.Error` if it has too little, or if there is none."""
    return Block(device, bytes)

"""The memory of a block in bytes, and what JAX tells about its pool."""

import collections
import sys

from ._trace import _OWN, GPUMemTrace

Pool = collections.namedtuple("Pool", ["used", "peak", "at_most"])
Pool.__doc__ = """What JAX tells about its pool, in bytes: `used` is how much more its arrays take than at the start, `peak` the most that they took,
compared with the start. `peak` is None if JAX does not tell it, and `at_most` is its bound."""


class peak(GPUMemTrace):
    """Measures a block, without a report: `used` and `peak` are in bytes.

        with gpumem_trace.peak() as p:
            y = step(x).block_until_ready()
        print(p.used, p.peak)
        print(p)                    # the same as a sentence

    It counts PyTorch's tensors, and of other libraries what the driver hands out. JAX takes most of a GPU in one block and puts its arrays there, so they are in `p.pool`: what
    `memory_stats` of JAX's device tells after the block. JAX cannot reset its peak, so `p.pool.peak` is None if the process had a higher one
    before. `p.pool` is None without JAX, and if JAX tells nothing. JAX runs work in the background: wait for it inside the block.
    """

    pool = _before = _device = None

    def __init__(self, ctx=None, device=None):
        frame = sys._getframe(1)
        self._open(ctx, (frame.f_code.co_filename, frame.f_lineno), device, _OWN)
        self.silent, self.on_exit_report, self._device = True, False, device

    def __enter__(self):
        self.pool, self._before = None, _statistics(self._device)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        after = _statistics(self._device)
        if self._before and after:
            (before, peak_before), (used, peak) = self._before, after
            self.pool = Pool(used - before, peak - before if peak > peak_before else None, peak - before)

    def __str__(self):
        if self.is_measured:
            known = "" if self.is_exact else "; these values may be wrong, because allocations were missed"
            text = f"used {_mb(self.used)}, peak {_mb(self.peak)}{known}"
        else:
            text = "nothing was measured"
        if "jax" not in sys.modules:
            return text
        if self.pool is None:
            return text + ". This counts blocks of the driver: what is inside of a pool of JAX is not known, because JAX gives no statistics of a GPU"
        text += ". This counts blocks of the driver, and JAX's pool is one of them. Its arrays in there: "
        used, peak, at_most = self.pool
        if peak is None:
            peak = f"at most {_mb(at_most)}, because JAX keeps only the highest of the process, and that was before"
        else:
            peak = _mb(peak)
        return text + f"used {_mb(used)}, peak {peak}"

    __repr__ = __str__


def _mb(size):
    return f"{size / 2**20:,.1f} MB"


def _statistics(device):
    """Returns what is in use in JAX's pool and its highest peak, or None. Does not start JAX's backend, which would create the pool."""
    try:
        jax = sys.modules["jax"]
        if not sys.modules["jax._src.xla_bridge"].backends_are_initialized():
            return 0, 0
        for gpu in jax.local_devices():
            if gpu.platform != "cpu" and gpu.local_hardware_id == (device or 0):
                statistics = gpu.memory_stats()
                return statistics["bytes_in_use"], statistics["peak_bytes_in_use"]
    except Exception:
        # These are not in each version of JAX.
        pass
    return None

"""The GPU memory of a piece of Python code: how much more is in use after it, and how much it needed on top of that while it ran.

    from gpumem_trace import GPUMemTrace, gpu_mem_trace

    with GPUMemTrace(ctx="load"):
        weights = load()            # prints: △Used Peaked MB:     20      0 (load: exit)

    @gpu_mem_trace
    def forward(x): ...             # each call prints: △Used Peaked MB:     10     15 (forward: exit)

    @gpumem_trace.lines
    def forward(x): ...             # prints a table of the lines of each call

    with gpumem_trace.peak() as p:
        step()
    print(p.used, p.peak)           # in bytes

    print(gpumem_trace.tensors(model, optimizer))

The names are those of fastai's `fastai.utils.mem`. The peaks are exact: each allocation of the process is counted when it is made, for any
number of traces that are nested or run at the same time. Nothing is imported but the standard library, and nothing is loaded before the first
trace or query. The command `gpumem` records whole programs: `gpumem run -- python train.py`.

Without a GPU, traces are off: a notice says why, and nothing is printed. With `GPUMEM_SIM=16GiB` in the environment there is a simulated GPU,
whose memory `gpumem_trace.sim` allocates.
"""

from . import sim
from ._library import Error
from ._lines import Table, lines
from ._memory import (
    GPUMemory,
    b2mb,
    gpu_mem_get,
    gpu_mem_get_all,
    gpu_mem_get_free,
    gpu_mem_get_free_no_cache,
    gpu_mem_get_used,
    gpu_mem_get_used_fast,
    gpu_mem_get_used_no_cache,
    gpu_mem_restore,
    gpu_with_max_free_mem,
    preload_pytorch,
)
from ._peak import Pool, peak
from ._record import record
from ._tensors import Tensors, tensors
from ._trace import Data, GPUMemTrace, gpu_mem_trace

__all__ = [
    "Data",
    "Error",
    "GPUMemTrace",
    "GPUMemory",
    "Pool",
    "Table",
    "Tensors",
    "b2mb",
    "gpu_mem_get",
    "gpu_mem_get_all",
    "gpu_mem_get_free",
    "gpu_mem_get_free_no_cache",
    "gpu_mem_get_used",
    "gpu_mem_get_used_fast",
    "gpu_mem_get_used_no_cache",
    "gpu_mem_restore",
    "gpu_mem_trace",
    "gpu_with_max_free_mem",
    "lines",
    "peak",
    "preload_pytorch",
    "record",
    "sim",
    "tensors",
]

_cells = None


def __getattr__(name):
    if name == "__version__":
        # The import takes longer than that of this package.
        from importlib import metadata

        try:
            return metadata.version("gpumem-trace")
        except metadata.PackageNotFoundError:
            raise AttributeError("the version is not known, because gpumem-trace is not installed; install its wheel with pip") from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell):
    """`%load_ext gpumem_trace`: prints a line after each cell of a notebook."""
    global _cells
    from . import _notebook

    _cells = _cells or _notebook.load(shell)


def unload_ipython_extension(shell):
    """`%unload_ext gpumem_trace`"""
    global _cells
    from . import _notebook

    if _cells is not None:
        _notebook.unload(shell, _cells)
        _cells = None

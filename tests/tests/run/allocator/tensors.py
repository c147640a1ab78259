# Traces that count the tensors of an allocator.
import sys

import gpumem_trace
import torch
from gpumem_trace import GPUMemTrace
from torch import MIB, lib, new_segment

what = sys.argv[1]
if what == "replaced":
    lib.replace()
if what in ("late", "expandable"):
    segment = new_segment()
    segment["is_expandable"] = what == "expandable"
    torch.tensor(segment, 0, 4 * MIB, 4 * MIB)
if what == "old":
    torch.__version__ = "2.1.2"

with GPUMemTrace(ctx="step") as trace:
    # PyTorch initialises CUDA after the trace has started.
    segment = segment if what in ("late", "expandable") else new_segment()
    start = segment["address"]
    torch.tensor(segment, 4 * MIB, 10 * MIB + 1, 10 * MIB + 512)
    lib.drop(start + 4 * MIB, 10 * MIB + 1)
    torch.tensor(segment, 4 * MIB, 3 * MIB, 3 * MIB)
    print(trace.used, trace.peaked, trace.is_exact)
# The segment stays, and the second call counts its tensors as well.
with GPUMemTrace(ctx="again") as trace:
    torch.tensor(segment, 8 * MIB, 2 * MIB, 2 * MIB)
# A recording leaves the traces as they are.
with GPUMemTrace(ctx="recorded") as trace:
    with gpumem_trace.record(sys.argv[2]):
        torch.tensor(segment, 10 * MIB, 5 * MIB, 5 * MIB)
    lib.drop(start + 8 * MIB, 2 * MIB)
    new_segment()
    print(trace.used, trace.peak, trace.is_exact)

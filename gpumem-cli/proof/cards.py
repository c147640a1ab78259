#!/usr/bin/env python3
"""Shows what dry runs with several cards, and processes that share one, do with the real driver.

    python gpumem-cli/proof/cards.py target/release/gpumem [--only two,nccl]

A line PASS or FAIL is printed for each. It needs an NVIDIA GPU and PyTorch; `two`, and those with NCCL, need two GPUs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

GIB = 1 << 30

TWO = """
import json, torch
properties = [torch.cuda.get_device_properties(number).total_memory for number in range(2)]
x, y = (torch.ones(512 << 20, device=f"cuda:{number}") for number in range(2))
z = x.to("cuda:1") + y
small = torch.arange(5, device="cuda:1")
print(json.dumps({"total": properties, "count": torch.cuda.device_count(), "sum": int(small.sum()),
    "reserved": [torch.cuda.max_memory_reserved(number) for number in range(2)], "free": [torch.cuda.mem_get_info(number)[0] for number in range(2)]}))
"""

# The driver without the CUDA runtime, which compares the devices with a list of its own.
DRIVER = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
number, word = ctypes.c_int(), ctypes.c_size_t
cuda.cuInit(0)
cuda.cuDeviceGetCount(ctypes.byref(number))
free = []
for device in range(number.value):
    context, block, left, total = ctypes.c_void_p(), ctypes.c_uint64(), word(), word()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(block), word((4 + device) << 30)) == 0
    cuda.cuMemGetInfo_v2(ctypes.byref(left), ctypes.byref(total))
    free.append([left.value, total.value])
refused = cuda.cuMemAlloc_v2(ctypes.byref(block), word(10 << 30))
print(json.dumps({"count": number.value, "free": free, "refused": refused}))
"""

FULL = """
import json, sys, time, torch
try:
    x = torch.empty(10 << 30, dtype=torch.uint8, device="cuda")
    print(json.dumps({"has": torch.cuda.memory_reserved(), "free": torch.cuda.mem_get_info()[0]}), flush=True)
    time.sleep(float(sys.argv[1]))
except torch.cuda.OutOfMemoryError:
    print(json.dumps({"has": 0, "free": torch.cuda.mem_get_info()[0]}), flush=True)
"""

# How a rank begins, and what it does with its model. With one GPU, NCCL has to take each rank for a machine.
JOIN = """
import json, os, sys, torch, torch.distributed as distributed
rank, cards = int(os.environ["RANK"]), torch.cuda.device_count()
if cards == 1:
    os.environ["NCCL_HOSTID"] = f"machine{rank}"
distributed.init_process_group(sys.argv[1])
torch.cuda.set_device(rank % cards)
"""
TRAIN = """
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    model(torch.randn(256, size, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
print(json.dumps({"reserved": torch.cuda.max_memory_reserved(), "free": torch.cuda.mem_get_info()[0], "rank": rank}), flush=True)
distributed.destroy_process_group()
"""

RANKS = f"""{JOIN}
size = 4096
model = torch.nn.Sequential(*[torch.nn.Linear(size, size) for _ in range(8)]).cuda()
model = torch.nn.parallel.DistributedDataParallel(model)
{TRAIN}"""

SHARDED = f"""{JOIN}
from torch.distributed.fsdp import fully_shard
size = 8192
model = torch.nn.Sequential(*[torch.nn.Linear(size, size, bias=False) for _ in range(12)]).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
{TRAIN}"""


def started(folder, name, text, *arguments, launcher=()):
    path = os.path.join(folder, f"{name}.py")
    with open(path, "w") as file:
        file.write(text)
    return [sys.executable, *launcher, path, *arguments]


def ran(command, **more):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, env={**os.environ, **more})
    except subprocess.TimeoutExpired as late:
        return [], f"it took more than 150 s: {(late.stderr or b'')[-1500:]}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], f"rc {done.returncode}: {done.stderr[-2500:]}"


def launched(port, ranks=2):
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(port)]


def two(run, folder):
    """PyTorch uses the two cards of a machine."""
    found, why = ran([*run("two", "--dry", "--card", "24GiB"), *started(folder, "two", TWO)])
    return bool(found) and found[0]["total"] == [24 * GIB] * 2 and found[0]["count"] == 2 and found[0]["sum"] == 10, f"{found} {why}"


def driver(run, folder):
    """The driver's own functions with two cards."""
    found, why = ran([*run("driver", "--dry", "--cards", "2", "--card", "12GiB"), *started(folder, "driver", DRIVER)])
    return bool(found) and found[0]["count"] == 2 and found[0]["refused"] == 2 and found[0]["free"][1][1] == 12 * GIB, f"{found} {why}"


def share(run, folder, *mode):
    """Two processes want 10 GiB each of a card of 16 GiB."""
    command = started(folder, "full", FULL)
    line = f"{' '.join(command)} 12 & sleep 9; {' '.join(command)} 0; wait"
    found, why = ran([*run(f"share{len(mode)}", *mode), "sh", "-c", line])
    return [one["has"] for one in found] == [10 * GIB, 0], f"{found} {why}"


def share_dry(run, folder):
    return share(run, folder, "--dry", "--card", "16GiB")


def share_limit(run, folder):
    return share(run, folder, "--limit", "16GiB")


def ranks(run, folder, name, text, backend, port):
    """Two ranks as two processes, each with a card of its own: dry on one GPU, and for real, with NCCL on two."""
    command = [*started(folder, name, text, backend, launcher=launched(port))]
    dry, why = ran([*run(name, "--dry", "--card", "80GiB", "--card-per-process"), *command], CUDA_VISIBLE_DEVICES="0")
    real, why_real = ran(command)
    figures = [sorted(one["reserved"] for one in of) for of in (dry, real)]
    return len(dry) == 2 and figures[0] == figures[1], f"{figures} {why} {why_real if len(real) != 2 else ''}"


def ddp_gloo(run, folder):
    return ranks(run, folder, "gloo", RANKS, "gloo", 29541)


def ddp_nccl(run, folder):
    return ranks(run, folder, "nccl", RANKS, "nccl", 29543)


def fsdp_nccl(run, folder):
    return ranks(run, folder, "fsdp", SHARDED, "nccl", 29545)


def eight(run, folder, name, port):
    """All ranks of a large model, on one GPU."""
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "large.py")
    command = [*run(name, "--dry", "--card", "1TiB", "--card-per-process", "--stacks", "none"), sys.executable, *launched(port, 8), program, name, "8"]
    begun = time.time()
    dry, why = ran(command, CUDA_VISIBLE_DEVICES="0")
    return len(dry) == 8, f"{time.time() - begun:.0f} s, {dry} {why[:2500]}"


def llama70(run, folder):
    return eight(run, folder, "llama70", 29547)


def llama405(run, folder):
    return eight(run, folder, "llama405", 29549)


# Another process leaves so many bytes of the GPU free.
FILL = """
import sys, torch
torch.cuda.init()
left = torch.cuda.mem_get_info()[0] - int(sys.argv[1])
x = torch.empty(left, dtype=torch.uint8, device="cuda")
print(torch.cuda.mem_get_info()[0], flush=True)
sys.stdin.read()
"""


def small(run, folder):
    """GPT-2 is trained on a card of 24 GiB, in a dry run on a GPU that has 4 GiB, 2 GiB and 1 GiB free."""
    program = [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "dry.py"), "--program", "gpt2"]
    had = []
    for gib in (4, 2, 1):
        fill = subprocess.Popen(started(folder, "fill", FILL, str(gib * GIB)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        free = fill.stdout.readline().strip()
        found, why = ran([*run(f"small{gib}", "--dry", "--card", "24GiB"), *program])
        had.append((gib, free, found, "" if found else why))
        fill.communicate("")
    return all(one[2] and one[2] == had[0][2] for one in had), str(had)


CASES = [small, two, driver, share_dry, share_limit, ddp_gloo, ddp_nccl, fsdp_nccl, llama70, llama405]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("gpumem")
    parser.add_argument("--only", default=",".join(case.__name__ for case in CASES))
    arguments = parser.parse_args()
    gpumem, failed = os.path.abspath(arguments.gpumem), 0
    with tempfile.TemporaryDirectory() as folder:

        def run(name, *options):
            return [gpumem, "run", *options, "-o", os.path.join(folder, f"{name}.capture"), "--"]

        for name in arguments.only.split(","):
            is_right, text = globals()[name](run, folder)
            print("PASS" if is_right else "FAIL", f"{name}: {text}", flush=True)
            failed += not is_right
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

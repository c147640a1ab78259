#!/usr/bin/env python3
"""Shows what dry runs with several cards, and processes that share one, do with the real driver.

    python crates/cli/proof/cards.py target/release/gpumem [--only two,nccl]

A line PASS or FAIL is printed for each. It needs an NVIDIA GPU and PyTorch; `two`, and those that compare NCCL's ranks with real ones, need two GPUs.
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

# This program uses the driver without the CUDA runtime, which compares the devices with a list of its own.
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

# This program sees eight cards of 24 GiB. Each function is a line of the result.
EIGHT = """
import json, threading, traceback, torch
GIB, MIB, CONTEXT = 1 << 30, 1 << 20, 527 << 20
count = torch.cuda.device_count()

def sees():
    properties = [torch.cuda.get_device_properties(number) for number in range(count)]
    free = [torch.cuda.mem_get_info(number) for number in range(count)]
    right = count == 8 and free == [(24 * GIB - CONTEXT, 24 * GIB)] * 8
    right &= [one.total_memory for one in properties] == [24 * GIB] * 8 and len({str(one.uuid) for one in properties}) == 8
    return right, [count, free[7], [str(one.uuid)[-4:] for one in properties], [getattr(one, "pci_domain_id", None) for one in properties]]

def small():
    x = torch.arange(6, device="cuda:5")
    y = x.to("cuda:2") * 2
    torch.cuda.set_device(3)
    z = torch.ones(4, device="cuda")
    found = [str(x.device), int(x.sum()), str(y.device), y.tolist(), str(z.device), torch.cuda.current_device()]
    torch.cuda.set_device(0)
    return found == ["cuda:5", 15, "cuda:2", [0, 2, 4, 6, 8, 10], "cuda:3", 3], found

def streams():
    stream, event = torch.cuda.Stream(device=6), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        inside = torch.cuda.current_device()
        w = torch.ones(3, device="cuda:6")
        event.record()
    torch.cuda.current_stream(1).wait_event(event)
    event.synchronize()
    found = [inside, str(stream.device), str(w.device), torch.cuda.current_device(), w.tolist()]
    return found == [6, "cuda:6", "cuda:6", 0, [1.0, 1.0, 1.0]], found

def full():
    first = torch.empty(20 * GIB, dtype=torch.uint8, device="cuda:1")
    try:
        torch.empty(10 * GIB, dtype=torch.uint8, device="cuda:1")
        return False, "10 GiB more were not refused"
    except torch.cuda.OutOfMemoryError as error:
        text = str(error).splitlines()[0]
    other = torch.empty(10 * GIB, dtype=torch.uint8, device="cuda:0")
    free = [torch.cuda.mem_get_info(number)[0] for number in (0, 1)]
    del first, other
    torch.cuda.empty_cache()
    again = torch.empty(22 * GIB, dtype=torch.uint8, device="cuda:1")
    free.append(torch.cuda.mem_get_info(1)[0])
    right = free[1] == 4 * GIB - CONTEXT and 13 * GIB < free[0] < 14 * GIB and free[2] == 2 * GIB - CONTEXT
    del again
    torch.cuda.empty_cache()
    return right and "GPU 1" in text, [free, text]

def copies():
    x = torch.ones(1 << 28, device="cuda:0")
    y = x.to("cuda:5")
    z = torch.empty(4, 4, device="cuda:1").copy_(torch.arange(16.0, device="cuda:0").view(4, 4).t())
    peers = [torch.cuda.can_device_access_peer(0, 1), str(y.device), z[3, 0].item()]
    reserved = torch.cuda.memory_reserved(5)
    del x, y
    torch.cuda.empty_cache()
    return peers == [True, "cuda:5", 3.0] and reserved >= GIB, [peers, reserved]

def threads():
    found = {}
    def use(number):
        torch.cuda.set_device(number)
        x = torch.empty((number + 1) * GIB, dtype=torch.uint8, device="cuda")
        found[number] = torch.cuda.current_device(), str(x.device), torch.cuda.memory_allocated() // GIB
    started = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    [thread.start() for thread in started], [thread.join() for thread in started]
    right = [found.get(number) for number in range(4)] == [(number, f"cuda:{number}", number + 1) for number in range(4)]
    torch.cuda.empty_cache()
    return right and torch.cuda.current_device() == 0, found

def parallel():
    model = torch.nn.DataParallel(torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(4)]).cuda(), device_ids=range(4))
    optimizer = torch.optim.Adam(model.parameters())
    [torch.cuda.reset_peak_memory_stats(number) for number in range(8)]
    for _ in range(2):
        loss = model(torch.randn(4096, 4096, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    most = [torch.cuda.max_memory_allocated(number) // MIB for number in range(8)]
    # The other cards have a copy of the weights, 256 MiB, and a quarter of the batch.
    return str(loss.device) == "cuda:0" and all(256 < one < 1024 for one in most[1:4]) and not any(most[4:]), most

for check in (sees, small, streams, full, copies, threads, parallel):
    try:
        print(json.dumps([check.__name__, *check()]), flush=True)
    except Exception:
        print(json.dumps([check.__name__, False, traceback.format_exc()[-1500:]]), flush=True)
"""

# This model has eight stages on as many cards. With an argument, only that stage runs, on the first card.
STAGES = """
import json, sys, torch
size, batch, alone = 4096, 2048, int(sys.argv[1]) if len(sys.argv) > 1 else None
place = lambda stage: f"cuda:{0 if alone is not None else stage}"
used = range(8) if alone is None else [alone]
stages = {stage: torch.nn.Sequential(*[torch.nn.Linear(size, size) for _ in range(1 + stage % 3)]).to(place(stage)) for stage in used}
optimizers = [torch.optim.AdamW(stage.parameters(), foreach=False) for stage in stages.values()]
for _ in range(3):
    x = torch.randn(batch, size, requires_grad=alone not in (None, 0))
    for stage in used:
        x = stages[stage](x.to(place(stage)))
    if alone not in (None, 7):
        x = x.cpu()
    x.sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
print(json.dumps([torch.cuda.max_memory_reserved(number) for number in range(torch.cuda.device_count())]))
"""

# Llama 70B in bf16, in eight parts of ten layers.
SPLIT = """
import json, time, torch
from torch.nn.functional import scaled_dot_product_attention as attention, silu, rms_norm
hidden, middle, keys, layers, tokens, begun = 8192, 28672, 1024, 80, 2048, time.time()
shapes = [(hidden,), (hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden), (hidden,), (middle, hidden), (middle, hidden), (hidden, middle)]
place = lambda layer: f"cuda:{layer // 10}"
weights = [[torch.empty(shape, dtype=torch.bfloat16, device=place(layer)) for shape in shapes] for layer in range(layers)]
has = [torch.cuda.memory_allocated(number) for number in range(8)]
x = torch.zeros(1, tokens, hidden, dtype=torch.bfloat16, device="cuda:0")
with torch.no_grad():
    for layer, (n1, q, k, v, o, n2, gate, up, down) in enumerate(weights):
        x = x.to(place(layer))
        h = rms_norm(x, (hidden,), n1)
        heads = [(h @ w.T).view(1, tokens, -1, 128).transpose(1, 2) for w in (q, k, v)]
        x = x + attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(1, tokens, hidden) @ o.T
        h = rms_norm(x, (hidden,), n2)
        x = x + (silu(h @ gate.T) * (h @ up.T)) @ down.T
torch.cuda.synchronize()
bytes = 10 * sum(2 * torch.Size(shape).numel() for shape in shapes)
print(json.dumps({"has": has, "expected": bytes, "peak": [torch.cuda.max_memory_reserved(number) for number in range(8)], "seconds": time.time() - begun}))
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

# A rank begins with JOIN, and TRAIN trains its model. With one GPU, NCCL has to take each rank for a machine.
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


def lines(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith(("{", "["))]


def ran(command, **more):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, env={**os.environ, **more})
    except subprocess.TimeoutExpired as late:
        return [], f"it took more than 150 s: {(late.stderr or b'')[-1500:]}"
    return lines(done.stdout), f"rc {done.returncode}: {done.stderr[-2500:]}"


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


def eight_cards(run, folder):
    """PyTorch sees eight cards on one GPU."""
    found, why = ran([*run("eight", "--dry", "--cards", "8", "--card", "24GiB"), *started(folder, "eight", EIGHT)])
    for name, is_right, text in found:
        print("PASS" if is_right else "FAIL", f"  {name}: {text}")
    return len(found) == 7 and all(one[1] for one in found), why[-1200:]


def stages(run, folder, *alone, setting="", name="stages"):
    """Each stage of a model reserves on its card what it reserves alone on the only card."""
    more = {"PYTORCH_CUDA_ALLOC_CONF": setting} if setting else {}
    command = started(folder, "stages", STAGES)
    found, why = ran([*run(name, "--dry", "--cards", "8", "--card", "24GiB"), *command], **more)
    single = {stage: ran([*run(f"{name}{stage}", "--dry", "--card", "24GiB"), *command, str(stage)], **more)[0] for stage in alone or (0, 4, 7)}
    cards = found[0] if found else []
    return len(cards) == 8 and all(one and one[0][0] == cards[stage] for stage, one in single.items()), f"{cards} alone {single} {why[-1500:]}"


def stages_expandable(run, folder):
    return stages(run, folder, 4, setting="expandable_segments:True", name="expandable")


def stages_async(run, folder):
    return stages(run, folder, 4, setting="backend:cudaMallocAsync", name="async")


def split(run, folder):
    """The weights of Llama 70B on eight cards of 80 GiB, and a forward pass."""
    found, why = ran([*run("split", "--dry", "--cards", "8", "--card", "80GiB"), *started(folder, "split", SPLIT)])
    return bool(found) and found[0]["has"] == [found[0]["expected"]] * 8, f"{found} {why[-1500:]}"


def ranks_on_cards(run, folder):
    """Two ranks with FSDP and NCCL on two cards have as much as if each had a GPU for itself."""
    command = started(folder, "fsdp", SHARDED, "nccl", launcher=launched(29551))
    figures = []
    for name, *options in (("joined", "--cards", "2"), ("apart", "--card-per-process")):
        found, why = ran([*run(name, "--dry", "--card", "80GiB", *options), *command], **({"CUDA_VISIBLE_DEVICES": "0"} if name == "apart" else {}))
        figures.append((sorted(one["reserved"] for one in found), why[-1500:] if len(found) != 2 else ""))
    return len(figures[0][0]) == 2 and figures[0] == figures[1], str(figures)


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


# This process leaves a given number of bytes of the GPU free.
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


CASES = [small, two, driver, eight_cards, stages, stages_expandable, stages_async, split, ranks_on_cards, share_dry, share_limit, ddp_gloo, ddp_nccl, fsdp_nccl, llama70, llama405]


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

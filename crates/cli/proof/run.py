#!/usr/bin/env python3
"""Compares what `gpumem run` records of programs with what the programs say of themselves.

    cargo build --release -p gpumem-cli
    python crates/cli/proof/run.py target/release/gpumem --out run.jsonl --seconds 90

The programs are in this file and know nothing of gpumem. A line PASS, FAIL or INFO is printed for each comparison and written to the
file of `--out`; the exit code is 1 if one failed. It needs an NVIDIA GPU, and PyTorch, JAX, nvcc and a second GPU for the comparisons
that name them. `--only native,static` chooses comparisons (`torch` and `modules`: all that begin so, those of `gpumem run --torch` and `--modules`); `--seconds` is for the
pairs of runs that compare times. `h200.sh` in this folder runs all but those of `--torch`, in two parts of at most 8 minutes.

`--join A.jsonl B.jsonl` compares the times of all pairs in the files of `--out`; it needs no GPU.

`--candle PROGRAM` is for the comparison `candle`: a program with candle that trains, and prints {"pool_high": the driver's
CU_MEMPOOL_ATTR_USED_MEM_HIGH of the default pool}. It can be built without a GPU and without a CUDA toolkit of the system:

1. `pip install --no-deps --target cu` of nvidia-cuda-nvcc, nvidia-cuda-crt, nvidia-nvvm, nvidia-cuda-runtime and nvidia-cuda-cccl, all
   ==13.0.* (a later toolkit writes PTX that driver 580 does not read): 200 MB. CUDA_HOME=CUDA_PATH=cu/nvidia/cu13, its bin in PATH,
   CUDA_COMPUTE_CAP=90.
2. A package with candle-core and candle-nn, feature `cuda`, with [patch.crates-io] candle-kernels = a copy whose build.rs compiles the
   PTX kernels and not the static library of quantized models (`moe_sources`), in whose place is a library of functions that abort.
   The kernels take 20 minutes on one busy core.
3. Empty shared objects stand for libcuda.so.1, libcublas.so.13, libcublasLt.so.13, libcurand.so.10, libnvrtc.so.13 and
   libcudart.so.13: `cargo rustc --release -- -C link-arg=-Wl,--no-as-needed -C link-arg=-lcuda …`, with
   RUSTFLAGS="-L native=stub -C link-arg=-Wl,--no-as-needed -C link-arg=-Wl,--unresolved-symbols=ignore-all".
   PyTorch's folder nvidia/cu13/lib has the real ones.

`--onnx FOLDER` is for the comparison `onnx`: a folder with the package onnxruntime for CUDA 13. The wheel has 256 MB, and can be made
smaller for a machine to which little can be copied:

1. `pip download --no-deps onnxruntime-gpu==1.31.1` (with `--python-version 3.12` or what the machine has), `unzip`.
2. `python crates/cli/proof/trim.py onnxruntime/capi/libonnxruntime_providers_cuda.so 90` keeps the kernels of plain operators for one GPU.
3. The folders quantization, tools and transformers, libonnxruntime.so.* and libonnxruntime_providers_tensorrt.so are not needed.
   `tar c onnxruntime | xz -T0` has 30 MB then.

CUDA's libraries are those of PyTorch's packages; numpy is needed as well. The model is made here, without the package onnx.
"""

import argparse
import ctypes
import glob
import json
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

MIB = 1 << 20
KEPT = []


# The programs. Each prints one line of JSON, what it knows of itself.


def child_torch(allocator, steps, mode):
    """Trains a small network whose sizes change from step to step, so that the allocator asks the driver."""
    if mode == "cuda-first":
        # Another library initialises CUDA before PyTorch is imported.
        import ctypes

        ctypes.CDLL("libcuda.so.1").cuInit(0)
    import torch

    if mode == "handles":
        # One product of small matrices allocates only the libraries' handles.
        small = torch.ones(64, 64, device="cuda")
        (small @ small).sum().item()
        facts = {"reserved": torch.cuda.max_memory_reserved(), "ended": time.time()}
        print(json.dumps(facts), flush=True)
        return
    torch.manual_seed(0)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    layers = [torch.nn.Linear(2048, 8192), torch.nn.GELU(), torch.nn.Linear(8192, 2048), torch.nn.LayerNorm(2048)]
    model = torch.nn.Sequential(*layers * 3, torch.nn.Linear(2048, 1000)).to(device)
    if mode == "ranks":
        torch.distributed.init_process_group("nccl")
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
    optimizer = torch.optim.AdamW(model.parameters())
    if mode == "compile":
        model = torch.compile(model, dynamic=True)
    if mode == "workers":
        # These processes are forked after CUDA was initialised, and use no CUDA.
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8)), num_workers=2)
        assert sum(1 for _ in data) == 64

    def step(number):
        batch = 256 + 64 * (number % 5)
        x = torch.randn(batch, 2048, device=device)
        y = torch.randint(0, 1000, (batch,), device=device)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(5):
        step(number)
    torch.cuda.synchronize()
    events = None
    if mode == "profiler":
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            step(0)
            torch.cuda.synchronize()
        events = sum(1 for event in profiled.events() if "CUDA" in str(event.device_type))
    began = time.perf_counter()
    for number in range(steps):
        step(number)
        if mode == "empty":
            # Each step asks the driver for all of its memory.
            torch.cuda.empty_cache()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    facts = {
        "pid": os.getpid(),
        "reserved": torch.cuda.max_memory_reserved(),
        "allocated": torch.cuda.max_memory_allocated(),
        "seconds": seconds,
        "events": events,
        "ended": time.time(),
    }
    if mode == "lines":
        facts["lines"] = lines_of_snapshot(torch.cuda.memory._snapshot())
        # The recording ends later than this function, so the blocks of the snapshot must still be live.
        KEPT.extend([model, optimizer])
    print(json.dumps(facts), flush=True)
    if mode == "ranks":
        with open(os.environ["RANK_FILE"] + os.environ["RANK"], "w") as file:
            json.dump(facts, file)
        torch.distributed.destroy_process_group()


def lines_of_snapshot(snapshot):
    """The live blocks of PyTorch's own snapshot, by the innermost line of this file."""
    lines = {}
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] != "active_allocated":
                continue
            own = [f"{frame['filename']}:{frame['line']}" for frame in block.get("frames") or [] if frame["filename"] == __file__]
            line = own[0] if own else "none"
            lines[line] = lines.get(line, 0) + block["size"]
    return lines


def child_jax():
    import jax
    import jax.numpy as jnp

    @jax.jit
    def step(x):
        return jnp.tanh(x @ x.T) @ x

    x = jnp.ones((4096, 4096))
    for _ in range(5):
        x = step(x)
    x.block_until_ready()
    stats = jax.local_devices()[0].memory_stats() or {}
    print(json.dumps({"stats": {name: value for name, value in stats.items() if isinstance(value, int)}}))


def child_lines():
    """Allocates blocks of different sizes in functions of all kinds, and prints which Python functions it was in at each."""
    import threading
    import traceback

    import torch

    expected, kept, sizes = {}, [], iter(range(6, 100))

    def keep(size, stack, tensor):
        frames = [(frame.filename, frame.lineno, frame.name) for frame in reversed(stack)]
        expected[size] = frames
        kept.append(tensor)

    def here():
        # The call is on one line, so that the last frame has the line of the allocation.
        size = next(sizes) << 21
        keep(size, traceback.extract_stack(), torch.empty(size, dtype=torch.uint8, device="cuda"))

    class Layer(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            here()
            return self.inner(x) if self.inner else x

    def recurse(depth):
        recurse(depth - 1) if depth else here()

    def generator():
        for _ in range(2):
            here()
            yield

    here()
    Layer(Layer(Layer(None)))(0)
    recurse(20)
    list(generator())
    [here() for _ in range(2)]
    (lambda: here())()
    exec(compile("def made():\n\n    here()\nmade()", "made.py", "exec"), {"here": here})
    thread = threading.Thread(target=here)
    thread.start()
    thread.join()
    print(json.dumps({"expected": list(expected.items())}), flush=True)


def child_modules(name, steps):
    """Trains or runs a network, and prints what its weights, gradients and states are, and how long a step takes."""
    import torch
    import torch.nn.functional as F

    optimizer, generates = torch.optim.AdamW, name == "generate"
    ids = lambda rows, columns: {"input_ids": torch.randint(0, 30_000, (rows, columns), device="cuda")}
    if name in ("gpt2", "generate"):
        from transformers import GPT2Config, GPT2LMHeadModel

        net = GPT2LMHeadModel(GPT2Config()).cuda()
        net = net.half().eval() if generates else net
        loss = lambda x=ids(8, 512): net(**x, labels=x["input_ids"]).loss
    elif name == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}
        net = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32_000)).cuda().bfloat16()
        net.gradient_checkpointing_enable()
        loss = lambda x=ids(4, 1024): net(**x, labels=x["input_ids"]).loss
    elif name in ("resnet50", "vit_b_16"):
        import torchvision

        net = getattr(torchvision.models, name)().cuda()
        optimizer = torch.optim.SGD if name == "resnet50" else optimizer
        classes = torch.arange(32, device="cuda")
        loss = lambda: F.cross_entropy(net(torch.randn(32, 3, 224, 224, device="cuda")), classes)
    elif name == "compiled":
        net = torch.compile(torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)).cuda())
        loss = lambda: net(torch.randn(8192, 1024, device="cuda")).sum()
    else:
        net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20))).cuda()
        loss = lambda x=torch.randn(16, 64, device="cuda"): net(x).sum()
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    optimizer = optimizer(net.parameters(), lr=1e-4, **options)
    # Only requested bytes count: views of one tensor count once.
    size = lambda tensors: sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None and t.is_cuda}.values())
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        if generates:
            with torch.no_grad():
                net.generate(**ids(8, 128), max_new_tokens=32, pad_token_id=0)
        else:
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    KEPT.extend([net, optimizer])
    states = [value for state in optimizer.state.values() for value in state.values()]
    facts = {"weights": size([*net.parameters(), *net.buffers()]), "optimizer": size(states)}
    print(json.dumps({**facts, "allocated": torch.cuda.max_memory_allocated(), "step": statistics.median(times)}), flush=True)


def field(number, value):
    """A field of a message in Protocol Buffers' format."""

    def varint(value):
        low, high = value & 0x7F, value >> 7
        return bytes([low | 0x80]) + varint(high) if high else bytes([low])

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def onnx_model(weights):
    """A model that multiplies by each of the matrices, with Relu after each. The numbers are those of onnx.proto."""
    float32, nodes, initializers, name = 1, b"", b"", "x"
    for number, weight in enumerate(weights):
        product, result = f"product{number}", f"result{number}"
        nodes += field(1, field(1, name) + field(1, f"w{number}") + field(2, product) + field(4, "MatMul"))
        nodes += field(1, field(1, product) + field(2, result) + field(4, "Relu"))
        dims = b"".join(field(1, size) for size in weight.shape)
        initializers += field(5, dims + field(2, float32) + field(8, f"w{number}") + field(9, weight.tobytes()))
        name = result

    def value(name, width):
        shape = field(1, field(2, "batch")) + field(1, field(1, width))
        return field(1, name) + field(2, field(1, field(1, float32) + field(2, shape)))

    inputs, outputs = field(11, value("x", weights[0].shape[0])), field(12, value(name, weights[-1].shape[1]))
    graph = nodes + field(2, "products") + initializers + inputs + outputs
    return field(1, 8) + field(7, graph) + field(8, field(1, "") + field(2, 13))


def child_onnx(provider, strategy):
    """Runs a model for some batch sizes. ONNX Runtime's log on stderr has what its arenas ask for."""
    import numpy
    import onnxruntime

    # The arenas write to the default log.
    onnxruntime.set_default_logger_severity(0)
    device = {"CUDAExecutionProvider": "cuda", "CPUExecutionProvider": "cpu"}[provider]
    random = numpy.random.default_rng(0)
    width = 2048
    weights = [random.standard_normal((width, width), dtype=numpy.float32) / 32 for _ in range(3)]
    settings = {"arena_extend_strategy": strategy, "use_tf32": "0"} if device == "cuda" else {}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(onnx_model(weights), options, providers=[(provider, settings)])
    if session.get_providers()[0] != provider:
        sys.exit(f"{provider} is not used, but {session.get_providers()}")
    difference = 0
    # A tensor of 128 rows has 1 MiB: no smaller block is asked for, because gpumem records no stacks of smaller ones.
    for batch in (128, 768, 256, 1024):
        run = onnxruntime.RunOptions()
        if strategy == "kSameAsRequested" and batch != 1024:
            run.add_run_config_entry("memory.enable_memory_arena_shrinkage", f"{device}:0".replace("cuda", "gpu"))
        x = random.standard_normal((batch, width), dtype=numpy.float32)
        if strategy == "kNextPowerOfTwo" and batch == 768:
            # A tensor of the program, from an arena that is not the session's.
            KEPT.append(onnxruntime.OrtValue.ortvalue_from_numpy(x, device, 0))
            y = session.run_with_ort_values(None, {"x": KEPT[-1]}, run)[0].numpy()
        else:
            y = session.run(None, {"x": x}, run)[0]
        for weight in weights:
            x = numpy.maximum(x @ weight, 0)
        difference = max(difference, float(abs(x - y).max() / abs(x).max()))
    KEPT.append(session)
    facts = {"version": onnxruntime.__version__, "providers": session.get_providers(), "difference": difference}
    print(json.dumps(facts), flush=True)
    if strategy == "kSameAsRequested":
        # The process ends without exit handlers and destructors.
        os._exit(5)
    sys.exit(5)


def onnx_arenas(log, device):
    """What the arenas of a device ask for and give back, in ONNX Runtime's log: ("extend", size, address) and so on."""
    events, arena, size = [], None, 0
    for line in log.splitlines():
        if found := re.search(r"Extending BFCArena for (\w+)", line):
            arena = found[1].lower()
        elif found := re.search(r"Extended allocation by (\d+) bytes", line):
            size = int(found[1])
        elif (found := re.search(r"Allocated memory at (\w+) to (\w+)", line)) and arena == device:
            begin, end = int(found[1], 16), int(found[2], 16)
            assert end - begin == size, line
            events.append(("extend", size, begin))
        elif (found := re.search(r"Reserving memory in BFCArena for (\w+) size: (\d+)", line)) and found[1].lower() == device:
            events.append(("reserve", int(found[2]), None))
        elif (found := re.search(r"(\w+) BFC Arena shrunk by (\d+) bytes", line)) and found[1].lower() == device:
            events.append(("shrink", int(found[2]), None))
    return events


def child_oom():
    """Is refused memory twice: once PyTorch empties its cache and obtains it, once it does not."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    most = (free // (2 * MIB) - 256) * 2 * MIB
    block = torch.empty(most // 2, dtype=torch.uint8, device="cuda")
    del block
    block = torch.empty(most * 3 // 4 // (2 * MIB) * 2 * MIB, dtype=torch.uint8, device="cuda")
    refused = most // 2 // (2 * MIB) * 2 * MIB
    line = 0
    try:
        line = sys._getframe().f_lineno + 1
        torch.empty(refused, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
    stats = torch.cuda.memory_stats()
    facts = {"refused": refused, "line": line, "reserved": torch.cuda.memory_reserved()}
    facts |= {name: stats[name] for name in ("num_alloc_retries", "num_ooms")}
    print(json.dumps(facts), flush=True)


def child_dormant():
    """Allocates, and waits for a line of stdin after each step."""
    import torch

    kept = []
    for mebibytes in (100, 200, 300, 400):
        if mebibytes == 300:
            kept.clear()
            torch.cuda.empty_cache()
        kept.append(torch.empty(mebibytes << 20, dtype=torch.uint8, device="cuda"))
        print(os.getpid(), flush=True)
        sys.stdin.readline()


SIZES = [(number + 1) * 700_001 for number in range(20)]


def libcupti():
    """The path of libcupti: on the loader's path, in a toolkit, or in a Python package."""
    names = ["libcupti.so.13", "libcupti.so.12"]
    folders = ["/usr/local/cuda/extras/CUPTI/lib64", "/usr/local/cuda/lib64"]
    for path in sys.path:
        folders += [f"{path}/nvidia/cu13/lib", f"{path}/nvidia/cuda_cupti/lib"]
    for name in names:
        try:
            ctypes.CDLL(name)
            return name
        except OSError:
            pass
    found = [file for folder in folders for name in names for file in glob.glob(f"{folder}/{name}")]
    return found[0] if found else None


class Cupti:
    """A tool that counts the calls of cuMemAlloc_v2."""

    def __init__(self):
        self.library = ctypes.CDLL(libcupti())
        self.calls = 0
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
        # The callback must be kept: CUPTI calls it as long as it is subscribed.
        self.callback = kind(self.observed)
        self.subscriber = ctypes.c_void_p()
        code = self.library.cuptiSubscribe(ctypes.byref(self.subscriber), self.callback, None)
        assert code == 0, f"cuptiSubscribe: {code}"
        driver_api, mem_alloc = 1, 243
        code = self.library.cuptiEnableCallback(1, self.subscriber, driver_api, mem_alloc)
        assert code == 0, f"cuptiEnableCallback: {code}"

    def observed(self, _data, _domain, _number, call):
        # The first field is CUPTI's `callbackSite`; 1 is the exit.
        self.calls += ctypes.cast(call, ctypes.POINTER(ctypes.c_int)).contents.value == 1


def child_cupti(order):
    """Another tool subscribes to CUPTI before the driver, and so gpumem's library, is there; or after. Nothing but the driver is used."""
    cupti = Cupti() if order == "before" else None
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name, *arguments):
        code = getattr(driver, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    cupti = cupti or Cupti()
    addresses = [ctypes.c_uint64() for _ in SIZES]
    for address, size in zip(addresses, SIZES):
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    for address in addresses:
        call("cuMemFree_v2", address)
    print(json.dumps({"calls": cupti.calls}), flush=True)


STATIC = r"""
#include <cstdio>
#include <cuda_runtime.h>
int main() {
    void *a, *b, *c, *d, *host;
    cudaMalloc(&a, 100 << 20);
    cudaMalloc(&b, 50000001);
    cudaFree(a);
    cudaMallocAsync(&c, 70 << 20, 0);
    cudaMallocManaged(&d, 9 << 20);
    cudaMallocHost(&host, 5 << 20);
    cudaFreeAsync(c, 0);
    cudaDeviceSynchronize();
    printf("{\"peak\": %d}\n", (100 << 20) + 50000001);
    return 7;
}
"""


# The comparisons.


class Proof:
    def __init__(self, gpumem, out, seconds):
        self.gpumem = os.path.abspath(gpumem)
        self.out = open(out, "w") if out else None
        self.seconds = seconds
        self.failed = False
        self.folder = tempfile.mkdtemp(prefix="gpumem-proof-")

    def result(self, name, passed, **facts):
        word = "INFO" if passed is None else "PASS" if passed else "FAIL"
        self.failed |= passed is False
        line = json.dumps({"name": name, "result": word, **facts})
        print(word, name, json.dumps(facts), flush=True)
        if self.out:
            print(line, file=self.out, flush=True)

    def run(self, command, recorded=True, env=(), options=()):
        """Runs a program; returns its exit code, what it printed, and the recordings."""
        base = os.path.join(self.folder, f"{time.time_ns()}")
        os.mkdir(base)
        words = [self.gpumem, "run", *options, "-o", os.path.join(base, "a.capture"), "--"] if recorded else []
        began = time.time()
        done = subprocess.run(
            words + command, env={**os.environ, **dict(env)}, capture_output=True, text=True, timeout=170
        )
        ended = time.time()
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        # Two ranks may print at the same time, on one line.
        facts = json.JSONDecoder().raw_decode(lines[-1])[0] if lines else {}
        files = sorted(os.path.join(base, name) for name in os.listdir(base))
        return {
            "code": done.returncode,
            "facts": facts,
            "files": files,
            "stderr": done.stderr,
            "wall": ended - began,
            "after": ended - facts.get("ended", ended),
        }

    def report(self, file):
        done = subprocess.run([self.gpumem, "report", "--json", file], capture_output=True, text=True, check=False)
        return json.loads(done.stdout) if done.stdout else {"error": done.stderr}

    def device(self, file):
        report = self.report(file)
        devices = [device for device in report.get("devices", []) if device["peak_bytes"]]
        return (devices or [{}])[0], report.get("missing")

    def child(self, *words):
        return [sys.executable, os.path.abspath(__file__), "--child", *map(str, words)]

    # PyTorch's part of the peak is PyTorch's own figure, and the rest is that of other libraries.
    def allocator(self, name, conf, figure, mode="plain"):
        env = {"PYTORCH_CUDA_ALLOC_CONF": conf, "PYTORCH_ALLOC_CONF": conf} if conf else {}
        ran = self.run(self.child("torch", name, 60, mode), env=env)
        if ran["code"] or len(ran["files"]) != 1:
            return self.result(name, False, code=ran["code"], files=ran["files"], stderr=ran["stderr"][-2000:])
        device, missing = self.device(ran["files"][0])
        by_library = {sum["name"]: sum["bytes"] for sum in device["peak_by_library"]}
        said = ran["facts"][figure]
        rest = device["peak_bytes"] - said
        others = sum(size for library, size in by_library.items() if library != "PyTorch")
        facts = {
            "peak": device["peak_bytes"],
            figure: said,
            "rest": rest,
            "by_library": by_library,
            "missing": {key: value for key, value in (missing or {}).items() if value},
            "after": round(ran["after"], 2),
            "bytes": os.path.getsize(ran["files"][0]),
        }
        if mode == "profiler":
            alone = self.run(self.child("torch", name, 5, mode), recorded=False, env=env)
            facts["events"] = [ran["facts"]["events"], alone["facts"].get("events")]
            return self.result("profiler", facts["events"][0] and facts["events"][0] == facts["events"][1], **facts)
        if figure == "allocated":
            # Blocks below 1 MiB have no stack, so they are in no sum. All other memory is as much as with the native allocator.
            alone = self.run(self.child("torch", "native", 5, "plain"))
            native, _ = self.device(alone["files"][0])
            facts["rest_of_native"] = native["peak_bytes"] - alone["facts"]["reserved"]
            is_right = rest == facts["rest_of_native"]
        else:
            # Every byte is accounted for: all other memory belongs to other libraries.
            is_right = by_library.get("PyTorch") == said and rest == others
        self.result(name, is_right and not facts["missing"], **facts)
        with open(os.path.join(self.folder, name + ".txt"), "w") as file:
            file.write(ran["stderr"])
        print(ran["stderr"], flush=True)

    def jax(self):
        env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        ran = self.run(self.child("jax"), env=env)
        device, missing = self.device(ran["files"][0]) if ran["files"] else ({}, None)
        stats = ran["facts"].get("stats", {})
        self.result(
            "jax",
            ran["code"] == 0 and bool(device) and device["peak_bytes"] >= stats.get("peak_bytes_in_use", 0),
            peak=device.get("peak_bytes"),
            stats=stats,
            by_library=device.get("peak_by_library"),
            missing=missing,
            stderr=ran["stderr"][-1500:],
        )

    def static(self):
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        source, program = os.path.join(self.folder, "a.cu"), os.path.join(self.folder, "static-program")
        with open(source, "w") as file:
            file.write(STATIC)
        built = subprocess.run([nvcc, "-cudart", "static", "-o", program, source], capture_output=True, text=True)
        if built.returncode:
            return self.result("static", None, why=built.stderr[-500:])
        ran = self.run([program])
        device, missing = self.device(ran["files"][0]) if ran["files"] else ({}, None)
        is_right = ran["code"] == 7 and device.get("peak_bytes") == ran["facts"].get("peak")
        self.result("static", is_right, code=ran["code"], peak=device.get("peak_bytes"), said=ran["facts"], missing=missing,
                    besides=device.get("besides"), stderr=ran["stderr"][-1500:])

    def cupti(self):
        """A tool that uses CUPTI observes all calls, and so does gpumem."""
        if libcupti() is None:
            return self.result("cupti", None, why="there is no libcupti")
        for order in ("before", "after"):
            ran = self.run(self.child("cupti", order))
            device, missing = self.device(ran["files"][0]) if ran["files"] else ({}, None)
            allocations = self.report(ran["files"][0]).get("allocations") if ran["files"] else None
            observed = [ran["facts"].get("calls"), allocations, device.get("peak_bytes")]
            self.result(f"cupti-{order}", observed == [len(SIZES), len(SIZES), sum(SIZES)], observed=observed,
                        expected=[len(SIZES), len(SIZES), sum(SIZES)], missing=missing, stderr=ran["stderr"][-1500:])

    def killed(self):
        """A program that is killed at its end, without exit handlers."""
        code = (
            "import torch, os, json; a = [torch.empty(n << 20, dtype=torch.uint8, device='cuda') for n in range(1, 60)];"
            "print(json.dumps({'reserved': torch.cuda.max_memory_reserved()}), flush=True); os.kill(os.getpid(), 9)"
        )
        ran = self.run([sys.executable, "-c", code])
        device, missing = self.device(ran["files"][0]) if ran["files"] else ({}, None)
        self.result("killed", ran["code"] == 137 and device.get("peak_bytes") == ran["facts"].get("reserved"),
                    code=ran["code"], peak=device.get("peak_bytes"), said=ran["facts"], missing=missing)

    def ranks(self):
        import torch

        count = torch.cuda.device_count()
        if count < 2:
            return self.result("ranks", None, why=f"{count} GPU")
        rank_file = os.path.join(self.folder, "rank")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", os.path.abspath(__file__)]
        ran = self.run([*launcher, "--child", "torch", "ranks", "20", "ranks"], env={"RANK_FILE": rank_file})
        facts, is_right = [], len(ran["files"]) == 2
        for rank, file in enumerate(ran["files"]):
            with open(rank_file + str(rank)) as said:
                said = json.load(said)
            device, missing = self.device(file)
            by_library = {sum["name"]: sum["bytes"] for sum in device["peak_by_library"]}
            facts.append({"file": os.path.basename(file), "peak": device["peak_bytes"], "reserved": said["reserved"],
                          "by_library": by_library, "missing": missing})
            is_right &= f".rank{rank}.gpu{rank}." in file and by_library.get("PyTorch") == said["reserved"]
        self.result("ranks", is_right, ranks=facts, stderr=ran["stderr"][-3000:] if not is_right else "")
        print(ran["stderr"][-4000:])

    # With `--torch`, the peak of tensors is PyTorch's own figure, to the byte.
    def tensors(self, name, conf="", mode="plain", options=("--torch",)):
        env = {"PYTORCH_CUDA_ALLOC_CONF": conf, "PYTORCH_ALLOC_CONF": conf} if conf else {}
        ran = self.run(self.child("torch", name, 30, mode), env=env, options=options)
        if ran["code"] or len(ran["files"]) != 1:
            return self.result(name, False, code=ran["code"], files=ran["files"], stderr=ran["stderr"][-2000:])
        torch = self.report(ran["files"][0])["torch"]
        device = ((torch or {}).get("devices") or [{}])[0]
        peak, end, said = (device.get(part) or {} for part in ("peak", "at_end", "said"))
        facts = {
            "max_memory_allocated": ran["facts"]["allocated"],
            "peak": {key: value for key, value in peak.items() if key != "by_place"},
            "at_end": {key: value for key, value in end.items() if key != "by_place"},
            "said": said,
            "events": device.get("events"),
            "known_from": device.get("known_from_seconds"),
            "missing": (torch or {}).get("missing"),
            "lines_at_peak": peak.get("by_place", [])[:5],
            "after": round(ran["after"], 2),
            "bytes": os.path.getsize(ran["files"][0]),
        }
        is_right = (
            "contradicts" not in ran["stderr"]
            and end.get("allocated_bytes") == said.get("memory_allocated")
            and end.get("reserved_bytes") == said.get("memory_reserved")
        )
        if device.get("known_from_seconds") is None:
            is_right = is_right and peak.get("allocated_bytes") == ran["facts"]["allocated"]
        elif "--torch-events" not in options:
            is_right = False
        if mode == "lines":
            found = {}
            for place in end["by_place"]:
                # PyTorch does not know the line that began a backward pass. Reports name files from the folder of the program.
                is_known = place["line"] and "(backward pass)" not in place["line"]
                line = os.path.abspath(place["line"]) if is_known else "none"
                found[line] = found.get(line, 0) + place["bytes"]
            facts["lines"] = [found, ran["facts"]["lines"]]
            # The report names the innermost line of the program. PyTorch's packages do not belong to it.
            is_right = is_right and found == ran["facts"]["lines"]
        self.result(name, is_right, **facts)
        print(ran["stderr"], flush=True)

    def modules(self, name):
        """The sums by module and by class are the peak, and weights and states are what the program has at its end."""
        ran = self.run(self.child("modules", name, 3), options=["--modules"])
        if ran["code"] or len(ran["files"]) != 1:
            return self.result(name, False, code=ran["code"], stderr=ran["stderr"][-2000:])
        device = self.report(ran["files"][0])["torch"]["devices"][0]
        sums = {part: {of["class"]: of for of in device[part]["by_class"]} for part in ("peak", "at_end")}
        total = {of: sum(known["bytes"] for known in device["peak"][of]) for of in ("by_class", "by_module")}
        said = ran["facts"]
        asked = {of: sums["at_end"].get(of, {}).get("requested_bytes", 0) for of in ("weights", "optimizer")}
        is_right = set(total.values()) == {said["allocated"]} and all(asked[of] == said[of] for of in asked)
        classes = {of: known["bytes"] for of, known in sums["peak"].items()}
        modules = [(of["module"], of["modules"], of["bytes"]) for of in device["peak"]["by_module"][:4]]
        self.result("modules-" + name, is_right, said=said, asked=asked, classes=classes, modules=modules)

    def times_modules(self):
        """The step of a large and of a tiny network without gpumem, with `--torch` and with `--modules`, by turns."""
        for name, steps, rounds in ("gpt2", 12, 10), ("tiny", 300, 4):
            ways = {"untraced": None, "torch": ["--torch"], "modules": ["--modules"]}
            times = {way: [] for way in ways}
            for _ in range(rounds):
                for way, options in ways.items():
                    ran = self.run(self.child("modules", name, steps), recorded=options is not None, options=options or ())
                    times[way].append(ran["facts"]["step"])
            medians = {way: statistics.median(of) for way, of in times.items()}
            ratios = {way: round(of / medians["untraced"], 3) for way, of in medians.items()}
            self.result("times-modules-" + name, None, milliseconds={way: round(1e3 * of, 3) for way, of in medians.items()}, ratios=ratios)

    def torch_killed(self):
        code = "import torch, os; a = torch.empty(1 << 28, device='cuda'); print('{}', flush=True); os.kill(os.getpid(), 9)"
        ran = self.run([sys.executable, "-c", code], options=["--torch"])
        device, _ = self.device(ran["files"][0])
        is_right = device.get("peak_bytes") == 1 << 30 and "without Python's exit handlers" in ran["stderr"]
        self.result("torch-killed", is_right and len(ran["files"]) == 1, peak=device.get("peak_bytes"), files=ran["files"],
                    stderr=ran["stderr"][-1500:])

    def torch_ranks(self):
        import torch

        if torch.cuda.device_count() < 2:
            return self.result("torch-ranks", None, why="one GPU")
        rank_file = os.path.join(self.folder, "torch-rank")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", os.path.abspath(__file__)]
        command = [*launcher, "--child", "torch", "ranks", "20", "ranks"]
        ran = self.run(command, env={"RANK_FILE": rank_file}, options=["--torch"])
        facts, is_right = [], len(ran["files"]) == 2
        for rank, file in enumerate(ran["files"]):
            with open(rank_file + str(rank)) as said:
                said = json.load(said)
            devices = (self.report(file)["torch"] or {}).get("devices", [])
            found = {device["device"]: (device["peak"] or {}).get("allocated_bytes") for device in devices}
            facts.append({"file": os.path.basename(file), "found": found, "allocated": said["allocated"]})
            is_right &= found.get(rank) == said["allocated"]
        self.result("torch-ranks", is_right, ranks=facts, stderr=ran["stderr"][-3000:] if not is_right else "")

    def lines(self):
        """The lines of Python of each block are those that `traceback` has."""
        ran = self.run(self.child("lines"))
        if ran["code"] or len(ran["files"]) != 1:
            return self.result("lines", False, code=ran["code"], stderr=ran["stderr"][-2000:])
        words = [self.gpumem, "report", "--format", "torch", ran["files"][0]]
        snapshot = pickle.loads(subprocess.run(words, capture_output=True, check=True).stdout)
        blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
        recorded = {block["size"]: block.get("frames", []) for block in blocks}
        different = []
        for size, expected in ran["facts"]["expected"]:
            # The functions outside of Python have other files. Python's own names have no classes in `traceback`.
            frames = [frame for frame in recorded.get(size, []) if frame["filename"].endswith(".py")]
            frames = [[frame["filename"], frame["line"], frame["name"].rsplit(".", 1)[-1]] for frame in frames]
            if frames != expected:
                different.append({"size": size, "recorded": frames, "traceback": expected})
        self.result("lines", not different, python=sys.version.split()[0], blocks=len(ran["facts"]["expected"]),
                    frames=sum(len(frames) for _, frames in ran["facts"]["expected"]), different=different[:3])

    def oom(self):
        ran = self.run(self.child("oom"))
        report = self.report(ran["files"][0]) if ran["files"] else {}
        refused, said = report.get("refused") or {}, ran["facts"]
        main = refused.get("main") or {}
        # PyTorch asks once, empties its cache and asks again.
        is_right = bool(said) and refused.get("count") == said["num_alloc_retries"] + said["num_ooms"]
        is_right = is_right and refused["obtained_soon"] == said["num_alloc_retries"] - said["num_ooms"]
        is_right = is_right and (main["bytes"], main["live_bytes"]) == (said["refused"], said["reserved"])
        is_right = is_right and f"run.py:{said['line']}" in (main["place"] or "")
        first = ran["stderr"].strip().splitlines()[:2]
        is_right = is_right and first[0].startswith("Out of memory: the driver refused ")
        self.result("oom", is_right, said=said, refused={**refused, "newest": None}, summary=first)

    def dormant(self):
        """Only the blocks between `gpumem start` and `gpumem stop` are recorded: 200, then 300 MiB after the first two are freed."""
        base = os.path.join(self.folder, "dormant")
        os.mkdir(base)
        words = [self.gpumem, "run", "--dormant", "-o", os.path.join(base, "a.capture"), "--", *self.child("dormant")]
        program = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        pid = program.stdout.readline().strip()
        said = []
        for step in range(3):
            if step in (0, 2):
                done = subprocess.run([self.gpumem, "stop" if step else "start", pid], capture_output=True, text=True)
                said.append(done.stdout + done.stderr)
            program.stdin.write("\n")
            program.stdin.flush()
            program.stdout.readline()
        _, stderr = program.communicate("\n")
        files = [os.path.join(base, name) for name in os.listdir(base)]
        report = self.report(files[0]) if len(files) == 1 else {}
        device = (report.get("devices") or [{}])[0]
        is_right = program.returncode == 0 and device.get("peak_bytes") == device.get("live_at_end_bytes") == 300 * MIB
        self.result("dormant", is_right, code=program.returncode, files=files, said=said, peak=device.get("peak_bytes"),
                    missing={key: value for key, value in (report.get("missing") or {}).items() if value}, stderr=stderr[-1500:])

    def parts(self):
        """`--only-peak` has the same peak; `--max-size` keeps what is live at the end, and says what is missing."""
        whole = self.run(self.child("torch", "native", 20, "empty"))
        device, _ = self.device(whole["files"][0])
        size = os.path.getsize(whole["files"][0])
        peak = self.run(self.child("torch", "native", 20, "empty"), options=["--only-peak"])
        only, missing = self.device(peak["files"][0])
        same = ("peak_bytes", "peak_by_library", "live_at_end_bytes")
        is_right = all(only.get(key) == device.get(key) for key in same) and missing["has_only_peaks"]
        self.result("only-peak", is_right, peak=only.get("peak_bytes"), live=only.get("live_at_end_bytes"), whole=device.get("peak_bytes"),
                    bytes=[size, os.path.getsize(peak["files"][0])])
        part = self.run(self.child("torch", "native", 1000, "empty"), options=["--max-size", "64KiB"])
        newest, missing = self.device(part["files"][0])
        is_right = newest.get("live_at_end_bytes") == device["live_at_end_bytes"] and missing["begins_after_event"]
        self.result("max-size", is_right, live=newest.get("live_at_end_bytes"), peak=newest.get("peak_bytes"), missing=missing,
                    bytes=os.path.getsize(part["files"][0]), stderr=part["stderr"][-1500:])

    def candle(self):
        if not self.program_with_candle:
            return self.result("candle", None, why="--candle is not given")
        program = [os.path.abspath(self.program_with_candle), "50"]
        ran = self.run(program, env={"LD_LIBRARY_PATH": libraries_of_torch()})
        device, missing = self.device(ran["files"][0]) if ran["files"] else ({}, None)
        by_kind = {sum["name"]: sum for sum in device.get("peak_by_kind", [])}
        pool = by_kind.get("pool", {"bytes": 0, "blocks": 0})
        high = ran["facts"].get("pool_high", 0)
        # The driver counts each block in steps of 512 bytes at most.
        is_right = 0 < pool["bytes"] <= high <= pool["bytes"] + 512 * pool["blocks"]
        missing = {key: value for key, value in (missing or {}).items() if value}
        self.result("candle", ran["code"] == 0 and is_right and not missing, code=ran["code"], peak=device.get("peak_bytes"),
                    pool=pool, pool_high=high, missing=missing, by_library=device.get("peak_by_library"),
                    said=ran["facts"], stderr=ran["stderr"][-1500:])

    # For ONNX Runtime, the recording must agree with the output of its arenas, address by address.
    def onnx(self, strategy):
        name = f"onnx {strategy}"
        if not self.folder_with_onnx:
            return self.result(name, None, why="--onnx is not given")
        path = ":".join([os.path.abspath(self.folder_with_onnx), os.environ.get("PYTHONPATH", "")])
        # Only the kernels that are started are read: the others may have been left out.
        env = {"PYTHONPATH": path, "LD_LIBRARY_PATH": libraries_of_torch(), "CUDA_MODULE_LOADING": "LAZY"}
        ran = self.run(self.child("onnx", "CUDAExecutionProvider", strategy), env=env)
        with open(os.path.join(self.folder, name.replace(" ", "-") + ".txt"), "w") as file:
            file.write(ran["stderr"])
        if ran["code"] != 5 or len(ran["files"]) != 1:
            return self.result(name, False, code=ran["code"], files=ran["files"], stderr=ran["stderr"][-4000:])
        if self.recording_of_onnx:
            shutil.copy(ran["files"][0], self.recording_of_onnx + strategy + ".capture")
            shutil.copy(file.name, self.recording_of_onnx + strategy + ".txt")
        asked = onnx_arenas(ran["stderr"], "cuda")
        words = [self.gpumem, "report", "--format", "json", ran["files"][0]]
        events = map(json.loads, subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines())
        rows = [(event["action"], abs(event["change_bytes"]), event["address"]) for event in events if event["action"] != "shrink"]
        # The search for each block of the arenas begins after the block before it. The log has no address of blocks
        # with `reserve`.
        next_row, different, mine = iter(enumerate(rows)), [], {}
        for what, size, address in asked:
            if what == "shrink":
                continue
            for row, (action, recorded, at) in next_row:
                if (action, recorded) == ("alloc", size) and address in (at, None):
                    mine[row] = at
                    break
            else:
                different.append([what, size, address])
        live, live_addresses, freed, peak = 0, set(), [], 0
        for row, (action, size, address) in enumerate(rows):
            if row in mine:
                live_addresses.add(address)
            elif action == "free" and address in live_addresses:
                live_addresses.remove(address)
                freed.append(size)
        for what, size, _ in asked:
            live += -size if what == "shrink" else size
            peak = max(peak, live)
        shrunk = [size for what, size, _ in asked if what == "shrink"]
        device, missing = self.device(ran["files"][0])
        by_library = {sum["name"]: sum["bytes"] for sum in device.get("peak_by_library", [])}
        facts = {
            **ran["facts"],
            "code": ran["code"],
            "asked": {what: [event[1] for event in asked if event[0] == what] for what in ("extend", "reserve", "shrink")},
            "peak_of_arenas": peak,
            "peak": device.get("peak_bytes"),
            "by_library": by_library,
            "not_recorded": different,
            "freed": freed,
            "smallest": min((size for _, size, _ in asked), default=None),
            "others": [size for row, (action, size, _) in enumerate(rows) if action == "alloc" and row not in mine],
            "places": [[place["place"], place["library"], place["bytes"]] for place in device.get("peak_by_place", [])],
            "live_at_end": device.get("live_at_end_bytes"),
            "besides": device.get("besides"),
            "missing": {key: value for key, value in (missing or {}).items() if value},
        }
        is_right = (
            len(asked) >= 5
            and not different
            and by_library.get("ONNX Runtime") == peak
            and sum(by_library.values()) == device["peak_bytes"]
            and not facts["missing"]
            and ran["facts"]["difference"] < 1e-3
        )
        if strategy == "kSameAsRequested":
            # The program ends without destructors, so the arenas free nothing else.
            is_right = is_right and bool(shrunk) and sorted(freed) == sorted(shrunk)
        self.result(name, is_right, **facts)
        if not is_right:
            print(ran["stderr"][-6000:], flush=True)

    # Times are measured in pairs of runs, one with and one without gpumem, in turns.
    def times(self, name, conf, steps, options=()):
        env = {"PYTORCH_CUDA_ALLOC_CONF": conf, "PYTORCH_ALLOC_CONF": conf} if conf else {}
        child = lambda steps: self.child("torch", name, steps, "plain")
        # Each run has at least 10 s of steps. Their number is measured first.
        if not steps:
            trial = self.run(child(300), False, env)["facts"]["seconds"]
            steps = int(300 * 10.3 / trial) + 1
        end = time.time() + self.seconds
        pairs = []
        while not pairs or time.time() + 2.2 * pairs[-1]["wall"][0] < end:
            order = [True, False] if len(pairs) % 2 else [False, True]
            pair = {recorded: self.run(child(steps), recorded, env, options) for recorded in order}
            pairs.append({
                "first": "recorded" if order[0] else "alone",
                "steps": [pair[recorded]["facts"]["seconds"] for recorded in (False, True)],
                "wall": [pair[recorded]["wall"] for recorded in (False, True)],
                "program": [pair[recorded]["wall"] - pair[recorded]["after"] for recorded in (False, True)],
            })
        self.result(f"times {name}", None, steps=steps, ratio=medians(pairs), all=pairs)


def libraries_of_torch():
    """LD_LIBRARY_PATH with CUDA's libraries that PyTorch's packages contain."""
    import torch

    folders = [os.path.join(os.path.dirname(torch.__file__), "lib")]
    for path in sys.path:
        folders += [folder for folder, _, files in os.walk(os.path.join(path, "nvidia")) if folder.endswith("lib") and files]
    return ":".join([*folders, os.environ.get("LD_LIBRARY_PATH", "")])


def medians(pairs):
    """The factors by which gpumem slows the steps, the process up to its end, and the whole command."""
    return {key: statistics.median(pair[key][1] / pair[key][0] for pair in pairs) for key in ("steps", "program", "wall")}


def join(files):
    """Compares the times of all pairs that several runs of this script have measured."""
    pairs, failed = {}, False
    for file in files:
        with open(file) as lines:
            for line in map(json.loads, lines):
                if line["name"].startswith("times "):
                    pairs.setdefault(line["name"], []).extend(line["all"])
    for name, most in (("times native", 1.01), ("times async", 1.03)):
        all_pairs = pairs.get(name, [])
        for number, pair in enumerate(all_pairs, 1):
            ratios = ", ".join(f"{key} {pair[key][1] / pair[key][0]:.4f}" for key in ("steps", "program", "wall"))
            print(f"     {name} {number:2}, {pair['first']} first, {pair['steps'][0]:.3f} s of steps alone: {ratios}")
        if not all_pairs:
            print("FAIL", name, "no pairs")
            failed = True
            continue
        ratio = medians(all_pairs)
        is_long = min(min(pair["steps"]) for pair in all_pairs) >= 10
        is_right = len(all_pairs) >= 15 and is_long and ratio["steps"] <= most
        failed |= not is_right
        words = ", ".join(f"{key} {value:.4f}" for key, value in ratio.items())
        print("PASS" if is_right else "FAIL", f"{name}: median of {len(all_pairs)} pairs: {words}; at most {most} for the steps")
        # These times include loading libraries, which differs more from run to run.
        print("INFO" if ratio["program"] <= most else "FAIL", f"{name}: the whole process {ratio['program']:.4f}")
    return int(failed)


def main():
    if sys.argv[1:2] == ["--child"]:
        kind, *words = sys.argv[2:]
        if kind == "torch":
            return child_torch(words[0], int(words[1]), words[2])
        if kind == "modules":
            return child_modules(words[0], int(words[1]))
        if kind == "onnx":
            return child_onnx(*words)
        if kind == "cupti":
            return child_cupti(words[0])
        return {"jax": child_jax, "lines": child_lines, "oom": child_oom, "dormant": child_dormant}[kind]()
    if sys.argv[1:2] == ["--join"]:
        return join(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpumem")
    parser.add_argument("--out")
    parser.add_argument("--only", default="static,killed,cupti,handles,lines,oom,dormant,parts,native,expandable,async,profiler,jax,candle,onnx,ranks,torch,times,times-async")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--steps", type=int, default=0, help="0: as many as take 10 s")
    parser.add_argument("--candle", help="a program with candle, see above")
    parser.add_argument("--onnx", help="a folder with the package onnxruntime, see above")
    parser.add_argument("--onnx-recordings", help="the recordings and logs of `onnx` are kept in files whose names begin so")
    arguments = parser.parse_args()
    proof = Proof(arguments.gpumem, arguments.out, arguments.seconds)
    proof.program_with_candle = arguments.candle
    proof.folder_with_onnx = arguments.onnx
    proof.recording_of_onnx = arguments.onnx_recordings
    comparisons = {
        "static": proof.static,
        "killed": proof.killed,
        "cupti": proof.cupti,
        "handles": lambda: proof.allocator("handles", "", "reserved", "handles"),
        "lines": proof.lines,
        "oom": proof.oom,
        "dormant": proof.dormant,
        "parts": proof.parts,
        "candle": proof.candle,
        "onnx": lambda: [proof.onnx(strategy) for strategy in ("kNextPowerOfTwo", "kSameAsRequested")],
        "native": lambda: proof.allocator("native", "", "reserved"),
        "expandable": lambda: proof.allocator("expandable", "expandable_segments:True", "reserved"),
        "async": lambda: proof.allocator("async", "backend:cudaMallocAsync", "allocated"),
        "profiler": lambda: proof.allocator("profiler", "", "reserved", "profiler"),
        "jax": proof.jax,
        "ranks": proof.ranks,
        "torch-native": lambda: proof.tensors("torch-native"),
        "torch-lines": lambda: proof.tensors("torch-lines", mode="lines"),
        "torch-empty": lambda: proof.tensors("torch-empty", mode="empty"),
        "torch-expandable": lambda: proof.tensors("torch-expandable", "expandable_segments:True"),
        "torch-rounded": lambda: proof.tensors("torch-rounded", "roundup_power2_divisions:4,max_split_size_mb:32"),
        "torch-full": lambda: proof.tensors("torch-full", options=["--torch", "--torch-events", "2000"]),
        "torch-cuda-first": lambda: proof.tensors("torch-cuda-first", mode="cuda-first"),
        "torch-workers": lambda: proof.tensors("torch-workers", mode="workers"),
        "torch-compile": lambda: proof.tensors("torch-compile", mode="compile"),
        **{"modules-" + name: lambda name=name: proof.modules(name) for name in ("gpt2", "llama", "resnet50", "vit_b_16", "generate", "compiled")},
        "times-modules": proof.times_modules,
        "torch-killed": proof.torch_killed,
        "torch-ranks": proof.torch_ranks,
        "times-torch": lambda: proof.times("torch", "", arguments.steps, ["--torch"]),
        "times": lambda: proof.times("native", "", arguments.steps),
        "times-async": lambda: proof.times("async", "backend:cudaMallocAsync", arguments.steps),
    }
    names = arguments.only.split(",")
    for group in set(names) & {"torch", "modules"}:
        names[names.index(group):names.index(group) + 1] = [name for name in comparisons if name.startswith(group + "-")]
    for name in names:
        try:
            comparisons[name]()
        except Exception as error:  # The next comparison is still of interest.
            proof.result(name, False, error=repr(error))
    return int(proof.failed)


if __name__ == "__main__":
    sys.exit(main())

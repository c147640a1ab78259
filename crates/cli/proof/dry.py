#!/usr/bin/env python3
"""Compares dry runs with real runs of the same programs.

    python crates/cli/proof/dry.py target/release/gpumem [--only gpt2,resnet] [--card 140GiB]

Each program runs with `gpumem run --dry` first, and then without gpumem. It prints one line of JSON: the most that its allocator had from
the driver, and the most that its tensors had. A line PASS (as much from the driver), NEAR (within 2 %) or FAIL is printed for each. It needs an NVIDIA GPU and PyTorch;
`jax` and `cupy` need these packages, `cpp` needs nvcc.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time

MIB = 1 << 20


def torch_figures():
    import torch

    return {"reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated()}


def gpt2(steps=4, lengths=(128, 512, 300, 1024), checkpoint=False, batch=4, dtype=None):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).cuda()
    if checkpoint:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        x = torch.randint(0, 50257, (batch, lengths[step % len(lengths)]), device="cuda")
        with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    return torch_figures()


def gpt2_checkpoint():
    return gpt2(checkpoint=True)


def gpt2_autocast():
    import torch

    return gpt2(dtype=torch.bfloat16)


def gpt2_clip():
    """Gradients are clipped, and a scaler looks for infinite ones."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=6)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        x = torch.randint(0, 50257, (4, 256), device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(input_ids=x, labels=x).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return torch_figures()


def llama(steps=3):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4, vocab_size=32000)
    model = LlamaForCausalLM(config).to(device="cuda", dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(steps):
        x = torch.randint(0, 32000, (4, 1024), device="cuda")
        model(input_ids=x, labels=x, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch_figures()


def generate():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4, vocab_size=32000)
    model = LlamaForCausalLM(config).to(device="cuda", dtype=torch.bfloat16).eval()
    for length in (20, 100, 60):
        x = torch.randint(3, 32000, (2, length), device="cuda")
        model.generate(x, max_new_tokens=40, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(x))
    return torch_figures()


def vision(name, sizes, batch=16, steps=3, benchmark=False):
    import torch
    import torchvision

    torch.backends.cudnn.benchmark = benchmark
    model = getattr(torchvision.models, name)().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        size = sizes[step % len(sizes)]
        x = torch.randn(batch, 3, size, size, device="cuda")
        y = torch.randint(0, 1000, (batch,), device="cuda")
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch_figures()


def resnet():
    return vision("resnet50", (224, 160, 288, 224))


def resnet_benchmark():
    return vision("resnet50", (224, 160), benchmark=True)


def vit():
    return vision("vit_l_16", (224,), batch=8)


def vgg():
    return vision("vgg16", (224,), batch=8)


def mobilenet():
    return vision("mobilenet_v3_large", (224, 192), batch=32)


def blocks():
    import torch

    shuffled, kept = random.Random(5), {}
    for number in range(400):
        kept[number] = torch.empty(shuffled.randint(1, 12 * MIB), dtype=torch.uint8, device="cuda")
        while len(kept) > 60:
            del kept[shuffled.choice(list(kept))]
    return torch_figures()


def streams():
    import torch

    streams = [torch.cuda.Stream() for _ in range(4)]
    for step in range(20):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                x = torch.ones(((step * 7 + number * 3) % 10 + 1) * MIB, device="cuda")
                y = x * 2
                y.record_stream(streams[(number + 1) % 4])
                del x, y
    torch.cuda.synchronize()
    return torch_figures()


def empty_cache():
    import torch

    for size in (300, 20, 700, 5):
        x = [torch.ones(size * MIB // 8, device="cuda") for _ in range(3)]
        del x
        if size == 20:
            torch.cuda.empty_cache()
    return torch_figures()


def compiled():
    import torch

    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)) for _ in range(4)]).cuda()
    step = torch.compile(model)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        step(torch.randn(512, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch_figures()


def graph():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)).cuda()
    x = torch.randn(2048, 1024, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            model(x).sum().backward()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(captured):
        y = model(x)
        y.sum().backward()
    for _ in range(5):
        captured.replay()
    y.sum().item()
    return torch_figures()


def loader():
    import torch

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, at):
            return torch.full((3, 128, 128), float(at)), at

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10)).cuda()
    for x, y in torch.utils.data.DataLoader(Data(), batch_size=16, num_workers=2, pin_memory=True):
        torch.nn.functional.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda() % 10).backward()
    return torch_figures()


def masks():
    """Lengths and stop criteria that are computed on the device, in small tensors."""
    import torch

    lengths = torch.tensor([3, 9, 5], device="cuda")
    steps = 0
    while bool((lengths > 0).any()):
        lengths -= 1
        steps += 1
        torch.ones(int(lengths.clamp(min=0).sum()) + 1, 4 * MIB, dtype=torch.uint8, device="cuda")
    assert steps == 9, steps
    return torch_figures()


def out_of_memory():
    """The program tries a smaller batch when memory runs out: the card has to be the same."""
    import torch

    batch, tried = 1 << 20, 0
    while True:
        try:
            x = torch.empty(batch, 256, 1024, device="cuda")
            break
        except torch.cuda.OutOfMemoryError:
            batch, tried = batch // 2, tried + 1
    return {**torch_figures(), "tried": tried, "batch": batch}


def moe():
    """Experts are chosen by a small router, and their shapes depend on data."""
    import torch

    torch.manual_seed(0)
    experts = torch.nn.ModuleList([torch.nn.Linear(512, 2048) for _ in range(8)]).cuda()
    router = torch.nn.Linear(512, 8).cuda()
    x = torch.randn(256, 512, device="cuda")
    chosen = router(x).argmax(-1)
    for number, expert in enumerate(experts):
        rows = (chosen == number).nonzero().flatten()
        expert(x[rows]).sum().backward()
    return torch_figures()


def ddp():
    """Two ranks with gloo on one card."""
    import torch
    import torch.distributed as distributed

    distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]).cuda())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.randn(256, 2048, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    figures = torch_figures()
    rank = distributed.get_rank()
    distributed.destroy_process_group()
    return figures if rank == 0 else None


def jax():
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax as module
    import jax.numpy as numpy

    def loss(w, x):
        for _ in range(4):
            x = numpy.tanh(x @ w)
        return x.sum()

    w, x = numpy.ones((2048, 2048)), numpy.ones((4096, 2048))
    step = module.jit(module.value_and_grad(loss))
    for _ in range(3):
        value, gradient = step(w, x)
        w = w - 0.1 * gradient
    module.block_until_ready(w)
    stats = module.devices()[0].memory_stats()
    return {"reserved": stats.get("peak_pool_bytes", stats["peak_bytes_in_use"]), "allocated": stats["peak_bytes_in_use"]}


def cupy():
    import cupy as module

    x = module.random.rand(4096, 4096)
    y = x @ x
    z = module.sort(y, axis=0) + module.fft.fft2(x).real
    float(z[0, 0])
    pool = module.get_default_memory_pool()
    return {"reserved": pool.total_bytes(), "allocated": pool.used_bytes()}


CPP = r"""
#include <cstdio>
#include <cuda_runtime.h>
__global__ void add(float *x, const float *y, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] += y[i]; }
__global__ void count(int *n) { *n += 1; }
int main() {
    size_t free0, free1, total;
    float *x, *y; int *n, host = 0, n0 = 64 << 20;
    cudaMalloc(&n, 4); cudaMemset(n, 0, 4);
    cudaMemGetInfo(&free0, &total);
    cudaMalloc(&x, n0 * 4ul); cudaMallocAsync(&y, n0 * 4ul, 0);
    cudaMemset(x, 0, n0 * 4ul); cudaMemsetAsync(y, 1, n0 * 4ul, 0);
    while (host < 5) { add<<<n0 / 256, 256>>>(x, y, n0); count<<<1, 1>>>(n); cudaMemcpy(&host, n, 4, cudaMemcpyDeviceToHost); }
    cudaMemGetInfo(&free1, &total);
    cudaDeviceProp properties; cudaGetDeviceProperties(&properties, 0);
    cudaPointerAttributes about; cudaPointerGetAttributes(&about, x + 5);
    printf("{\"reserved\": %zu, \"allocated\": %d, \"agrees\": %d, \"type\": %d, \"device\": %d, \"error\": %d}\n", free0 - free1, host,
        (int)(properties.totalGlobalMem == total), (int)about.type, about.device, (int)cudaGetLastError());
    cudaFree(x); cudaFreeAsync(y, 0); cudaDeviceSynchronize();
    return 0;
}
"""

PROGRAMS = [gpt2, gpt2_checkpoint, gpt2_autocast, gpt2_clip, llama, generate, resnet, resnet_benchmark, vit, vgg, mobilenet, blocks, streams, empty_cache]
PROGRAMS += [compiled, graph, loader, masks, out_of_memory, moe, ddp, jax, cupy]
NAMES = [program.__name__ for program in PROGRAMS]
# These programs also run with these settings of PyTorch's allocator.
EXPANDABLE = ["gpt2", "resnet", "blocks", "streams"]


def command_of(name, folder):
    if name == "cpp":
        source, program = os.path.join(folder, "x.cu"), os.path.join(folder, "x")
        if not os.path.exists(program):
            with open(source, "w") as file:
                file.write(CPP)
            subprocess.run(["nvcc", "-O1", "-o", program, source], check=True)
        return [program]
    own = [os.path.abspath(__file__), "--program", name]
    if name == "ddp":
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29517", *own]
    return [sys.executable, *own]


def ran(command, environment):
    begun = time.time()
    try:
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired as late:
        return None, "it took more than 240 s; " + (late.stderr or b"").decode(errors="replace")[-600:], 240
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return (json.loads(lines[-1]) if lines else None), done.stderr[-1500:], time.time() - begun


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("gpumem", nargs="?")
    parser.add_argument("--program")
    parser.add_argument("--only", default=",".join(NAMES + [name + ":expandable" for name in EXPANDABLE] + ["cpp"]))
    parser.add_argument("--card")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.program:
        # The allocations of a program may depend on its data.
        if arguments.program not in ("cupy", "jax"):
            import torch

            torch.manual_seed(0)
        figures = globals()[arguments.program]()
        if figures:
            print(json.dumps(figures), flush=True)
        return 0
    failed = 0
    with tempfile.TemporaryDirectory() as folder:

        def compare(case):
            name, _, setting = case.partition(":")
            environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if setting else {}
            # Otherwise the second run would find the compiled code of the first one.
            environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
            command = command_of(name, folder)
            card = ["--card", arguments.card] if arguments.card else []
            recording = os.path.join(folder, case.replace(":", "-") + ".capture")
            dry, why, dry_seconds = ran([arguments.gpumem, "run", "--dry", *card, "-o", recording, "--", *command], environment)
            real, why_real, seconds = ran(command, environment)
            # Some programs differ from run to run.
            again = ran(command, environment)[0] if dry and real and dry["reserved"] != real["reserved"] else real
            if not dry or not real:
                return "FAIL", f"{case}: dry {dry}, real {real}: {(why if not dry else why_real)}"
            by = (dry["reserved"] - real["reserved"]) / max(real["reserved"], 1)
            word = "PASS" if again and dry["reserved"] in (real["reserved"], again["reserved"]) else "NEAR" if abs(by) <= 0.02 else "FAIL"
            return word, f"{case}: dry {json.dumps(dry)} in {dry_seconds:.1f} s, real {json.dumps(real)} in {seconds:.1f} s, {by:+.3%}" + (
                f", again {json.dumps(again)}" if again != real else ""
            )

        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(arguments.jobs) as pool:
            for word, line in pool.map(compare, arguments.only.split(",")):
                print(word, line, flush=True)
                failed += word == "FAIL"
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Measures what a process of PyTorch has on the device beside the memory that its allocator reserved: the CUDA context, the
kernels that it has loaded, and what libraries allocate for themselves. docs/ESTIMATE.md says what for.

    python3 context.py --out context.jsonl

Nothing else may run on the device. A parent process without a CUDA context reads the used memory of the device from NVML before a
process begins and after each of its stages. One JSON object for each process and line; `beyond` are bytes:

    used at the stage - used before the process - `torch.cuda.memory_reserved()` at the stage
"""

import argparse
import ctypes
import json
import subprocess
import sys
import time


class Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def used():
    """The used memory of device 0, without a CUDA context."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    assert nvml.nvmlInit_v2() == 0
    device, memory = ctypes.c_void_p(), Memory()
    assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
    assert nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
    nvml.nvmlShutdown()
    return memory.used


def stages(which):
    """Runs the stages of the child. After each stage it waits for the parent."""
    import torch

    sync = torch.cuda.synchronize
    dtype = torch.bfloat16 if which.endswith("bf16") else torch.float32

    def step(model, batch, loss):
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                value = loss(model, batch)
            value.backward()
            optimizer.step()

    torch.empty(1, device="cuda")
    sync()
    yield "context"
    if which.startswith("operations"):
        a = torch.ones(1024, 1024, device="cuda", dtype=dtype)
        (a + a).sum().item()
        yield "elementwise"
        (a @ a).sum().item()
        yield "matrix product"
        image = torch.ones(4, 64, 32, 32, device="cuda", dtype=dtype)
        torch.nn.Conv2d(64, 64, 3).to("cuda", dtype)(image).sum().item()
        yield "convolution"
    elif which.startswith("gpt2"):
        import transformers as t

        model = t.GPT2LMHeadModel._from_config(t.GPT2Config(), attn_implementation="sdpa").cuda()
        step(model, torch.ones(1, 64, dtype=torch.long, device="cuda"), lambda m, b: m(input_ids=b, labels=b, use_cache=False).loss)
        sync()
        yield "training step"
    else:
        import torchvision

        model = torchvision.models.resnet50().cuda()
        step(model, torch.ones(2, 3, 224, 224, device="cuda"), lambda m, b: m(b).float().square().mean())
        sync()
        yield "training step"


def child(which):
    import torch

    for stage in stages(which):
        print(json.dumps({"stage": stage, "reserved": torch.cuda.memory_reserved()}), flush=True)
        sys.stdin.readline()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    capability = list(torch.cuda.get_device_capability())
    print(json.dumps({"device": torch.cuda.get_device_name(), "capability": capability, "versions": versions}), flush=True)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--child")
    arguments.add_argument("--out", default="context.jsonl")
    args = arguments.parse_args()
    if args.child:
        child(args.child)
        return
    with open(args.out, "w") as out:
        for which in ["operations fp32", "operations bf16", "gpt2 fp32", "gpt2 bf16", "resnet50 fp32", "resnet50 bf16"]:
            time.sleep(2)
            before = used()
            command = [sys.executable, __file__, "--child", which]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            result = {"process": which, "used_before": before, "beyond": {}}
            for line in process.stdout:
                said = json.loads(line)
                if "stage" not in said:
                    result |= said
                    continue
                result["beyond"][said["stage"]] = used() - before - said["reserved"]
                process.stdin.write("\n")
                process.stdin.flush()
            process.wait()
            out.write(json.dumps(result) + "\n")
            out.flush()
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

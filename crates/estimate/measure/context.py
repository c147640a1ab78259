#!/usr/bin/env python3
"""Measures what a process of PyTorch has on the device in addition to the memory that its allocator reserved: the CUDA context, the
kernels that it has loaded, and what libraries allocate for themselves. docs/ESTIMATE.md says what for.

    python3 context.py --out context.jsonl

Nothing else may run on the device. A parent process without a CUDA context reads the used memory of the device from NVML before a
process starts and after each of its stages. One JSON object for each process and line; `beyond` are bytes:

    used at the stage - used before the process - `torch.cuda.memory_reserved()` at the stage
"""

import argparse
import ctypes
import json
import multiprocessing
import time

import torch

from measure import Cuda, build, prepare, run_phases

SHAPES = {"gpt2": {"sequence": 64}, "resnet50": {"image": 224}}


def used():
    """The used memory of device 0, without a CUDA context."""
    nvml, device, memory = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    assert nvml.nvmlInit_v2() == 0
    assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
    assert nvml.nvmlDeviceGetMemoryInfo(device, memory) == 0
    nvml.nvmlShutdown()
    _total, _free, used = memory
    return used


def stages(which, precision):
    """Runs the stages of a process."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    torch.empty(1, device="cuda")
    yield "context"
    if which == "operations":
        a = torch.ones(1024, 1024, device="cuda", dtype=dtype)
        (a + a).sum().item()
        yield "elementwise"
        (a @ a).sum().item()
        yield "matrix product"
        image = torch.ones(4, 64, 32, 32, device="cuda", dtype=dtype)
        torch.nn.Conv2d(64, 64, 3).to("cuda", dtype)(image).sum().item()
        yield "convolution"
    else:
        step = {"batch": 2, "optimizer": "adam"} | ({"autocast": "bf16"} if precision == "bf16" else {})
        row = {"model": which, "shape": SHAPES[which], "step": step}
        forward, optimizer, _ = prepare(row, build(row), torch.device("cuda"))
        run_phases(step, Cuda(), forward, optimizer, [])
        yield "training step"


def child(pipe, *which):
    for stage in stages(*which):
        torch.cuda.synchronize()
        pipe.send({"stage": stage, "reserved": torch.cuda.memory_reserved()})
        pipe.recv()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    capability = list(torch.cuda.get_device_capability())
    pipe.send({"device": torch.cuda.get_device_name(), "capability": capability, "versions": versions})


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--out", default="context.jsonl")
    args = arguments.parse_args()
    with open(args.out, "w") as out:
        for which in [(name, precision) for name in ("operations", "gpt2", "resnet50") for precision in ("fp32", "bf16")]:
            time.sleep(2)
            before, (pipe, other) = used(), multiprocessing.Pipe()
            process = multiprocessing.get_context("fork").Process(target=child, args=(other, *which))
            process.start()
            result = {"process": " ".join(which), "used_before": before, "beyond": {}}
            while "stage" in (report := pipe.recv()):
                result["beyond"][report["stage"]] = used() - before - report["reserved"]
                pipe.send(None)
            process.join()
            out.write(json.dumps(result | report) + "\n")
            print(json.dumps(result | report), flush=True)


if __name__ == "__main__":
    main()

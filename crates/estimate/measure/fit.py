#!/usr/bin/env python3
"""Fills a device so that a given amount of memory remains, and runs training steps with AdamW, each batch in a separate process. The
result shows which of them ran and which ran out of memory. docs/ESTIMATE.md says what for.

    python3 fit.py --remain 16 --out fit.jsonl gpt2=15,17 vit-b/bf16=90,99

A model is one of `tests/modules.jsonl` or of torchvision, in fp32, or with `/bf16` under autocast. The memory that remains is what the driver
reports as free before a process starts: its CUDA context and its kernels are taken from it. One JSON object for each batch:

    row, ran             `ran` is false if torch ran out of memory
    phases               the phases that ended, with their peaks
    remain               what remained before the process started, in bytes
    free_with_context    what was free of that when the process had its CUDA context
    peak, reserved       torch's maxima
    retries              how often torch returned its free segments because memory ran out, and tried again
    beyond               what the process had at the end in addition to `reserved`, in bytes: context, kernels, libraries

It needs a CUDA device on which nothing else runs, torch, torchvision and transformers.
"""

import argparse
import json
import os
import time

import torch

from measure import Cuda, build, finish, prepare, run_phases, start

MIB = 1 << 20
STEPS = 4


def fill(remain):
    """Starts a process that takes all memory of the device but `remain` bytes. Returns what remains, and a pipe that ends the process."""
    (ready, filled), (wait, go_on) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(go_on)
        blocks = []
        # Memory below 2 MiB cannot be taken in this way.
        while (rest := torch.cuda.mem_get_info()[0] - remain) >= 2 * MIB:
            blocks.append(torch.empty(min(rest // (2 * MIB), 16384) * 2 * MIB, dtype=torch.uint8, device="cuda"))
        os.write(filled, str(torch.cuda.mem_get_info()[0]).encode())
        os.close(filled)
        os.read(wait, 1)
        os._exit(0)
    os.close(filled)
    os.close(wait)
    return int(os.fdopen(ready).read()), go_on


def trial(row, model, remain):
    # The memory of the process before this one may not be free yet. This process has its context already.
    deadline = time.time() + 10
    while torch.cuda.mem_get_info()[0] < remain - 1024 * MIB and time.time() < deadline:
        time.sleep(0.1)
    result = row | {"remain": remain, "free_with_context": torch.cuda.mem_get_info()[0], "phases": [], "ran": False}
    try:
        forward, optimizer, _ = prepare(row, model, torch.device("cuda"))
        run_phases(row["step"], Cuda(), forward, optimizer, result["phases"], STEPS)
        result["ran"] = True
    except torch.OutOfMemoryError as error:
        result["message"] = str(error)[:300]
    result["peak"] = max([torch.cuda.max_memory_allocated(), *(peak for _, peak in result["phases"])])
    result["reserved"] = torch.cuda.max_memory_reserved()
    result["retries"] = torch.cuda.memory_stats().get("num_alloc_retries")
    result["beyond"] = remain - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
    return result


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("models", nargs="+", help="MODEL[/bf16]=BATCH,BATCH…")
    arguments.add_argument("--remain", type=float, default=16, help="GiB")
    arguments.add_argument("--out", default="fit.jsonl")
    args = arguments.parse_args()
    torch.set_num_threads(1)
    # No CUDA context may exist in a process that forks, and the process that fills the device is the first one.
    remain, filler = fill(int(args.remain * 1024 * MIB))
    with open(args.out, "w") as file:
        for choice in args.models:
            name, batches = choice.split("=")
            model, _, precision = name.partition("/")
            shape = {"sequence": 512} if model.startswith("gpt2") else {"sequence": 256} if model.startswith("llama") else {"image": 224}
            autocast = {"autocast": "bf16"} if precision == "bf16" else {}
            built = build({"model": model})
            for batch in map(int, batches.split(",")):
                step = {"batch": batch, "optimizer": "adam"} | autocast
                row = {"row": f"{name}/{batch}", "model": model, "shape": shape, "step": step}
                result = row | finish(start(lambda: trial(row, built, remain)))
                file.write(json.dumps(result) + "\n")
                print(row["row"], "ran" if result.get("ran") else result.get("message", result.get("error")), flush=True)
    os.close(filler)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Fills a device so that a given amount of memory remains, and runs training steps of given batch sizes, each in a process of its
own. It says which of them ran and which ran out of memory. docs/ESTIMATE.md says what for.

    python3 fit.py --remain 16 --out fit.jsonl gpt2=15,17 vit-b/bf16=90,99
    python3 fit.py --remain 16 --search gpt2=15,17          and looks for the largest batch that runs

A model is one of `measure.py`, in fp32, or with `/bf16` under autocast; the optimizer is AdamW. The memory that remains is what the
driver reports as free before the process begins: its CUDA context and its kernels are taken from it. One JSON object for each trial:

    model, precision, batch, ran         `ran` is false if torch ran out of memory
    where                                the step in which it did
    remain                               what remained before the process began, in bytes
    free_with_context                    what was free of that when it had its CUDA context
    peak, reserved                       torch's maxima
    retries                              how often torch returned its free segments because memory ran out, and tried again
    beyond                               what the process had at the end beside `reserved`, in bytes: context, kernels, libraries

It needs a CUDA device on which nothing else runs, torch, torchvision and transformers.
"""

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path

import measure
from processes import finish, start

GIB = 1 << 30
MIB = 1 << 20


def fill(remain):
    """Starts a process that takes all memory of the device but `remain` bytes. Returns a pipe; the process ends when it is closed."""
    ready, said = os.pipe()
    wait, go_on = os.pipe()
    if os.fork() == 0:
        os.close(ready)
        os.close(go_on)
        try:
            import torch

            blocks = []
            # Memory below 2 MiB cannot be taken in this way.
            while (rest := torch.cuda.mem_get_info()[0] - remain) >= 2 * MIB:
                blocks.append(torch.empty(min(rest // (2 * MIB), 16384) * 2 * MIB, dtype=torch.uint8, device="cuda"))
            os.write(said, str(torch.cuda.mem_get_info()[0]).encode())
        except BaseException:
            os.write(said, traceback.format_exc()[-2000:].encode())
        os.close(said)
        os.read(wait, 1)
        os._exit(0)
    os.close(said)
    os.close(wait)
    text = os.fdopen(ready).read()
    if not text.isdigit():
        sys.exit(text or "the process that fills the device has ended")
    print(f"{int(text) / GIB:.4f} GiB remain", flush=True)
    return go_on, int(text)


def trial(row, model, steps, remains):
    import torch

    device = torch.device("cuda")
    # The memory of the process before this one may not be free yet. This process has its context already.
    deadline = time.time() + 10
    while torch.cuda.mem_get_info()[0] < remains - GIB and time.time() < deadline:
        time.sleep(0.1)
    result = {"free_with_context": torch.cuda.mem_get_info()[0]}
    where = "model"
    try:
        model.to(device)
        model.train()
        where = "inputs"
        batch = measure.inputs(row, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for number in range(1, steps + 1):
            where = f"forward {number}"
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=row["precision"] == "bf16"):
                loss = measure.forward(row, model, batch)
            where = f"backward {number}"
            loss.backward()
            where = f"update {number}"
            optimizer.step()
            torch.cuda.synchronize()
        result["ran"] = True
    except torch.OutOfMemoryError as error:
        result |= {"ran": False, "where": where, "message": str(error)[:300]}
    statistics = torch.cuda.memory_stats()
    result["peak"], result["reserved"] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    result["retries"] = statistics.get("num_alloc_retries")
    result["beyond"] = remains - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
    return result


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("models", nargs="+", help="MODEL[/bf16]=BATCH,BATCH…")
    arguments.add_argument("--remain", type=float, default=16, help="GiB")
    arguments.add_argument("--steps", type=int, default=4)
    arguments.add_argument("--search", action="store_true", help="look for the largest batch that runs")
    arguments.add_argument("--seconds", type=int, default=200, help="no trial begins after this time")
    arguments.add_argument("--out", default="fit.jsonl")
    args = arguments.parse_args()
    deadline = time.time() + args.seconds
    # The modules are imported once, before all forks. No CUDA context may exist in a process that forks.
    import torch
    import torchvision  # noqa: F401
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    # The context of this process must not exist: the process that fills the device is the first one.
    filler, remains = fill(int(args.remain * GIB))
    Path(args.out).write_text("")

    def run(name, precision, model, batch):
        if time.time() > deadline:
            print(f"{name} {batch}: no time was left", flush=True)
            return None
        shape = measure.SHAPES.get(name, measure.IMAGE)
        row = {"model": name, "batch": batch, "mode": "adamw", "precision": precision, "shape": shape}
        result = {"model": name, "precision": precision, "batch": batch, "remain": remains}
        began = time.time()
        result |= finish(start(lambda: trial(row, model, args.steps, remains)))
        result["seconds"] = round(time.time() - began, 1)
        with open(args.out, "a") as file:
            file.write(json.dumps(result) + "\n")
        said = {True: "ran", False: "out of memory in " + str(result.get("where"))}.get(result.get("ran"), result.get("error"))
        print(f"{name}/{precision} {batch}: {said} {result.get('retries')} retries", flush=True)
        return result.get("ran")

    for choice in args.models:
        name, batches = choice.split("=")
        name, _, precision = name.partition("/")
        precision = precision or "fp32"
        model = measure.build(name)
        known = {batch: run(name, precision, model, batch) for batch in map(int, batches.split(","))}
        if args.search:
            while True:
                fits = max((batch for batch, ran in known.items() if ran), default=0)
                fails = min((batch for batch, ran in known.items() if ran is False), default=2 * fits + 2)
                if fails - fits <= 1 or None in known.values():
                    break
                middle = fits + (fails - fits + 1) // 2
                known[middle] = run(name, precision, model, middle)
            print(f"{name}/{precision}: the largest batch that ran is {fits}", flush=True)
    os.close(filler)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes a large snapshot, as `torch.cuda.memory._dump_snapshot` does, and measures the time and memory that `gpumem report` needs for it.

    python crates/cli/proof/snapshot.py target/release/gpumem --keep /tmp/snapshot.pickle

The snapshot shows a training run: each step allocates and frees tensors of all layers, and each event has its own list of
frames, as PyTorch writes them. `--keep FILE` keeps it. Each command must end within 30 seconds for each file that it reads, with at
most 2 GB of memory. It needs no GPU.
"""

import multiprocessing
import os
import pickle
import random
import subprocess
import time
from functools import partial

from harness import MIB, main

LAYERS, DEPTH, SLOT = 48, 40, 16 * MIB


def snapshot(events):
    draw = random.Random(1)
    callers = [{"name": f"call{at}", "filename": "/app/train.py", "line": at} for at in range(DEPTH)]
    layers = [[{"name": "forward", "filename": f"/app/block{layer}.py", "line": line} for line in range(10, 30)] for layer in range(LAYERS)]
    trace, clock, segments = [], 1_700_000_000_000_000, {}

    def log(action, address, size, frames=()):
        nonlocal clock
        clock += draw.randrange(1, 40)
        trace.append({"action": action, "addr": address, "size": size, "stream": 0, "time_us": clock,
                      "compile_context": "N/A", "user_metadata": "", "frames": list(frames)})

    while len(trace) < events:
        live = {}
        for layer in (layer for layer in layers for _ in range(draw.randrange(3, 9))):
            address = 0x7F00_0000_0000 + len(live) * SLOT
            live[address] = draw.randrange(1, 4096) * 4096
            frames = [draw.choice(layer), *layer[:3], *callers]
            if address not in segments:
                segments[address] = {"device": 0, "address": address, "total_size": SLOT, "allocated_size": 0, "active_size": 0,
                                     "requested_size": 0, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
                                     "is_expandable": False, "frames": [], "blocks": [{"address": address, "size": SLOT,
                                     "requested_size": 0, "frames": [], "state": "inactive"}]}
                log("segment_alloc", address, SLOT, frames)
            log("alloc", address, live[address], frames)
        for address, size in live.items():
            log("free_requested", address, size)
            log("free_completed", address, size)
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0, "expandable_segments": False,
                "roundup_power2_divisions": {str(1 << power): 0 for power in range(16)}}
    return {"segments": list(segments.values()), "device_traces": [trace], "allocator_settings": settings, "external_annotations": []}


def write(file, events):
    with open(file, "wb") as out:
        pickle.dump(snapshot(events), out)


def measured(proof, name, words, files=1):
    snapshot = proof.arguments.keep or f"{proof.folder}/snapshot.pickle"
    if not os.path.exists(snapshot):
        # A separate process writes the snapshot, because the kernel counts the memory of this process for the processes that it starts.
        writer = multiprocessing.Process(target=write, args=(snapshot, proof.arguments.events))
        writer.start()
        writer.join()
    out = f"{proof.new_folder()}/out"
    began = time.monotonic()
    command = [proof.gpumem, *(word.replace("OUT", out) for word in words), *[snapshot] * files]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    seconds, megabytes = time.monotonic() - began, used.ru_maxrss / 1000
    values = {"seconds": seconds, "of a processor": used.ru_utime + used.ru_stime, "MB": megabytes}
    values["MB of the snapshot"] = os.path.getsize(snapshot) / 1e6
    if os.path.isfile(out):
        values["MB of the page"] = os.path.getsize(out) / 1e6
    is_right = status == 0 and seconds <= 30 * files and megabytes <= 2000
    yield is_right, name, {unit: round(value, 1) for unit, value in values.items()}


TABLE = {
    "text": dict(words=["report"]),
    "html": dict(words=["report", "--html", "OUT"]),
    "parquet": dict(words=["report", "--format", "parquet", "-o", "OUT"]),
    "diff": dict(words=["diff"], files=2),
}
OPTIONS = {
    "--events": {"type": int, "default": 9_500_000},
    "--keep": {"help": "where the snapshot is written, and read from if it exists"},
}

if __name__ == "__main__":
    # Times are measured one at a time.
    main(__doc__, {name: partial(measured, name=name, **row) for name, row in TABLE.items()}, OPTIONS, alone=TABLE)

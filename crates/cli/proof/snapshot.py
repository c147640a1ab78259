#!/usr/bin/env python3
"""Writes a large snapshot, as `torch.cuda.memory._dump_snapshot` does, and measures what `gpumem report` takes for it.

    python crates/cli/proof/snapshot.py target/release/gpumem --keep /tmp/snapshot.pickle

The snapshot is that of a training run: each step allocates and frees tensors of all layers, and each event has a list of frames of its
own, as PyTorch writes them. `--keep FILE` is where it lies. Each command must
end within 30 seconds for each file that it reads, with at most 2 GB of memory.
"""

import argparse
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time

MIB = 1 << 20
LAYERS = 48
DEPTH = 40


def snapshot(events, device=0):
    draw = random.Random(1)
    main = [{"name": f"call{at}", "filename": "/app/train.py", "line": at} for at in range(DEPTH)]
    layers = [
        [{"name": "forward", "filename": f"/app/layers/block{layer}.py", "line": line} for line in range(10, 30)] for layer in range(LAYERS)
    ]
    none, trace, clock, live, free = [], [], 1_700_000_000_000_000, {}, {}
    base, end = 0x7F00_0000_0000, 0x7F00_0000_0000

    def log(action, address, size, frames):
        nonlocal clock
        clock += draw.randrange(1, 40)
        trace.append({"action": action, "addr": address, "size": size, "stream": 0, "time_us": clock,
                      "compile_context": "N/A", "user_metadata": "", "frames": frames})

    while len(trace) < events:
        for layer in range(LAYERS):
            for _ in range(draw.randrange(3, 9)):
                size = draw.randrange(1, 4096) * 4096
                frames = [draw.choice(layers[layer])] + layers[layer][:3] + main
                rounded = -(-size // (2 * MIB)) * 2 * MIB
                if free.get(rounded):
                    address = free[rounded].pop()
                else:
                    address, end = end, end + rounded
                    log("segment_alloc", address, rounded, list(frames))
                log("alloc", address, size, frames)
                live[address] = size, rounded, frames
        for address, (size, rounded, frames) in list(live.items()):
            if draw.random() < 0.999:
                log("free_requested", address, size, none)
                log("free_completed", address, size, none)
                free.setdefault(rounded, []).append(address)
                del live[address]
    segments = []
    for address, rounded in [(a, r) for a, (_, r, _) in live.items()] + [(a, r) for r, all in free.items() for a in all]:
        used = live.get(address)
        size, frames = (used[0], used[2]) if used else (0, none)
        block = {"address": address, "size": rounded, "requested_size": size, "frames": frames,
                 "state": "active_allocated" if used else "inactive"}
        segments.append({"device": device, "address": address, "total_size": rounded, "allocated_size": rounded if used else 0,
                         "active_size": rounded if used else 0, "requested_size": size, "stream": 0, "segment_type": "large",
                         "segment_pool_id": (0, 0), "is_expandable": False, "frames": none, "blocks": [block]})
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0, "expandable_segments": False,
                "roundup_power2_divisions": {str(1 << power): 0 for power in range(16)}}
    return {"segments": segments, "device_traces": [trace], "allocator_settings": settings, "external_annotations": []}


def write(file, events):
    with open(file, "wb") as out:
        pickle.dump(snapshot(events), out)


def measured(command, files):
    began = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    seconds, megabytes = time.monotonic() - began, used.ru_maxrss / 1000
    is_good = status == 0 and seconds <= 30 * files and megabytes <= 2000
    print(f"{'PASS' if is_good else 'FAIL'} {' '.join(command[1:])}: {seconds:.1f} s, {used.ru_utime + used.ru_stime:.1f} s of a processor, "
          f"{megabytes:.0f} MB")
    return is_good


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("gpumem")
    arguments.add_argument("--events", type=int, default=9_500_000)
    arguments.add_argument("--keep", help="where the snapshot is written, and read from if it is there")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = options.keep or os.path.join(folder, "snapshot.pickle")
        if not os.path.exists(file):
            # The snapshot is written in a process of its own: the kernel counts the memory of this process for the
            # processes that it starts.
            writer = multiprocessing.Process(target=write, args=(file, options.events))
            writer.start()
            writer.join()
        print(f"{os.path.getsize(file) / 1e6:.0f} MB")
        page, tables = os.path.join(folder, "page.html"), os.path.join(folder, "tables")
        commands = [["report"], ["report", "--html", page], ["report", "--format", "parquet", "-o", tables], ["diff", file]]
        good = [measured([options.gpumem, *command, file], 2 if file in command else 1) for command in commands]
        print(f"the page has {os.path.getsize(page) / 1e6:.1f} MB")
    sys.exit(not all(good))


if __name__ == "__main__":
    main()

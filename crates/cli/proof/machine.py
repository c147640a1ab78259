#!/usr/bin/env python3
"""Compares what `gpumem info`, `ps`, `watch` and `doctor` show with `nvidia-smi` and with a program that is recorded.

    cargo build --release -p gpumem-cli
    python crates/cli/proof/machine.py target/release/gpumem

It needs an NVIDIA GPU, nvidia-smi and PyTorch, and takes a minute. A line PASS, FAIL or INFO is printed for each comparison; the exit code is 1
if one failed. The INFO lines are outputs for people to look at.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

PROGRAM = """
import time, torch
x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
y = torch.empty(1 << 29, dtype=torch.uint8, device="cuda"); del y; torch.cuda.empty_cache()
print("ready", flush=True)
def step():
    a = torch.randn(4096, 4096, device="cuda"); (a @ a).sum().item()
for _ in range(20): step()
times = []
while len(times) < 400:
    began = time.perf_counter(); step(); times.append(time.perf_counter() - began)
print(sorted(times)[200], torch.cuda.max_memory_reserved(), flush=True)
time.sleep(3)
"""

failed = False


def check(name, is_right, text=""):
    global failed
    failed |= not is_right
    print("PASS" if is_right else "FAIL", name, text, flush=True)


def smi(query):
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    return [line.split(", ") for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines()]


def run(*arguments):
    done = subprocess.run([gpumem, *arguments], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def recorded(folder, name):
    command = [gpumem, "run", "-o", os.path.join(folder, name), "--", sys.executable, "-c", PROGRAM]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout.readline() == "ready\n"
    return program


gpumem = os.path.abspath(sys.argv[1])
before = smi("gpu=memory.used")
code, text, error = run("info")
print("INFO info:", code, "\n" + text + error)
print("INFO the context of info, in MiB more used:", before, smi("gpu=memory.used"))
gpus = json.loads(run("info", "--json")[1])["gpus"]
for known, (index, uuid, total) in zip(gpus, smi("gpu=index,uuid,memory.total")):
    check("info: number, UUID, memory", (known["index"], known["uuid"], known["total_bytes"] >> 20) == (int(index), uuid, int(total)), uuid)

code, text, error = run("doctor")
print("INFO doctor:", code, "\n" + text + error)
check("doctor: exact", json.loads(run("doctor", "--json")[1])["trace"]["gauge"] == "exact")

with tempfile.TemporaryDirectory() as folder:
    medians = {"alone": [], "watched": []}
    for pair in range(3):
        for kind in medians:
            program = recorded(folder, f"{kind}{pair}.capture")
            watch = None
            if kind == "watched":
                command = [gpumem, "watch", "--json", "--interval", "200ms"]
                watch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            median, reserved = program.stdout.readline().split()
            medians[kind].append(float(median))
            if watch:
                time.sleep(1)
                code, text, error = run("ps")
                print("INFO ps:", code, "\n" + text + error)
                listed = {int(pid): int(used) for pid, used in smi("compute-apps=pid,used_memory") if used.isdigit()}
                processes = json.loads(run("ps", "--json")[1])["processes"]
                shown = {of["pid"]: of["used_bytes"] >> 20 for of in processes if of["used_bytes"] is not None}
                check("ps: as nvidia-smi", shown == listed, f"{shown} {listed}")
                reading = json.loads(run("watch", "--json", "--count", "1")[1])
                ours = [of for of in reading["recordings"] if f"{kind}{pair}." in of["file"]]
                peak = ours[0]["devices"][0]["peak_bytes"] if ours else None
                # Libraries allocate besides: torch does not see their workspaces.
                is_right = peak is not None and 0 <= peak - int(reserved) < 256 << 20
                check("watch: the peak while it runs", is_right, f"{peak} {reserved}")
                if ours:
                    print("INFO watch:", json.dumps(ours[0]["devices"][0]["now"][:3]))
                watch.terminate()
                watch.communicate()
            program.communicate()
    ratio = statistics.median(medians["watched"]) / statistics.median(medians["alone"])
    check("watch: the step of a program that is watched", ratio < 1.01, f"{ratio:.4f} of {medians}")

sys.exit(failed)

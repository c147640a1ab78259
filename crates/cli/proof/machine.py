#!/usr/bin/env python3
"""Compares the output of `gpumem info`, `ps`, `watch` and `doctor` with `nvidia-smi` and with a program that is recorded.

    cargo build --release -p gpumem-cli
    python crates/cli/proof/machine.py target/release/gpumem

It needs an NVIDIA GPU, nvidia-smi and PyTorch, and takes a minute.
"""

import json
import os
import statistics
import subprocess
import time

from harness import MIB, main, program, smi


def info(proof):
    shown = [[gpu["index"], gpu["uuid"], gpu["total_bytes"] // MIB] for gpu in json.loads(proof.ask("info", "--json"))["gpus"]]
    expected = [[int(index), uuid, int(total)] for index, uuid, total in smi("gpu=index,uuid,memory.total")]
    yield shown == expected != [], "info: number, UUID, memory", {"info": shown, "nvidia-smi": expected}


def doctor(proof):
    gauge = json.loads(proof.ask("doctor", "--json"))["trace"]["gauge"]
    yield gauge == "exact", "doctor: exact", {"gauge": gauge}


def watch(proof):
    steps = {"alone": [], "watched": []}
    for pair in range(3):
        for kind, times in steps.items():
            ran, folder = proof.start(program("watched"))
            watching = None
            if kind == "watched":
                command = [proof.gpumem, "watch", "--json", "--interval", "200ms"]
                watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            said = json.loads(ran.stdout.readline())
            times.append(said["step"])
            if watching:
                yield from compared(proof, folder, said["reserved"], watching)
                watching.terminate()
                watching.communicate()
            ran.communicate()
    ratio = statistics.median(steps["watched"]) / statistics.median(steps["alone"])
    yield ratio < 1.01, "watch: the step of a program that is watched", {"ratio": round(ratio, 4), "seconds": steps}


def compared(proof, folder, reserved, watching):
    """Checks the output of `ps` and `watch` about a program that waits."""
    time.sleep(1)
    listed = {int(pid): int(used) for pid, used in smi("compute-apps=pid,used_memory") if used.isdigit()}
    processes = json.loads(proof.ask("ps", "--json"))["processes"]
    shown = {process["pid"]: process["used_bytes"] // MIB for process in processes if process["used_bytes"] is not None}
    yield shown == listed != {}, "ps: as nvidia-smi", {"ps": shown, "nvidia-smi": listed}
    yield watching.pid not in listed, "watch: it has no context", {}
    reading = json.loads(proof.ask("watch", "--json", "--count", "1"))
    peaks = [recording["devices"][0]["peak_bytes"] for recording in reading["recordings"] if os.path.basename(folder) in recording["file"]]
    # Libraries also allocate workspaces that PyTorch does not see.
    is_right = len(peaks) == 1 and 0 <= peaks[0] - reserved < 256 * MIB
    yield is_right, "watch: the peak while it runs", {"peak": peaks, "reserved": reserved}


if __name__ == "__main__":
    main(__doc__, {"info": info, "doctor": doctor, "watch": watch})

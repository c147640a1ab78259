#!/usr/bin/env python3
"""Compares the memory of programs by NVML with the sum of all rows of their recordings, at each of about 1,000 moments.

    cargo build --release -p gpumem-cli
    python crates/cli/proof/driver.py target/release/gpumem

It needs an NVIDIA GPU on which NVML lists the processes, nvcc, PyTorch, and JAX and CuPy for the cases that name them. The sum is computed
here from the events: allocations, the pages of 2 MiB that they take, and what the driver took by itself. A moment is the time between two
readings of NVML that are equal and less than 5 ms apart; there, the sum of some moment in this time must be within 2 MiB of the reading.
"""

import bisect
import ctypes
import gzip
import json
import os
import subprocess
import tempfile
import threading
import time

import harness
from harness import MIB, Failed

PAGE = 2 * MIB
ON_DEVICE = ("device", "pool", "vmm", "graph")
TAKEN = ("context", "modules", "local memory", "limits", "streams", "executable graphs", "unused in pools", "calls at once",
         "before the recording", "not known")


class ProcessInfo(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gi", ctypes.c_uint), ("ci", ctypes.c_uint)]


class Sampler(threading.Thread):
    """Reads the memory of all processes below one process until it ends."""

    def __init__(self, devices=1):
        super().__init__(daemon=True)
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self.nvml.nvmlInit_v2()
        self.handles = []
        for index in range(devices):
            handle = ctypes.c_void_p()
            self.nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
            self.handles.append(handle)
        self.readings, self.ended = {}, False

    def run(self):
        processes = (ProcessInfo * 256)()
        while not self.ended:
            for device, handle in enumerate(self.handles):
                count = ctypes.c_uint(256)
                before = time.time_ns()
                failed = self.nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), processes)
                after = time.time_ns()
                if not failed:
                    for entry in processes[: count.value]:
                        self.readings.setdefault((entry.pid, device), []).append((before, after, entry.used))
            time.sleep(0.0005)


def started(gpumem, file):
    """Returns the time at which a recording started, in nanoseconds since 1970: field 9 of a pprof profile."""
    profile = file + ".pb.gz"
    subprocess.run([gpumem, "report", file, "--format", "pprof", "-o", profile], check=True, capture_output=True)
    data, at = gzip.open(profile).read(), 0

    def number():
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = data[at]
            at += 1
            value, shift = value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        tag = number()
        if tag & 7 == 0:
            value = number()
            if tag >> 3 == 9:
                return value
        elif tag & 7 == 2:
            size = number()
            at += size
    raise Failed(f"{profile} has no time")


class Pages:
    """The pages of the live blocks of a device."""

    def __init__(self):
        self.shared, self.extra = {}, 0

    def change(self, key, size, sign):
        if key >> 58:
            # An array, whose address is not known.
            self.extra += sign * (-(-size // PAGE) * PAGE - size)
            return
        first, last = key // PAGE, (key + size - 1) // PAGE
        pages = max(last - first - 1, 0)
        for page in {first, last}:
            before = self.shared.get(page, 0)
            self.shared[page] = before + sign
            pages += (before == 0) != (before + sign == 0)
        self.extra += sign * (pages * PAGE - size)


def sums(gpumem, file):
    """Returns the memory of the process after each event, with its time, by device; and the rows at the end."""
    done = subprocess.run([gpumem, "report", file, "--format", "json"], check=True, capture_output=True, text=True)
    start, steps, rows = started(gpumem, file), {}, {}
    state = {}
    for line in done.stdout.splitlines():
        event = json.loads(line)
        device, kind, key, change = event["device"], event["kind"], event["address"], event["change_bytes"]
        of = state.setdefault(device, {"kinds": {}, "pages": Pages(), "sizes": {}, "reserved": 0})
        kinds, sizes = of["kinds"], of["sizes"]
        if kind not in ON_DEVICE + TAKEN:
            continue
        kinds[kind] = kinds.get(kind, 0) + change
        before = sizes.get(key, 0)
        sizes[key] = before + change
        if kind == "device":
            if before:
                of["pages"].change(key, before, -1)
            if before + change:
                of["pages"].change(key, before + change, 1)
        if kind == "unused in pools":
            of["reserved"] = kinds[kind] + kinds.get("pool", 0)
        unused = max(of["reserved"] - kinds.get("pool", 0), 0)
        total = sum(value for name, value in kinds.items() if name != "unused in pools") + unused + of["pages"].extra
        steps.setdefault(device, []).append((start + event["time_ns"], total))
        rows[device] = {**kinds, "unused in pools": unused, "rounding": of["pages"].extra}
    return steps, rows


def judged(readings, steps):
    """Compares readings of NVML with sums. Returns the number of moments, of those inside of a call, and the differences.

    A call takes memory in parts and is recorded at its end. Such a moment is between two sums, and the reading must be between them.
    """
    times, moments, inside, wrong = [at for at, _ in steps], 0, 0, []
    for (before, _, used), (_, after, again) in zip(readings, readings[1:]):
        if used != again or after - before > 5_000_000:
            continue
        first = bisect.bisect_right(times, before - 5_000_000) - 1
        last = bisect.bisect_right(times, after + 5_000_000)
        # Before the first step there is nothing.
        near = ([0] if first < 0 else []) + [total for _, total in steps[max(first, 0) : last]]
        moments += 1
        least = min((total - used for total in near), key=abs)
        if abs(least) <= PAGE:
            continue
        following = steps[last][1] if last < len(steps) else near[-1]
        if min(near + [following]) - PAGE <= used <= max(near + [following]) + PAGE:
            inside += 1
        else:
            wrong.append((least, (before - times[0]) // 1_000_000))
    return moments, inside, wrong


def watched(gpumem, name, command, folder, env=None):
    """Runs a program under `gpumem run`, and returns the rows of the proof."""
    sampler = Sampler(int(os.environ.get("DEVICES", "1")))
    sampler.start()
    folder = tempfile.mkdtemp(dir=folder)
    try:
        recorded = [gpumem, "run", "-o", os.path.join(folder, "a.capture"), "--", *command]
        done = subprocess.run(recorded, capture_output=True, text=True, env={**os.environ, **(env or {})}, timeout=200)
    finally:
        sampler.ended = True
    sampler.join()
    if done.returncode:
        yield False, name, done.stderr[-600:]
    for entry in sorted(entry for entry in os.listdir(folder) if "capture" in entry):
        file = os.path.join(folder, entry)
        report = json.loads(subprocess.run([gpumem, "report", "--json", file], check=True, capture_output=True, text=True).stdout)
        steps, rows = sums(gpumem, file)
        for (pid, device), readings in sampler.readings.items():
            if pid != report["pid"] or device not in steps:
                continue
            moments, inside, wrong = judged(readings, steps[device])
            used = max(used for _, _, used in readings[-3:])
            unknown = rows[device].get("not known", 0)
            sizes = {kind: round(value / MIB, 1) for kind, value in rows[device].items() if value}
            good = moments >= 100 and not wrong and unknown * 100 <= used
            some = [(difference // MIB, at) for difference, at in wrong[:3] + wrong[-2:]]
            yield good, f"{name} device {device}", f"{moments} moments, {inside} inside of calls, {len(wrong)} wrong {some}, in use {used / MIB:.1f} MiB, {sizes}"

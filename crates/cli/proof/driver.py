#!/usr/bin/env python3
"""Compares the memory of programs by NVML with the sum that their recordings have, at each of about 1,000 moments.

    cargo build --release -p gpumem-cli
    python crates/cli/proof/driver.py target/release/gpumem --jobs 4

It needs an NVIDIA GPU on which NVML lists the processes, nvcc, PyTorch, and JAX and CuPy for the cases that name them. A moment is the
time between two readings of NVML that are equal and less than 5 ms apart. There, the sum of some moment in this time must be within 2 MiB
of the reading. A call takes memory in parts and is recorded at its end, and a free is recorded before it waits for kernels, so inside of a
call the reading must be between two sums. At the end, at most 1 % of the memory may have no cause.

With several jobs, the programs use the GPU at the same time, and each sum must still be that of its own process.
"""

import bisect
import ctypes
import gzip
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from functools import partial

from dry import PROGRAMS
from harness import MIB, WITHOUT_TORCH, Failed, main, program

# What NVML may differ by: one mapping of the driver.
PAGE = 2 * MIB
# The clocks of the processes are the same; a thread reads the pools every 4 ms.
NEAR = 5_000_000

CPP = r"""
#include <cuda_runtime.h>
#include <cstdlib>
#include <cstring>
#include <vector>
#include <unistd.h>
__global__ void small(int *p) { if (p) *p = 1; }
__global__ void deep(int *out, int n) { volatile char b[16384]; for (int i = 0; i < n; i++) b[(i * 7919) % 16384] = i; if (out) *out = b[n % 16384]; }
int main(int, char **arguments) {
    auto is = [&](const char *name) { return !strcmp(arguments[1], name); };
    void *x; cudaStream_t s;
    if (is("local")) {
        cudaMalloc(&x, 64 << 20); small<<<1, 1>>>(0); deep<<<1, 32>>>(0, 100); cudaDeviceSynchronize();
    } else if (is("graphs")) {
        cudaMalloc(&x, 1 << 20); cudaStreamCreate(&s); cudaGraph_t graph; cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal);
        for (int i = 0; i < 2000; i++) small<<<1, 1, 0, s>>>(0);
        cudaStreamEndCapture(s, &graph); std::vector<cudaGraphExec_t> all(200);
        for (auto &executable : all) cudaGraphInstantiate(&executable, graph, 0);
        for (auto executable : all) cudaGraphLaunch(executable, s);
        cudaDeviceSynchronize();
    } else if (is("pool")) {
        cudaMemPool_t pool; cudaDeviceGetDefaultMemPool(&pool, 0); unsigned long long all = ~0ull; cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all);
        std::vector<void *> blocks(12); for (auto &block : blocks) cudaMallocAsync(&block, 256 << 20, 0);
        for (auto block : blocks) cudaFreeAsync(block, 0);
        cudaDeviceSynchronize(); usleep(50000); cudaMallocAsync(&x, 256 << 20, 0); cudaDeviceSynchronize();
    } else if (is("mix")) {
        srand(1); std::vector<void *> live;
        for (int i = 0; i < 2000; i++) {
            if (live.size() > 50 && rand() % 2) { int at = rand() % live.size(); cudaFree(live[at]); live[at] = live.back(); live.pop_back(); }
            else { cudaMalloc(&x, 1 + rand() % (8 << 20)); live.push_back(x); }
            usleep(3000);
        }
        small<<<1, 1>>>(0); deep<<<1, 32>>>(0, 100); cudaDeviceSynchronize(); usleep(100000);
        cudaDeviceSetLimit(cudaLimitStackSize, 8192); usleep(100000); cudaDeviceSetLimit(cudaLimitMallocHeapSize, 256 << 20); usleep(100000);
        deep<<<1, 32>>>(0, 100); cudaDeviceSynchronize(); usleep(100000);
        for (int i = 0; i < 200; i++) { cudaMallocAsync(&x, 3 << 20, 0); cudaFreeAsync(x, 0); if (i % 10 == 0) cudaStreamSynchronize(0); usleep(500); }
        for (int i = 0; i < 70; i++) { cudaStreamCreate(&s); usleep(500); }
        for (int i = 0; i < 70; i++) { cudaArray_t array; cudaChannelFormatDesc format = cudaCreateChannelDesc<float>(); cudaMallocArray(&array, &format, 100 + 50 * i, 333); usleep(500); }
    }
    usleep(1200000);
}
"""


class ProcessInfo(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gi", ctypes.c_uint), ("ci", ctypes.c_uint)]


class Sampler(threading.Thread):
    """Reads the memory of all processes on each GPU until it ends."""

    def __init__(self):
        super().__init__(daemon=True)
        self.nvml, self.handles, self.readings, self.ended = ctypes.CDLL("libnvidia-ml.so.1"), [], {}, False
        self.nvml.nvmlInit_v2()
        count = ctypes.c_uint()
        self.nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            handle = ctypes.c_void_p()
            self.nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
            self.handles.append(handle)

    def run(self):
        processes = (ProcessInfo * 256)()
        while not self.ended:
            for device, handle in enumerate(self.handles):
                count = ctypes.c_uint(256)
                before = time.time_ns()
                failed = self.nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), processes)
                after = time.time_ns()
                for entry in [] if failed else processes[: count.value]:
                    self.readings.setdefault((entry.pid, device), []).append((before, after, entry.used))
            time.sleep(0.0008)


def started(proof, file):
    """Returns the time at which a recording started, in nanoseconds since 1970: field 9 of a pprof profile."""
    profile = file + ".pb.gz"
    proof.ask("report", file, "--format", "pprof", "-o", profile)
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
        else:
            # A field of a length and that many bytes; there are no others.
            size = number()
            at += size
    raise Failed(f"{profile} has no time")


def sums(proof, file):
    """Returns the memory of the process after each change, with its time, by device; and the parts at the end."""
    start, steps, parts = started(proof, file), {}, {}
    for event in map(json.loads, proof.ask("report", file, "--format", "json").splitlines()):
        if event["action"] == "process":
            parts.setdefault(event["device"], {})[event["kind"]] = event["bytes"]
            if event["kind"] == "the process":
                steps.setdefault(event["device"], []).append((start + event["time_ns"], event["bytes"]))
    return steps, parts


def judged(readings, steps):
    """Returns the number of moments, of those inside of a call, and the differences of those that are wrong."""
    times, moments, inside, wrong = [at for at, _ in steps], 0, 0, []
    for (before, _, used), (_, after, again) in zip(readings, readings[1:]):
        if used != again or after - before > 5_000_000:
            continue
        first = bisect.bisect_right(times, before - NEAR) - 1
        last = bisect.bisect_right(times, after + NEAR)
        # Before the first step there is nothing.
        near = ([0] if first < 0 else []) + [total for _, total in steps[max(first, 0) : last]]
        # Inside of a call, these are the sums before and after it.
        around = near + [total for _, total in steps[max(first - 1, 0) : last + 1]]
        moments += 1
        least = min((total - used for total in near), key=abs)
        if abs(least) > PAGE:
            if min(around) - PAGE <= used <= max(around) + PAGE:
                inside += 1
            else:
                wrong.append((least // MIB, (before - times[0]) // 1_000_000))
    return moments, inside, wrong


def watched(proof, name, command, code=0, env=()):
    command = command(proof) if callable(command) else command
    sampler = Sampler()
    sampler.start()
    try:
        files = proof.run(command, [], code, env).files
    finally:
        sampler.ended = True
    sampler.join()
    for file in files:
        pid = proof.report(file)["pid"]
        steps, parts = sums(proof, file)
        for (of, device), readings in sampler.readings.items():
            if of == pid and device in steps:
                moments, inside, wrong = judged(readings, steps[device])
                used = max(used for _, _, used in readings[-3:])
                mib = {kind: round(size / MIB, 1) for kind, size in parts[device].items() if size}
                # Growth that is recorded late also lies between two sums. Programs are inside of calls for a seventh of their time at most.
                good = moments >= 100 and not wrong and inside * 5 <= moments and parts[device].get("not known", 0) * 100 <= used
                yield good, f"{name} on device {device}", {
                    "moments": moments, "inside of calls": inside, "wrong": len(wrong), "some": wrong[:2] + wrong[-2:], "NVML": round(used / MIB, 1), "parts": mib,
                }


def cpp(name):
    return lambda proof: [*proof.built(CPP), name]


def first_lines(proof):
    """The first line about the device names the cause, with its bytes within 2 MiB."""
    for name, words in {
        "local": ["local memory of deep", "3.87 GiB"],
        "graphs": ["executable graphs", ".cu:"],
        "pool": ["unused in pools", "3 GiB"],
    }.items():
        ran = proof.run(cpp(name)(proof), [])
        text = proof.ask("report", ran.files[0]).decode()
        line = next(line for line in text.splitlines() if line.startswith("device 0"))
        yield all(word in line for word in words), name, {"line": line, "leaks": proof.ask("report", "--leaks", ran.files[0]).decode().splitlines()[:6]}


def costs(proof):
    """The start of a PyTorch program and a step of GPT-2, with and without a recording, in turns."""
    code = (
        "import time; began = time.time(); import torch, json; imported = time.time(); x = torch.randn(512, 512, device='cuda'); (x @ x).sum().item(); "
        "print(json.dumps({'start': time.time() - imported}))"
    )
    starts = {False: [], True: []}
    for _ in range(15):
        for recorded in starts:
            starts[recorded].append(proof.run([sys.executable, "-c", code], [] if recorded else None).facts["start"])
    plain, more = (statistics.median(starts[recorded]) for recorded in (False, True))
    yield more - plain <= 0.05, "the start of a PyTorch program", {"seconds": [round(plain, 3), round(more, 3)], "all": starts}
    steps = {False: [], True: []}
    for _ in range(5):
        for recorded in steps:
            steps[recorded].append(proof.run(program("gpt2", steps=45, lengths=[512]), [] if recorded else None).facts["seconds"])
    plain, more = (statistics.median(steps[recorded]) for recorded in (False, True))
    yield more / plain <= 1.01, "a step of GPT-2", {"ratio": round(more / plain, 4), "all": steps}


NAMES = [name for name in PROGRAMS if name != "out_of_memory"]
CASES = {
    **{name: partial(watched, name=name, command=cpp(name)) for name in ("local", "graphs", "pool", "mix")},
    **{name: partial(watched, name=name, command=PROGRAMS[name]) for name in NAMES},
    **{name: partial(watched, name=name, command=program(name, file=WITHOUT_TORCH)) for name in ("jax", "cupy")},
    "nccl": partial(watched, name="nccl", command=program("ranks", ranks=2, backend="nccl", size=2048)),
    "lines": first_lines,
    "costs": costs,
}

if __name__ == "__main__":
    main(__doc__, CASES, alone=["costs"])

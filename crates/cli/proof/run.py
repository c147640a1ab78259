#!/usr/bin/env python3
"""Compares the recordings of `gpumem run` with the values that the recorded programs print.

    cargo build --release -p gpumem-cli
    python crates/cli/proof/run.py target/release/gpumem --jobs 4

It needs an NVIDIA GPU, and PyTorch, JAX, nvcc and a second GPU for the cases that name them. `--only torch` and `--only modules` choose all
cases whose names start with these words, which test `gpumem run --torch` and `--modules`. The cases `times` run pairs of a recorded program
and one without gpumem for `--seconds` each; a result needs 15 pairs, about 500 seconds.

`--candle PROGRAM` is for the case `candle`: a program that trains with candle, and prints {"pool_high": the driver's
CU_MEMPOOL_ATTR_USED_MEM_HIGH of the default pool}. It can be built without a GPU and without a CUDA toolkit of the system:

1. `pip install --no-deps --target cu` of nvidia-cuda-nvcc, nvidia-cuda-crt, nvidia-nvvm, nvidia-cuda-runtime and nvidia-cuda-cccl, all
   ==13.0.* (a later toolkit writes PTX that driver 580 does not read): 200 MB. CUDA_HOME=CUDA_PATH=cu/nvidia/cu13, its bin in PATH,
   CUDA_COMPUTE_CAP=90.
2. A package with candle-core and candle-nn, feature `cuda`, with [patch.crates-io] candle-kernels = a copy whose build.rs compiles the
   PTX kernels and not the static library of quantized models (`moe_sources`), which is replaced by a library of functions that abort.
   The kernels take 20 minutes on one busy core.
3. Empty shared objects stand for libcuda.so.1, libcublas.so.13, libcublasLt.so.13, libcurand.so.10, libnvrtc.so.13 and
   libcudart.so.13: `cargo rustc --release -- -C link-arg=-Wl,--no-as-needed -C link-arg=-lcuda …`, with
   RUSTFLAGS="-L native=stub -C link-arg=-Wl,--no-as-needed -C link-arg=-Wl,--unresolved-symbols=ignore-all".
   PyTorch's folder nvidia/cu13/lib has the real ones.

`--onnx FOLDER` is for the cases `onnx`: a folder with the package onnxruntime for CUDA 13. The wheel has 256 MB, and can be made
smaller for a machine to which little can be copied:

1. `pip download --no-deps onnxruntime-gpu==1.31.1` (with `--python-version 3.12` or the version of the machine), `unzip`.
2. `python crates/cli/proof/trim.py onnxruntime/capi/libonnxruntime_providers_cuda.so 90` keeps the kernels of plain operators for one GPU.
3. The folders quantization, tools and transformers, libonnxruntime.so.* and libonnxruntime_providers_tensorrt.so are not needed.
   The output of `tar c onnxruntime | xz -T0` then has 30 MB.

CUDA's libraries come from PyTorch's packages; numpy is needed as well. The model is made here, without the package onnx.
"""

import itertools
import json
import os
import pickle
import re
import shutil
import statistics
import sys
import time
from functools import partial

import harness
import programs_without_torch
from dry import PROGRAMS
from harness import MIB, WITHOUT_TORCH, Skipped, allocator, compared, program

# Names of values of a report on the left must equal names of values of the program, or of the report, on the right.
# PyTorch's part of the peak is PyTorch's own value, and every other byte belongs to another library.
EXACT = {"PyTorch": "reserved", "libraries": "peak", "missing": {}}
TENSORS = {"tensors at end": "PyTorch's tensors at end", "reserved at end": "PyTorch's reserved at end"}
# Nothing that PyTorch did is unknown, so the peak of the tensors is exact.
ALL_TENSORS = {**TENSORS, "tensors": "allocated", "known from": None}
# The sums by module and by class are the peak, and weights and states are those that the program has at its end.
MODULES = {"classes": "allocated", "modules": "allocated", "weights at end": "weights", "optimizer at end": "optimizer"}


def values(report, device_number=0):
    """Returns the values of a report by the names that the tables use."""
    device = next((device for device in report["devices"] if device["peak_bytes"]), {})
    libraries = {entry["name"]: entry["bytes"] for entry in device.get("peak_by_library", [])}
    refused = report["refused"] or {}
    main = refused.get("main") or {}
    place = re.search(r"\w+\.py:\d+", main.get("place") or "")
    torch = (report["torch"] or {}).get("devices", [])
    return {
        "peak": device.get("peak_bytes"),
        "live at end": device.get("live_at_end_bytes"),
        "allocations": report["allocations"],
        "by library": libraries,
        "libraries": sum(libraries.values()),
        "PyTorch": libraries.get("PyTorch"),
        "ONNX Runtime": libraries.get("ONNX Runtime"),
        "by kind": {entry["name"]: entry for entry in device.get("peak_by_kind", [])},
        "missing": {name: value for name, value in report["missing"].items() if value},
        "refused calls": refused.get("count"),
        "obtained soon": refused.get("obtained_soon"),
        "refused bytes": main.get("bytes"),
        "refused with": main.get("live_bytes"),
        "refused at": place and place[0],
        **next((of_tensors(device) for device in torch if device["device"] == device_number), {}),
    }


def of_tensors(device):
    """Returns the values of PyTorch's tensors on a device."""
    peak, end, said = (device[part] or {} for part in ("peak", "at_end", "said"))
    requested = {entry["class"]: entry["requested_bytes"] for entry in end.get("by_class") or []}
    return {
        "tensors": peak.get("allocated_bytes"),
        "known from": device["known_from_seconds"],
        "tensors at end": end.get("allocated_bytes"),
        "PyTorch's tensors at end": said.get("memory_allocated"),
        "reserved at end": end.get("reserved_bytes"),
        "PyTorch's reserved at end": said.get("memory_reserved"),
        "lines at end": lines(end.get("by_place") or []),
        "classes": sum(entry["bytes"] for entry in peak.get("by_class") or []),
        "modules": sum(entry["bytes"] for entry in peak.get("by_module") or []),
        "weights at end": requested.get("weights", 0),
        "optimizer at end": requested.get("optimizer", 0),
    }


def lines(places):
    """Returns the bytes of places by line. PyTorch does not know the line that started a backward pass."""
    found = {}
    for place in places:
        is_known = place["line"] and "(backward pass)" not in place["line"]
        # Reports name files relative to the folder of the program.
        line = os.path.abspath(place["line"]) if is_known else "none"
        found[line] = found.get(line, 0) + place["bytes"]
    return found


def recorded(proof, command, options=(), env=(), code=0):
    """Runs a program under `gpumem run`. Returns the run, and the values of its only recording."""
    ran = proof.run(command, options, code, env)
    if len(ran.files) != 1:
        raise harness.Failed(f"{len(ran.files)} recordings: {ran.files}")
    return ran, values(proof.report(ran.files[0]))


def check(proof, name, command, equal, options=(), env=(), code=0, says="", least=None):
    """Checks that the values that a table names are equal, or at least as high."""
    command = command(proof) if callable(command) else command
    ran, found = recorded(proof, command, options, env, code)
    is_right, pairs = compared(found, ran.facts, equal)
    is_right &= all(found[left] >= ran.facts[right] > 0 for left, right in (least or {}).items())
    is_right &= says in ran.stderr and "contradicts" not in ran.stderr
    yield is_right, name, {**pairs, "by library": found["by library"], "said": ran.facts, "missing": found["missing"]}


def asynchronous(proof):
    """Checks that all memory apart from the tensors is as much as with the native allocator. Blocks below 1 MiB have no stack, so they
    are in no sum."""
    ran, found = recorded(proof, program("train"), env=ASYNC)
    native, of_native = recorded(proof, program("train", steps=5))
    rest, expected = found["peak"] - ran.facts["allocated"], of_native["peak"] - native.facts["reserved"]
    yield rest == expected and not found["missing"], "async", {"rest": rest, "rest of native": expected, "peak": found["peak"]}


def profiler(proof):
    """Checks that `torch.profiler` records as many events of the GPU as without gpumem."""
    events = [proof.run(program("train", steps=5, mode="profiler"), options).facts["events"] for options in ((), None)]
    yield events[0] == events[1] > 0, "profiler", {"events": events}


def ranks(proof):
    """Checks that there is a recording for each rank, with its GPU."""
    harness.need_gpus(2)
    ran = proof.run(program("ranks", ranks=2, backend="nccl", steps=20), ["--torch"])
    yield len(ran.files) == len(ran.said) == 2, "ranks", {"files": [os.path.basename(file) for file in ran.files]}
    for rank, (file, said) in enumerate(zip(ran.files, ran.said)):
        equal = {"PyTorch": "reserved", "tensors": "allocated"}
        is_right, pairs = compared(values(proof.report(file), rank), said, equal)
        yield is_right and f".rank{rank}.gpu{rank}." in file, f"rank {rank}", pairs


def stacks(proof):
    """Checks that the Python lines of each block are those that `traceback` returns."""
    ran, _ = recorded(proof, program("stacks"))
    snapshot = pickle.loads(proof.ask("report", "--format", "torch", ran.files[0]))
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    known = {block["size"]: block.get("frames", []) for block in blocks}
    expected, different = ran.facts["expected"], []
    for size, of_python in expected:
        # Functions outside of Python have files of other types. The names that `traceback` returns contain no classes.
        frames = [frame for frame in known.get(size, []) if frame["filename"].endswith(".py")]
        frames = [[frame["filename"], frame["line"], frame["name"].rsplit(".", 1)[-1]] for frame in frames]
        if frames != of_python:
            different.append({"size": size, "recorded": frames, "traceback": of_python})
    count = sum(len(frames) for _, frames in expected)
    yield not different, "lines", {"python": sys.version.split()[0], "blocks": len(expected), "frames": count, "different": different[:3]}


def dormant(proof):
    """Checks that only blocks between `gpumem start` and `gpumem stop` are recorded: 200, then 300 MiB after the first two are freed."""
    ran, folder = proof.start(program("dormant"), "--dormant")
    pid = ran.stdout.readline().strip()
    for step in range(3):
        if step in (0, 2):
            proof.ask("stop" if step else "start", pid)
        ran.stdin.write("\n")
        ran.stdin.flush()
        ran.stdout.readline()
    ran.communicate("\n")
    found = [values(proof.report(os.path.join(folder, file))) for file in os.listdir(folder)]
    is_right = ran.returncode == 0 and [(recording["peak"], recording["live at end"]) for recording in found] == [(300 * MIB, 300 * MIB)]
    yield is_right, "dormant", {"code": ran.returncode, "recordings": found}


def together(proof):
    """Checks that processes have their memory until they end, however they end."""
    for method, end, at_once in itertools.product(("fork", "spawn"), ("kill", "exit", "return"), (True, False)):
        command = program("processes", method=method, end=end, at_once=at_once)
        ran = proof.run(command, ["--max-peak", "2560MiB"], code=int(at_once))
        found = re.findall("[0-9]+ processes .* at the same time", ran.stderr)
        expected = ["2 processes had 3 GiB at the same time"] if at_once else []
        yield found == expected, f"together {method} {end}", {"at once": at_once, "found": found}


def parts(proof):
    """Checks that `--only-peak` records the same peak, and that `--max-size` keeps the memory live at the end and reports the rest."""
    whole, expected = recorded(proof, program("train", steps=20, mode="empty"))
    peak, found = recorded(proof, program("train", steps=20, mode="empty"), ["--only-peak"])
    is_right, pairs = compared(found, {}, {name: expected[name] for name in ("peak", "by library", "live at end")})
    sizes = [os.path.getsize(ran.files[0]) for ran in (whole, peak)]
    yield is_right and "has_only_peaks" in found["missing"], "only-peak", {**pairs, "bytes": sizes}
    newest, found = recorded(proof, program("train", steps=1000, mode="empty"), ["--max-size", "64KiB"])
    is_right, pairs = compared(found, {}, {"live at end": expected["live at end"]})
    is_right &= "begins_after_event" in found["missing"]
    yield is_right, "max-size", {**pairs, "missing": found["missing"], "bytes": os.path.getsize(newest.files[0])}


def libraries_of_torch():
    """Returns an LD_LIBRARY_PATH with the CUDA libraries of PyTorch's packages."""
    import torch

    folders = [os.path.join(os.path.dirname(torch.__file__), "lib")]
    for path in sys.path:
        folders += [folder for folder, _, files in os.walk(os.path.join(path, "nvidia")) if folder.endswith("lib") and files]
    return ":".join([*folders, os.environ.get("LD_LIBRARY_PATH", "")])


def candle(proof):
    """Compares the peak with the driver's own, which counts each block of its pool in steps of at most 512 bytes."""
    if not proof.arguments.candle:
        raise Skipped("--candle is not given")
    command = [os.path.abspath(proof.arguments.candle), "50"]
    ran, found = recorded(proof, command, env={"LD_LIBRARY_PATH": libraries_of_torch()})
    pool = found["by kind"]["pool"]
    is_right = 0 < pool["bytes"] <= ran.facts["pool_high"] <= pool["bytes"] + 512 * pool["blocks"]
    yield is_right and not found["missing"], "candle", {"pool": pool, "said": ran.facts, "by library": found["by library"]}


def arenas(log):
    """Returns what ONNX Runtime's GPU arenas request and return according to the log: ("extend", size, address) and so on."""
    asked, arena, size = [], None, 0
    for line in log.splitlines():
        if found := re.search(r"Extending BFCArena for (\w+)", line):
            arena = found[1].lower()
        elif found := re.search(r"Extended allocation by (\d+) bytes", line):
            size = int(found[1])
        elif (found := re.search(r"Allocated memory at (\w+) to (\w+)", line)) and arena == "cuda":
            asked.append(("extend", size, int(found[1], 16)))
        elif found := re.search(r"Reserving memory in BFCArena for Cuda size: (\d+)", line, re.I):
            asked.append(("reserve", int(found[1]), None))
        elif found := re.search(r"Cuda BFC Arena shrunk by (\d+) bytes", line, re.I):
            asked.append(("shrink", int(found[1]), None))
    return asked


def onnx(proof, strategy):
    """Checks that the recording agrees with the log of the arenas, address by address."""
    if not proof.arguments.onnx:
        raise Skipped("--onnx is not given")
    path = ":".join([os.path.abspath(proof.arguments.onnx), os.environ.get("PYTHONPATH", "")])
    # Lazy loading reads only the kernels that are started. The others may have been left out.
    env = {"PYTHONPATH": path, "LD_LIBRARY_PATH": libraries_of_torch(), "CUDA_MODULE_LOADING": "LAZY"}
    ran, found = recorded(proof, program("onnx", file=WITHOUT_TORCH, strategy=strategy), env=env, code=5)
    if kept := proof.arguments.onnx_recordings:
        shutil.copy(ran.files[0], f"{kept}{strategy}.capture")
        with open(f"{kept}{strategy}.txt", "w") as file:
            file.write(ran.stderr)
    asked, live, totals = arenas(ran.stderr), 0, []
    for what, size, _ in asked:
        live += -size if what == "shrink" else size
        totals.append(live)
    events = [json.loads(line) for line in proof.ask("report", "--format", "json", ran.files[0]).splitlines()]
    rows = [(event["action"], abs(event["change_bytes"]), event["address"]) for event in events]
    allocated = {(size, address) for action, size, address in rows if action == "alloc"}
    # The log contains no addresses for blocks with `reserve`.
    allocated |= {(size, None) for size, _ in allocated}
    different = [each for each in asked if each[0] != "shrink" and each[1:] not in allocated]
    own = {address for what, _, address in asked if what == "extend"}
    freed = sorted(size for action, size, address in rows if action == "free" and address in own)
    shrunk = sorted(size for what, size, _ in asked if what == "shrink")
    is_right, pairs = compared({**found, "arenas": max(totals)}, {}, {"ONNX Runtime": "arenas", "libraries": "peak", "missing": {}})
    is_right &= len(asked) >= 5 and not different and ran.facts["difference"] < 1e-3
    if strategy == "kSameAsRequested":
        # The program ends without destructors, so the arenas free nothing else.
        is_right &= bool(shrunk) and freed == shrunk
    facts = {"asked": asked, "not recorded": different, "shrunk": shrunk, "freed": freed}
    yield is_right, f"onnx-{strategy}", {**pairs, **facts, "by library": found["by library"], "said": ran.facts}


def times(proof, name, command, ways, most, env=(), steps=0, rounds=15):
    """Runs a program in several ways in turn, first without gpumem. `most` is how much longer the steps may take in the others."""
    if not steps:
        # Each run has at least 10 s of steps. Their number is measured first.
        steps = int(300 * 10.3 / proof.run(command(steps=300), env=env).facts["seconds"]) + 1
    spent, end, longest = [], time.time() + proof.arguments.seconds, 0
    while not spent or time.time() + longest < end:
        began, turn = time.time(), {}
        for way in list(ways) if len(spent) % 2 else reversed(ways):
            ran = proof.run(command(steps=steps), ways[way], env=env)
            turn[way] = {"steps": ran.facts["seconds"], "command": ran.seconds}
        spent.append(turn)
        longest = max(longest, time.time() - began)
    alone, *others = ways
    ratio = lambda way, unit: round(statistics.median(turn[way][unit] / turn[alone][unit] for turn in spent), 4)
    ratios = {way: {unit: ratio(way, unit) for unit in ("steps", "command")} for way in others}
    is_right = all(ratios[way]["steps"] <= limit for way, limit in most.items())
    result = is_right if most and len(spent) >= rounds else "INFO"
    yield result, name, {"rounds": len(spent), "of": rounds, "steps": steps, "ratios": ratios, "most": most, "all": spent}


def cupti(proof, order):
    if programs_without_torch.libcupti() is None:
        raise Skipped("there is no libcupti")
    equal = {"allocations": "sizes", "calls": "sizes", "peak": "most"}
    return check(proof, f"cupti-{order}", program("cupti", file=WITHOUT_TORCH, order=order), equal)


RECORDED, WITH_TORCH = {"alone": None, "recorded": []}, {"alone": None, "torch": ["--torch"], "modules": ["--modules"]}
EXPANDABLE, ROUNDED = allocator("expandable_segments:True"), allocator("roundup_power2_divisions:4,max_split_size_mb:32")
ASYNC = allocator("backend:cudaMallocAsync")
# Another library initialises CUDA before PyTorch is imported.
CUDA_FIRST = "import ctypes, runpy, sys; ctypes.CDLL('libcuda.so.1').cuInit(0); del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
OOM = {"refused calls": "refusals", "obtained soon": "obtained", "refused bytes": "refused", "refused with": "had", "refused at": "line"}

TABLE = {
    "static": dict(command=harness.Proof.cpp, equal={"peak": "most"}, code=7),
    "killed": dict(command=program("killed"), equal={"peak": "reserved"}, code=137),
    "oom": dict(command=program("refused"), equal=OOM, says="Out of memory: the driver rejected "),
    "native": dict(command=program("train"), equal=EXACT),
    "expandable": dict(command=program("train"), equal=EXACT, env=EXPANDABLE),
    "jax": dict(command=program("jax", file=WITHOUT_TORCH), equal={}, least={"peak": "allocated"}),
}
# With `--torch`, the peak of tensors is exactly PyTorch's own value.
TABLE_OF_TENSORS = {
    "lines": dict(command=program("train", steps=30, mode="lines"), equal={**ALL_TENSORS, "lines at end": "lines"}),
    "empty": dict(command=program("train", steps=30, mode="empty"), equal=ALL_TENSORS),
    "expandable": dict(command=program("train", steps=30), equal=ALL_TENSORS, env=EXPANDABLE),
    "rounded": dict(command=program("train", steps=30), equal=ALL_TENSORS, env=ROUNDED),
    # PyTorch keeps only the latest events.
    "full": dict(command=program("train", steps=30), equal=TENSORS, options=["--torch", "--torch-events", "2000"]),
    "cuda-first": dict(command=[sys.executable, "-c", CUDA_FIRST, *program("train", steps=30)[1:]], equal=ALL_TENSORS),
    "workers": dict(command=program("train", steps=30, mode="workers"), equal=ALL_TENSORS),
    "compile": dict(command=program("train", steps=30, compiled=True), equal=ALL_TENSORS),
    "killed": dict(command=program("killed"), equal={"peak": "reserved"}, code=137, says="without Python's exit handlers"),
}
NETWORKS = ("gpt2", "llama", "resnet", "vit", "generate", "compiled")
TABLE.update({f"torch-{name}": {"options": ["--torch"], **row} for name, row in TABLE_OF_TENSORS.items()})
TABLE.update({f"modules-{name}": dict(command=PROGRAMS[name], equal=MODULES, options=["--modules"]) for name in NETWORKS})

train, tiny, large = partial(program, "train"), partial(program, "tiny"), partial(program, "gpt2", batch=8, lengths=[512])
TIMES = {
    "times-native": dict(command=train, ways=RECORDED, most={"recorded": 1.01}),
    "times-async": dict(command=train, ways=RECORDED, most={"recorded": 1.03}, env=ASYNC),
    "times-modules-gpt2": dict(command=large, ways=WITH_TORCH, most={"modules": 1.03}, steps=12, rounds=10),
    "times-modules-tiny": dict(command=tiny, ways=WITH_TORCH, most={}, steps=300),
}
CASES = {
    **{name: partial(check, name=name, **row) for name, row in TABLE.items()},
    **{f"cupti-{order}": partial(cupti, order=order) for order in ("before", "after")},
    **{f"onnx-{strategy}": partial(onnx, strategy=strategy) for strategy in ("kNextPowerOfTwo", "kSameAsRequested")},
    **{"lines": stacks, "dormant": dormant, "together": together, "parts": parts, "async": asynchronous},
    **{"profiler": profiler, "candle": candle, "ranks": ranks},
    **{name: partial(times, name=name, **row) for name, row in TIMES.items()},
}
OPTIONS = {
    "--seconds": {"type": float, "default": 60, "help": "for each case of times"},
    "--candle": {"help": "a program with candle, see above"},
    "--onnx": {"help": "a folder with the package onnxruntime, see above"},
    "--onnx-recordings": {"help": "the recordings and logs of the cases onnx are kept in files whose names start so"},
}

if __name__ == "__main__":
    # `oom` fills a GPU, and the others need all GPUs or all processors.
    harness.main(__doc__, CASES, OPTIONS, alone={"oom", "ranks", *TIMES})

#!/usr/bin/env python3
"""Compares the traces of the Python package with PyTorch's own counters, and measures what they cost.

    python crates/cli/proof/python.py target/release/gpumem [--only random,costs]

It needs an NVIDIA GPU and PyTorch 2.2 or later. The package is that of this repository, with the library that the command unpacks.
"""

import glob
import os
import statistics
import subprocess
import sys
import time

import harness
from harness import HERE, Failed, program

MIB = harness.MIB
PACKAGE = os.path.join(os.path.dirname(HERE), "python")

LINES = """\
△Used Peaked MB:     10     40
△Used Peaked MB:     20     40 (2nd run of some_code())
△Used Peaked MB:     10     40 (i=0)
△Used Peaked MB:     10     40 (i=1)
△Used Peaked MB:     10     40 (i=0)
△Used Peaked MB:     10     40 (i=1)
△Used Peaked MB:      0      0 (stopped)
△Used Peaked MB:      0      0 (started)
△Used Peaked MB:      0      0 (foobar: 1st try)
△Used Peaked MB:      0      0 (foobar: 2nd try)
△Used Peaked MB:      0      0
△Used Peaked MB:     10     40 (exit)
△Used Peaked MB:     10     40 (some context: exit)
△Used Peaked MB:     10     40 (some_func: exit)
△Used Peaked MB:     10     40 (some_func: measured in ctx)
△Used Peaked MB:     10     40 (some_func)
△Used Peaked MB:     10     40 (exit)
"""


def environment(proof):
    """Returns the environment of a program with the package, and with the library that the command unpacks."""
    cache = os.path.join(proof.folder, "cache")
    if not glob.glob(f"{cache}/gpumem/*.so"):
        words, _ = proof.recording()
        subprocess.run([*words, "true"], env={**os.environ, "XDG_CACHE_HOME": cache}, capture_output=True)
    (library,) = glob.glob(f"{cache}/gpumem/*.so")
    # A recording is read with the command `gpumem`.
    path = os.pathsep.join([os.path.dirname(os.path.abspath(proof.gpumem)), os.environ["PATH"]])
    return {"PYTHONPATH": PACKAGE, "GPUMEM_LIBRARY": library, "PYTHONDONTWRITEBYTECODE": "1", "PATH": path}


def ran(proof, name, with_package=True, **settings):
    env = environment(proof) if with_package else {}
    return proof.run(program(name, file="python_programs.py", **settings), env=env, timeout=400)


def sequences(proof):
    done = subprocess.run(
        program("sequences", file="python_programs.py"), env={**os.environ, **environment(proof)}, capture_output=True, text=True
    )
    if done.returncode:
        raise Failed(done.stderr[-1500:])
    lines = "".join(line for line in done.stdout.splitlines(True) if line.startswith("△"))
    said = harness.objects(done.stdout)[0]
    yield lines == LINES and said["data"] == [[20, 40], [10, 40]], "sequences", {"lines": lines.splitlines(), **said, "stderr": done.stderr[-300:]}


def random_programs(proof):
    said = ran(proof, "random_programs").facts
    yield said["wrong"] == 0 and said["programs"] == 1000 and said["compared"] > 1000, "random", said


def threads(proof):
    said = ran(proof, "threads").facts
    yield said["wrong"] == 0, "threads", said


def tasks(proof):
    said = ran(proof, "tasks").facts
    yield said["used"] == said["expected"] and said["lines"], "tasks", said


def backward(proof):
    said = ran(proof, "backward").facts
    yield said["found"] == said["expected"] and said["exact"], "backward", said


def failures(proof):
    said = ran(proof, "failures").facts
    right = {
        "inner": [7 * MIB, 0], "outer": [5 * MIB, 7 * MIB], "ended": "out of memory", "forked": 0, "spawned": [6 * MIB, 0, 6 * MIB],
        "kept": 5 * MIB,
    }
    yield said == right, "failures", said


def recorded(proof):
    """Under `gpumem run`, the numbers are the same, and the program is recorded once."""
    files = proof.run(program("backward", file="python_programs.py"), [], env=environment(proof))
    said = files.facts
    yield len(files.files) == 1 and said["found"] == said["expected"] and said["exact"], "recorded", said


def layers(proof):
    said = ran(proof, "layers").facts
    is_right = [peak == classes == layers > 0 for peak, classes, layers in said["sums"]]
    yield all(is_right) and len(is_right) == 3 and {"weights", "optimizer"} <= set(said["classes"]), "layers", said


def costs(proof):
    """The guard, a decorated call, the import, and tensors and steps beside those before the first trace. The same is done in processes
    without gpumem; the two take turns."""
    runs = {True: [], False: []}
    for _ in range(4):
        for traced in (True, False):
            runs[traced].append(ran(proof, "costs", traced, traced=traced).facts)
    values = {key: round(statistics.median(run[key] for run in runs[True]), 2) for key in ("guard_us", "decorated_us")}
    for key in ("tensor_us", "long_step_us", "short_step_us"):
        # Before, after, and their ratio; and the ratio without gpumem.
        before, after = (round(statistics.median(run[key][at] for run in runs[True]), 2) for at in (0, 1))
        ratios = [round(statistics.median(run[key][1] / run[key][0] for run in runs[traced]), 3) for traced in (True, False)]
        values[key] = [before, after, *ratios]
    env = {**os.environ, **environment(proof), "CUDA_VISIBLE_DEVICES": ""}
    imports = {"import_ms": "import ctypes, gpumem_trace", "first_trace_without_gpu_ms": "import gpumem_trace; gpumem_trace.GPUMemTrace()"}
    seconds = {code: [] for code in ["import ctypes", *imports.values()]}
    for _ in range(9):
        for code, each in seconds.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True)
            each.append(time.perf_counter() - began)
    without = statistics.median(seconds["import ctypes"])
    for key, code in imports.items():
        values[key] = round((statistics.median(seconds[code]) - without) * 1000, 1)
    is_cheap = values["guard_us"] <= 5 and values["decorated_us"] <= 6 and values["import_ms"] <= 30 and values["long_step_us"][2] <= 1.01
    yield is_cheap and all(run["exact"] for run in runs[True]), "costs", values


CASES = {
    "sequences": sequences, "random": random_programs, "threads": threads, "tasks": tasks, "backward": backward, "failures": failures,
    "recorded": recorded, "layers": layers, "costs": costs,
}

if __name__ == "__main__":
    harness.main(__doc__, CASES, alone=("costs",))

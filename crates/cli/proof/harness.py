"""The code that the proofs share: they run programs with and without `gpumem`, and print a row for each comparison.

A proof is a table of cases. A case is a function that gets the `Proof` and yields rows, each with a result, a name and its values. The
result is True or PASS, NEAR (within 2 %), False or FAIL, INFO (measured, without a limit) or SKIP (not measured). The exit status is 1 if a
row failed, or if nothing was measured.
"""

import argparse
import glob
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

MIB, GIB = 1 << 20, 1 << 30
HERE = os.path.dirname(os.path.abspath(__file__))
WITHOUT_TORCH = "programs_without_torch.py"
# Ranks of different cases and proofs may run at the same time.
PORTS = itertools.count(10_000 + os.getpid() % 20_000)

# This program needs nvcc, which links the CUDA runtime statically. Its exit code is 7.
CPP = r"""
#include <cstdio>
#include <cuda_runtime.h>
__global__ void add(float *x, const float *y, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] += y[i]; }
__global__ void count(int *n) { *n += 1; }
int main() {
    const size_t odd = 50000001, elements = 64 << 20, bytes = elements * sizeof(float);
    size_t free0, free1, total;
    float *x, *y; int *n, host = 0; void *other, *managed, *pinned;
    cudaMalloc(&n, sizeof(int)); cudaMemset(n, 0, sizeof(int)); cudaMalloc(&other, odd);
    cudaMemGetInfo(&free0, &total);
    cudaMalloc(&x, bytes); cudaMallocAsync(&y, bytes, 0);
    cudaMemset(x, 0, bytes); cudaMemsetAsync(y, 1, bytes, 0);
    while (host < 5) { add<<<elements / 256, 256>>>(x, y, elements); count<<<1, 1>>>(n); cudaMemcpy(&host, n, 4, cudaMemcpyDeviceToHost); }
    cudaMemGetInfo(&free1, &total);
    cudaDeviceProp properties; cudaGetDeviceProperties(&properties, 0);
    cudaPointerAttributes about; cudaPointerGetAttributes(&about, x + 5);
    printf("{\"reserved\": %zu, \"most\": %zu, \"agrees\": %d, \"type\": %d, \"device\": %d, \"error\": %d}\n",
        free0 - free1, sizeof(int) + odd + 2 * bytes, (int)(properties.totalGlobalMem == total), (int)about.type, about.device, (int)cudaGetLastError());
    cudaFree(x);
    cudaMallocManaged(&managed, 9 << 20);
    cudaMallocHost(&pinned, 5 << 20);
    cudaFreeAsync(y, 0); cudaDeviceSynchronize();
    return 7;
}
"""


class Failed(Exception):
    """A program or a command did not do its part of a case."""


class Skipped(Exception):
    """This machine lacks something that the case needs."""


def program(name, /, ranks=0, file="programs.py", **settings):
    """Returns the command that runs a program of these files."""
    launcher = []
    if ranks:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(next(PORTS))]
    return [sys.executable, *launcher, os.path.join(HERE, file), name, json.dumps(settings)]


def allocator(settings):
    """Returns the environment that gives PyTorch's allocator these settings."""
    return {"PYTORCH_CUDA_ALLOC_CONF": settings, "PYTORCH_ALLOC_CONF": settings} if settings else {}


def objects(text):
    """Returns the JSON objects in lines that start with one. Two ranks may print at the same time, on one line."""
    found, decoder = [], json.JSONDecoder()
    for line in text.splitlines():
        while line.startswith("{"):
            value, end = decoder.raw_decode(line)
            found.append(value)
            line = line[end:].lstrip()
    return sorted(found, key=lambda value: value.get("rank", 0))


def smi(query):
    """Returns the values of a query of nvidia-smi, by line."""
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    return [line.split(", ") for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines()]


def need_gpus(count):
    import torch

    if torch.cuda.device_count() < count:
        raise Skipped(f"{torch.cuda.device_count()} of {count} GPUs")


def near(found, expected):
    """Compares two numbers of bytes. Returns the result of the row, and the difference in percent."""
    by = (found - expected) / max(expected, 1)
    return "PASS" if found == expected else "NEAR" if abs(by) <= 0.02 else "FAIL", f"{by:+.3%}"


def compared(found, said, equal):
    """Compares a report's values with a program's. Returns whether all are equal, and the pairs."""
    known = {**found, **said}
    pairs = {name: [known.get(name), known.get(right) if isinstance(right, str) else right] for name, right in equal.items()}
    # Two missing values are not equal.
    return all(one == other and (one is not None or equal[name] is None) for name, (one, other) in pairs.items()), pairs


class Ran:
    """A program that ended as expected: what it printed, its recordings, and its seconds."""

    def __init__(self, done, files, seconds):
        self.said, self.stderr, self.files, self.seconds = objects(done.stdout), done.stderr, files, seconds
        self.facts = self.said[0] if self.said else {}


class Proof:
    def __init__(self, arguments, folder):
        self.arguments, self.folder = arguments, folder
        self.gpumem, self.jobs = os.path.abspath(arguments.gpumem), arguments.jobs

    def new_folder(self):
        return tempfile.mkdtemp(dir=self.folder)

    def recording(self, *options):
        """Returns the start of a command that records a program, and the folder of its recordings."""
        folder = self.new_folder()
        return [self.gpumem, "run", *options, "-o", os.path.join(folder, "a.capture"), "--"], folder

    def run(self, command, options=None, code=0, env=(), timeout=240):
        """Runs a program: with `gpumem run` and these options, or without gpumem if there are none."""
        words, folder = ([], None) if options is None else self.recording(*options)
        # Otherwise, a second run would find the compiled code of the first one.
        env = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", **dict(env)}
        began = time.time()
        try:
            done = subprocess.run([*words, *command], env=env, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired as late:
            raise Failed(f"it took more than {timeout} s: {(late.stderr or b'').decode(errors='replace')[-1500:]}") from None
        if done.returncode != code:
            raise Failed(f"it ended with {done.returncode} instead of {code}: {done.stderr[-2500:]}")
        return Ran(done, sorted(glob.glob(f"{folder}/*")) if folder else [], time.time() - began)

    def start(self, command, *options, **more):
        """Starts a program under `gpumem run`. Returns the process, and the folder of its recordings."""
        words, folder = self.recording(*options)
        return subprocess.Popen([*words, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **more), folder

    def ask(self, *words):
        """Returns a gpumem command's stdout."""
        done = subprocess.run([self.gpumem, *words], capture_output=True)
        if done.returncode:
            raise Failed(f"{words[0]} ended with {done.returncode}: {done.stderr[-1500:].decode(errors='replace')}")
        return done.stdout

    def report(self, file):
        return json.loads(self.ask("report", "--json", file))

    def cpp(self):
        """Builds the program in C++, and returns its command."""
        return self.built(CPP)

    def built(self, source):
        """Builds a program of this source, and returns its command."""
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        if not os.path.exists(nvcc):
            raise Skipped("there is no nvcc")
        path = os.path.join(self.new_folder(), "program")
        with open(path + ".cu", "w") as file:
            file.write(source)
        subprocess.run([nvcc, "-cudart", "static", "-O1", "-lineinfo", "-g", "-o", path, path + ".cu"], check=True)
        return [path]

    def map(self, function, items):
        """Calls a function for each item, for at most `--jobs` items at a time."""
        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(function, items))


def rows_of(proof, name, case):
    """Yields the rows of a case. An error becomes a row, so that the other cases still run."""
    count = 0
    try:
        for count, row in enumerate(case(proof), 1):
            yield row
        if not count:
            raise Failed("the case has no rows")
    except Skipped as why:
        yield "SKIP", name, {"why": str(why)}
    except Exception as error:
        yield False, name, {"error": str(error) if isinstance(error, Failed) else repr(error)}


def chosen(names, cases):
    """Returns the cases of `--only`. A name that is not a case chooses all cases whose names start with it and a dash."""
    for name in names.split(","):
        group = [name] if name in cases else [case for case in cases if case.startswith(name + "-")]
        if not group:
            sys.exit(f"there is no case {name}; there are: {', '.join(cases)}")
        yield from group


def main(text, cases, options=(), alone=()):
    """Runs the cases of the command line and exits. Those in `alone` run one by one, after the others."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpumem", help="the command gpumem")
    parser.add_argument("--only", default=",".join(cases), metavar="CASES", help="separated by commas: " + ", ".join(cases))
    parser.add_argument("--jobs", type=int, default=1, help="how many cases run at the same time")
    parser.add_argument("--out", help="a file that gets each row as a line of JSON")
    for option, settings in dict(options).items():
        parser.add_argument(option, **settings)
    arguments = parser.parse_args()
    if not shutil.which(os.path.abspath(arguments.gpumem)):
        sys.exit(f"{arguments.gpumem} is not a program; build it with `cargo build --release -p gpumem-cli`")
    names = list(dict.fromkeys(chosen(arguments.only, cases)))
    results, out = [], open(arguments.out, "w") if arguments.out else None

    def show(rows):
        for result, name, values in rows:
            result = {True: "PASS", False: "FAIL"}.get(result, result)
            results.append(result)
            print(result, name, json.dumps(values), flush=True)
            if out:
                print(json.dumps({"name": name, "result": result, **values}), file=out, flush=True)

    with tempfile.TemporaryDirectory(prefix="gpumem-proof-") as folder:
        proof = Proof(arguments, folder)
        with ThreadPoolExecutor(proof.jobs) as pool:
            together = [name for name in names if name not in alone]
            for rows in pool.map(lambda name: list(rows_of(proof, name, cases[name])), together):
                show(rows)
        for name in names:
            if name in alone:
                show(rows_of(proof, name, cases[name]))
    counts = {result: results.count(result) for result in dict.fromkeys(results)}
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    sys.exit("FAIL" in counts or set(counts) <= {"SKIP"})

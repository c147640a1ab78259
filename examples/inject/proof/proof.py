#!/usr/bin/env python3
"""Compares what gpumem's example `inject` says of programs with what the programs and the driver say of themselves.

    cargo build --release -p gpumem-inject-example
    python examples/inject/proof/proof.py target/release/libgpumem_inject_example.so

Each program runs in a process of its own, which the driver loads the library into; the programs are in this file too, and
know nothing of gpumem. The script prints a line PASS or FAIL for each comparison, with the figures, and exits with 1 if one
failed. It needs an NVIDIA GPU that nobody else uses, nvidia-ml-py, and for most comparisons PyTorch; JAX where it is there.
`--only torch,cupti` chooses comparisons; it takes some three minutes for all of them.
"""

import argparse
import collections
import concurrent.futures
import ctypes
import glob
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time

MIB = 1 << 20


# What runs in the child processes. Each prints one line of JSON, what it knows of itself.


class Driver:
    """The driver by ctypes: nothing else allocates then."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def context(self):
        """Creates the primary context of device 0 and makes it current."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def uuid(self):
        uuid = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid_v2", uuid, 0)
        digits = bytes(uuid).hex()
        return "GPU-" + "-".join([digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]])

    def used_high(self):
        """The driver's own mark of what was in use in the default pool of device 0."""
        pool, high = ctypes.c_void_p(), ctypes.c_uint64()
        self.call("cuDeviceGetDefaultMemPool", ctypes.byref(pool), 0)
        self.call("cuMemPoolGetAttribute", pool, 8, ctypes.byref(high))
        return high.value

    def allocate(self, sizes):
        """Takes all of them with cuMemAlloc, then gives all back."""
        addresses = []
        for size in sizes:
            address = ctypes.c_uint64()
            self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
            addresses.append(address)
        for address in addresses:
            self.call("cuMemFree_v2", address)


def libcupti():
    """The path of libcupti: on the loader's path, in a toolkit, or in a Python package."""
    names = ["libcupti.so.13", "libcupti.so.12"]
    folders = ["/usr/local/cuda/extras/CUPTI/lib64", "/usr/local/cuda/lib64"]
    for path in sys.path:
        folders += [f"{path}/nvidia/cu13/lib", f"{path}/nvidia/cuda_cupti/lib"]
    for name in names:
        try:
            ctypes.CDLL(name)
            return name
        except OSError:
            pass
    found = [file for folder in folders for name in names for file in glob.glob(f"{folder}/{name}")]
    return found[0] if found else None


class Cupti:
    """A tool that counts the calls of cuMemAlloc_v2."""

    def __init__(self):
        self.library = ctypes.CDLL(libcupti())
        self.calls = 0
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
        # Kept: CUPTI calls it as long as it is subscribed.
        self.callback = kind(self.observed)
        self.subscriber = ctypes.c_void_p()
        code = self.library.cuptiSubscribe(ctypes.byref(self.subscriber), self.callback, None)
        assert code == 0, f"cuptiSubscribe: {code}"
        driver_api, mem_alloc = 1, 243
        code = self.library.cuptiEnableCallback(1, self.subscriber, driver_api, mem_alloc)
        assert code == 0, f"cuptiEnableCallback: {code}"

    def observed(self, _data, _domain, _number, call):
        # The first field is CUPTI's `callbackSite`; 1 is the exit.
        self.calls += ctypes.cast(call, ctypes.POINTER(ctypes.c_int)).contents.value == 1


SIZES = [(number + 1) * 700_001 for number in range(20)]


def child_cupti(order):
    """Another tool is subscribed to CUPTI before the driver, and so the injected library, is there; or after."""
    driver = Driver()
    cupti = None
    if order == "before":
        cupti = Cupti()
    driver.context()
    if order == "after":
        cupti = Cupti()
    driver.allocate(SIZES)
    return {"calls": cupti.calls}


def child_context():
    """Creates a context, and waits."""
    driver = Driver()
    driver.context()
    print(json.dumps({"uuid": driver.uuid()}), flush=True)
    sys.stdin.read()


def step_of_training(width, batch):
    """A small network, and a function that trains it for one step."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(1024, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU()]
    network = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1024)).cuda()
    optimizer = torch.optim.AdamW(network.parameters())

    def step():
        optimizer.zero_grad()
        inputs = torch.randn(batch, 1024, device="cuda")
        torch.nn.functional.mse_loss(network(inputs), inputs).backward()
        optimizer.step()

    return step


def of_torch():
    import torch

    torch.cuda.synchronize()
    return {
        "backend": torch.cuda.get_allocator_backend(),
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "pool": Driver().used_high(),
    }


def child_handles():
    """No more than the libraries' handles: one product of small matrices."""
    import torch

    small = torch.ones(64, 64, device="cuda")
    (small @ small).sum().item()
    return of_torch()


def child_torch():
    step = step_of_training(4096, 2048)
    for _ in range(10):
        step()
    return of_torch()


def child_jax(size):
    import jax

    size = int(size)

    @jax.jit
    def step(weights, inputs):
        return weights - 0.01 * jax.grad(lambda weights: ((inputs @ weights) ** 2).mean())(weights)

    weights = jax.numpy.ones((size, size))
    for number in range(5):
        weights = step(weights, jax.random.normal(jax.random.key(number), (size, size)))
    weights.block_until_ready()
    return {"stats": jax.local_devices()[0].memory_stats()}


def child_profile():
    """Events of the GPU by name, in a profile that begins before the first call of CUDA, and in one that begins after."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    def events(prof):
        cuda = torch.autograd.DeviceType.CUDA
        return dict(collections.Counter(event.name for event in prof.events() if event.device_type == cuda))

    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=both) as first:
        step = step_of_training(512, 64)
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    with profile(activities=both) as second:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    return {"first": events(first), "second": events(second)}


def child_steps():
    """The median of 50 steps, in milliseconds."""
    import torch

    step = step_of_training(4096, 1024)
    for _ in range(30):
        step()
    torch.cuda.synchronize()
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return {"ms": statistics.median(times)}


# The process that starts them and compares.


class Run:
    """A child process, with the library injected or without."""

    def __init__(self, options, what, *arguments, injected=True, env=None):
        self.what = " ".join([what, *arguments])
        self.folder = tempfile.TemporaryDirectory(prefix="gpumem-proof-")
        self.out = os.path.join(self.folder.name, "summary")
        variables = {name: value for name, value in os.environ.items() if not name.startswith("GPUMEM_")}
        variables.setdefault("CUDA_VISIBLE_DEVICES", "0")
        if injected:
            named = {"CUDA_INJECTION64_PATH": options.library, "GPUMEM_REPORT": "json", "GPUMEM_INJECT_OUT": self.out}
            variables.update(named, GPUMEM_SOURCE=options.source)
            if "GPUMEM_CUPTI" in os.environ:
                variables["GPUMEM_CUPTI"] = os.environ["GPUMEM_CUPTI"]
        variables.update(env or {})
        command = [sys.executable, os.path.abspath(__file__), "--child", what, *arguments]
        pipe = subprocess.PIPE
        self.errors = open(os.path.join(self.folder.name, "stderr"), "w+")
        self.process = subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, stderr=self.errors, text=True)
        # One that hangs is a failure and not the end of the proof.
        self.limit = threading.Timer(120, self.process.kill)
        self.limit.daemon = True
        self.limit.start()

    def line(self):
        """The next JSON that it prints."""
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self.end()
        raise RuntimeError(f"{self.what}: it said nothing")

    def end(self):
        self.process.stdin.close()
        code = self.process.wait()
        self.limit.cancel()
        if code != 0:
            self.errors.seek(0)
            said = self.errors.read().strip().splitlines()[-8:]
            raise RuntimeError(f"{self.what}: exit status {code}: " + " | ".join(line.strip() for line in said))

    def answer(self):
        """What it says of itself, and what gpumem says of its first device."""
        own = self.line()
        self.end()
        lines = open(self.out).read().splitlines() if os.path.exists(self.out) else []
        of_it = [json.loads(line) for line in lines]
        of_it = [summary for summary in of_it if summary["process"] == self.process.pid]
        return own, of_it[-1] if of_it else None


class Proof:
    def __init__(self, options):
        self.options = options
        self.failed = 0

    def check(self, passed, text):
        self.failed += not passed
        print(f"{'PASS' if passed else 'FAIL'}  {text}", flush=True)

    def run(self, *what, **how):
        return Run(self.options, *what, **how).answer()

    def check_observed(self, name, summary):
        """The first device of a summary in which nothing was missed."""
        if summary is None or summary["error"] or not summary["devices"]:
            self.check(False, f"{name}: no summary: {summary and summary['error']}")
            return None
        missed = summary["lost_events"] + summary["untracked_frees"]
        by = os.path.basename(summary["intercepted_by"] or "nothing")
        self.check(missed == 0, f"{name}: {summary['events']} events observed by {by}, {missed} missed")
        return summary["devices"][0]

    def torch(self):
        """Peaks of PyTorch's allocators, to the byte."""
        ways = {
            "handles": ("handles", None, "reserved"),
            "native": ("torch", "backend:native", "reserved"),
            "expandable": ("torch", "expandable_segments:True", "reserved"),
            "async": ("torch", "backend:cudaMallocAsync", "allocated"),
        }

        def one(way):
            what, conf, _ = ways[way]
            # All stacks, for what the libraries take in small blocks.
            env = {"GPUMEM_BACKTRACE": "1"}
            if conf:
                env["PYTORCH_CUDA_ALLOC_CONF"] = conf
            return self.run(what, env=env)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            results = dict(zip(ways, pool.map(one, ways)))
        outside = {}
        for way, (own, summary) in results.items():
            name = f"torch, {way}"
            device = self.check_observed(name, summary)
            if device is None:
                continue
            truth = own[ways[way][2]]
            outside[way] = device["peak"] - truth
            # What other libraries than PyTorch asked the driver for, and never give back.
            libraries = collections.Counter()
            for live in device["live"]:
                if live["library"] not in ("PyTorch", None) and live["kind"] in ("device", "pool", "vmm"):
                    libraries[live["library"]] += live["bytes"]
            named = ", ".join(f"{library} {size}" for library, size in libraries.items()) or "none"
            kinds = {kind: tally["peak"] for kind, tally in device["stats"]["allocated_bytes"].items() if tally["peak"]}
            self.check(
                device["peak"] == truth + sum(libraries.values()),
                f"{name}: peak {device['peak']} = max_memory_{ways[way][2]} {truth} + libraries "
                f"{sum(libraries.values())} ({named}); difference {outside[way] - sum(libraries.values())}; by kind {kinds}",
            )
            expected = {"expandable": "vmm", "async": "pool"}.get(way, "device")
            self.check(kinds.get(expected, 0) > 0, f"{name}: memory is of the kind `{expected}`")
            if way == "async":
                high, peak = own["pool"], kinds.get("pool", 0)
                # The driver rounds each block.
                blocks = device["stats"]["allocation"]["pool"]["peak"]
                self.check(
                    peak <= high < peak + 512 * blocks + 1,
                    f"{name}: peak of the pool {peak}, the driver's USED_MEM_HIGH {high}, difference {high - peak} "
                    f"with {blocks} blocks at most",
                )
        figures = ", ".join(f"{way} {size / MIB:.2f} MiB" for way, size in outside.items())
        # The first program makes one handle of cuBLAS, which takes half of what two streams take.
        same = len({size for way, size in outside.items() if way != "handles"}) == 1
        self.check(same, f"torch: what is outside of its allocator is the same each time: {figures}")

    def jax(self):
        """What XLA's allocator took, in two sizes of one program."""
        if importlib.util.find_spec("jax") is None:
            print("skip  jax: it is not installed")
            return
        env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "GPUMEM_BACKTRACE": "1"}
        outside = {}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            sizes = ["1024", "4096"]
            results = dict(zip(sizes, pool.map(lambda size: self.run("jax", size, env=env), sizes)))
        for size, (own, summary) in results.items():
            device = self.check_observed(f"jax, {size}", summary)
            if device is None:
                continue
            stats = own["stats"]
            pool_bytes = stats.get("peak_pool_bytes") or stats.get("pool_bytes") or 0
            outside[size] = device["peak"] - pool_bytes
            self.check(
                0 < pool_bytes <= device["peak"],
                f"jax, {size}: peak {device['peak']}, XLA's pool {pool_bytes}, in use {stats.get('peak_bytes_in_use')}; "
                f"outside of it {outside[size]}",
            )
        self.check(len(set(outside.values())) == 1, f"jax: what is outside of XLA's pool is the same in both: {outside}")

    def profile(self):
        """torch.profiler loses no events of the GPU."""
        own = {}
        for injected in [False, True]:
            own[injected], summary = self.run("profile", injected=injected)
            if injected:
                self.check_observed("torch.profiler", summary)
        for which, when in [("first", "begun before the first call of CUDA"), ("second", "begun after it")]:
            plain, traced = own[False][which], own[True][which]
            count = sum(plain.values())
            pairs = {name: (plain.get(name), traced.get(name)) for name in plain | traced}
            differ = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
            self.check(
                count > 0 and not differ,
                f"torch.profiler, {when}: {count} events of the GPU without gpumem, {sum(traced.values())} with it"
                + (f"; differ: {differ}" if differ else ""),
            )

    def steps(self):
        """A step of training takes as long as before."""
        times = {False: [], True: []}
        for number in range(5):
            for injected in [number % 2 == 0, number % 2 == 1]:
                own, _ = self.run("steps", injected=injected)
                times[injected].append(own["ms"])
        ratios = sorted(traced / plain for traced, plain in zip(times[True], times[False]))
        ratio = statistics.median(times[True]) / statistics.median(times[False])
        self.check(
            ratio <= self.options.most,
            f"a step: {statistics.median(times[False]):.3f} ms without gpumem, {statistics.median(times[True]):.3f} ms with it: "
            f"ratio {ratio:.3f}, of neighbouring processes {ratios[0]:.3f} to {ratios[-1]:.3f}; at most {self.options.most}",
        )

    def cupti(self):
        """A tool that uses CUPTI observes all calls, and so does gpumem."""
        if libcupti() is None:
            print("skip  cupti: there is no libcupti")
            return
        for order in ["before", "after"]:
            own, summary = self.run("cupti", order)
            name = f"CUPTI subscribed {order} gpumem"
            device = self.check_observed(name, summary)
            if device is None:
                continue
            observed = (own["calls"], device["allocations"], device["peak"])
            self.check(
                observed == (len(SIZES), len(SIZES), sum(SIZES)),
                f"{name}: of {len(SIZES)} allocations CUPTI's subscriber observed {observed[0]}, gpumem {observed[1]}; "
                f"peak {observed[2]} of {sum(SIZES)}",
            )

    def context(self):
        """The CUDA context takes as much of the device as before, to the byte."""
        import pynvml

        pynvml.nvmlInit()
        first = Run(self.options, "context", injected=False)
        handle = pynvml.nvmlDeviceGetHandleByUUID(first.line()["uuid"])
        first.end()

        def used():
            return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used

        took = {False: [], True: []}
        for _ in range(3):
            for injected in [False, True]:
                # What an earlier process had goes back a moment after its end.
                before = settled(used)
                run = Run(self.options, "context", injected=injected)
                run.line()
                took[injected].append(settled(used) - before)
                run.end()
        self.check(
            len(set(took[False] + took[True])) == 1 and took[True][0] > 0,
            f"the context takes {took[False]} bytes of the device without gpumem, {took[True]} with it",
        )


def settled(read):
    """A figure that has stopped to change."""
    last = read()
    for _ in range(50):
        time.sleep(0.1)
        now = read()
        if now == last:
            return now
        last = now
    return last


CHILDREN = {
    "context": child_context,
    "cupti": child_cupti,
    "handles": child_handles,
    "jax": child_jax,
    "profile": child_profile,
    "steps": child_steps,
    "torch": child_torch,
}


def main():
    if sys.argv[1:2] == ["--child"]:
        answer = CHILDREN[sys.argv[2]](*sys.argv[3:])
        if answer is not None:
            print(json.dumps(answer), flush=True)
        return 0
    # First what needs the device for itself.
    parts = ["context", "cupti", "torch", "jax", "profile", "steps"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", help="libgpumem_inject_example.so")
    parser.add_argument("--only", default=",".join(parts), help="comparisons: " + ",".join(parts))
    parser.add_argument("--source", default="auto", help="GPUMEM_SOURCE of the programs: auto, dispatch or cupti")
    parser.add_argument("--most", type=float, default=1.02, help="the ratio of step times that is let pass")
    options = parser.parse_args()
    options.library = os.path.abspath(options.library)
    assert os.path.exists(options.library), f"there is no {options.library}"
    proof = Proof(options)
    begin = time.time()
    for part in options.only.split(","):
        try:
            getattr(proof, part)()
        except Exception as error:  # One comparison that cannot be made leaves the others.
            proof.check(False, f"{part}: {type(error).__name__}: {error}")
    print(f"{proof.failed} failed, {time.time() - begin:.0f} s")
    return 1 if proof.failed else 0


if __name__ == "__main__":
    sys.exit(main())

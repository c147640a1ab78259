"""Programs that trace themselves with the package `gpumem_trace`, for `python.py`: each prints what it saw as JSON."""

import asyncio
import io
import json
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from contextlib import redirect_stdout

import torch

MIB = 1 << 20
ROUNDED = 512


def tensor(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def some_code():
    """Keeps 10 MiB, and needs 40 MiB more."""
    kept = tensor(10 * MIB)
    tensor(40 * MIB)
    return kept


def sequences():
    """Those of fastai's page. Each call keeps its 10 MiB until the next one."""
    from gpumem_trace import GPUMemTrace, gpu_mem_trace, preload_pytorch

    preload_pytorch()
    trace = GPUMemTrace()
    first = some_code()
    trace.report()
    second = some_code()
    trace.report("2nd run of some_code()")
    data = [trace.data()]
    del first, second
    for i in range(2):
        trace.reset()
        kept = some_code()
        trace.report(f"i={i}")
        del kept
    trace.reset()
    for i in range(2):
        kept = some_code()
        trace.report_n_reset(f"i={i}")
        del kept
        trace.reset()
    trace.stop()
    kept = some_code()
    trace.report("stopped")
    trace.start()
    trace.report("started")
    del kept
    trace = GPUMemTrace(ctx="foobar")
    trace.report("1st try")
    trace.report("2nd try")
    trace = GPUMemTrace(silent=True)
    trace.report()
    trace.silent = False
    trace.report()
    with GPUMemTrace():
        kept = some_code()
    del kept
    with GPUMemTrace(ctx="some context"):
        kept = some_code()
    del kept

    @gpu_mem_trace
    def some_func():
        return some_code()

    kept = some_func()
    del kept
    with GPUMemTrace(ctx="some_func", on_exit_report=False) as trace:
        kept = some_code()
    trace.report("measured in ctx")
    print(trace)
    del kept
    with GPUMemTrace() as trace:
        kept = some_code()
    data.append(trace.data())
    return {"data": data}


class Expected:
    """What a trace should say, by PyTorch's own counters. `max_memory_allocated` is reset for each step of any trace, so each keeps its own."""

    def __init__(self):
        self.start = torch.cuda.memory_allocated()
        self.most = self.start

    def values(self):
        now = torch.cuda.memory_allocated()
        return now - self.start, self.most - max(now, self.start)


def random_programs(count=1000, seed=1):
    """Allocates and frees at random in nested traces, on two streams, and compares each trace with `max_memory_allocated`."""
    from gpumem_trace import GPUMemTrace

    rng, wrong, compared, deepest = random.Random(seed), [], 0, 0
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for number in range(count):
        live, open_traces = [], []
        torch.cuda.reset_peak_memory_stats()

        def step(action):
            torch.cuda.reset_peak_memory_stats()
            action()
            for _, expected in open_traces:
                expected.most = max(expected.most, torch.cuda.max_memory_allocated())

        def check(trace, expected, what):
            nonlocal compared
            compared += 1
            found = (trace.used, trace.peaked)
            if found != expected.values() or not trace.is_exact:
                wrong.append([number, what, found, expected.values(), trace.is_exact])

        for _ in range(rng.randrange(10, 40)):
            choice = rng.random()
            if choice < 0.5:
                size = rng.choice([rng.randrange(1, 4000), rng.randrange(1, MIB), rng.randrange(1, 40 * MIB)])
                with torch.cuda.stream(rng.choice(streams)):
                    step(lambda: live.append(tensor(size)))
            elif choice < 0.75 and live:
                step(lambda: live.pop(rng.randrange(len(live))))
            elif choice < 0.85 and len(open_traces) < 5:
                trace = GPUMemTrace(silent=True)
                open_traces.append((trace, Expected()))
                deepest = max(deepest, len(open_traces))
            elif choice < 0.93 and open_traces:
                trace, expected = open_traces.pop()
                check(trace, expected, "closed")
                trace.stop()
            elif open_traces:
                at = rng.randrange(len(open_traces))
                check(*open_traces[at], "read")
                if rng.random() < 0.5:
                    trace = open_traces[at][0]
                    trace.reset()
                    open_traces[at] = (trace, Expected())
        if rng.random() < 0.1:
            step(torch.cuda.empty_cache)
        while open_traces:
            check(*open_traces.pop(), "end")
    return {"programs": count, "compared": compared, "deepest": deepest, "wrong": len(wrong), "first": wrong[:3]}


def threads(count=8, steps=300):
    """Each thread has its own trace, which counts only its own tensors."""
    from gpumem_trace import GPUMemTrace

    wrong = []

    def work(seed):
        rng, live, used, most = random.Random(seed), [], 0, 0
        with GPUMemTrace(ctx=f"thread {seed}", on_exit_report=False) as trace:
            for _ in range(steps):
                if rng.random() < 0.6 or not live:
                    size = rng.randrange(1, 2000) * ROUNDED
                    live.append((tensor(size), size))
                    used += size
                else:
                    used -= live.pop(rng.randrange(len(live)))[1]
                most = max(most, used)
            found = (trace.used, trace.peaked)
            # A thread in no trace would free them for the traces of all others.
            live.clear()
        if found != (used, most - used):
            wrong.append([found, (used, most - used)])

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {"threads": count, "wrong": len(wrong), "first": wrong[:2]}


def tasks(count=20):
    """Tasks that take turns: each decorated function counts what it allocates itself."""
    from gpumem_trace import GPUMemTrace, gpu_mem_trace

    kept = []

    def task(number):
        @gpu_mem_trace(ctx=f"task {number}")
        async def traced():
            for _ in range(3):
                # PyTorch rounds tensors of this size to nothing else.
                kept.extend(tensor(MIB) for _ in range(number + 1))
                await asyncio.sleep(0)

        return traced()

    async def main():
        await asyncio.gather(*map(task, range(count)))

    with GPUMemTrace(ctx="all", on_exit_report=False) as trace, redirect_stdout(io.StringIO()) as lines:
        asyncio.run(main())
    expected = [f"△Used Peaked MB:{3 * (number + 1):7}      0   (all > task {number}: exit)" for number in range(count)]
    return {"used": trace.used, "expected": torch.cuda.memory_allocated(), "lines": sorted(lines.getvalue().splitlines()) == sorted(expected)}


def backward():
    """The backward pass runs on a thread of PyTorch, and counts for the trace that waits for it."""
    from gpumem_trace import GPUMemTrace

    layers = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]).cuda()
    batch = torch.randn(512, 2048, device="cuda")
    layers(batch).sum().backward()
    layers.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    expected = Expected()
    with GPUMemTrace(ctx="step", on_exit_report=False) as trace:
        layers(batch).sum().backward()
    expected.most = torch.cuda.max_memory_allocated()
    return {"found": [trace.used, trace.peaked], "expected": list(expected.values()), "exact": trace.is_exact}


def in_child(queue):
    from gpumem_trace import GPUMemTrace

    with GPUMemTrace(ctx="child", on_exit_report=False) as trace:
        kept = tensor(6 * MIB)
    queue.put((trace.used, trace.peaked, len(kept)))


def failures():
    """An exception and memory that runs out leave the traces right; a forked child measures nothing, and a spawned one measures itself."""
    from gpumem_trace import GPUMemTrace, gpu_mem_restore

    with GPUMemTrace(ctx="outer", on_exit_report=False) as outer:
        kept = tensor(5 * MIB)
        try:
            with GPUMemTrace(ctx="inner", on_exit_report=False) as inner:
                inside = tensor(7 * MIB)
                raise ValueError
        except ValueError:
            del inside

        @gpu_mem_restore
        def too_much():
            return tensor(torch.cuda.mem_get_info()[1] * 2)

        try:
            too_much()
            ended = "it was allocated"
        except torch.OutOfMemoryError:
            ended = "out of memory"
        child = os.fork()
        if child == 0:
            os._exit(inner.is_measured)
        forked = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=in_child, args=(queue,))
        process.start()
        spawned = queue.get(timeout=100)
        process.join()
    return {
        "inner": [inner.used, inner.peaked], "outer": [outer.used, outer.peaked], "ended": ended, "forked": forked, "spawned": spawned,
        "kept": len(kept),
    }


def layers(epochs=3):
    """What is recorded of an epoch: the classes and the layers at its peak add up to what PyTorch counts, and older tensors are among them."""
    from gpumem_trace.callbacks import Epochs

    net = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(4)]).cuda()
    optimizer, batch, sums, logged = torch.optim.AdamW(net.parameters()), torch.randn(8, 256, 512, device="cuda"), [], []
    measured = Epochs(lambda values, step: logged.append(values), layers=True)
    for epoch in range(epochs):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(5):
            net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = torch.cuda.max_memory_allocated()
        measured.end(epoch)
        row = measured.rows[-1]
        sums.append([peak, *(sum(row.get(kind, {}).values()) for kind in ("classes", "layers"))])
    measured.stop()
    return {"sums": sums, "classes": measured.rows[-1].get("classes"), "logged": len(logged[-1])}


def times(code, count, repeats=7):
    """Returns the median time of a call in µs."""
    each = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(count):
            code()
        each.append((time.perf_counter() - began) / count * 1e6)
    return round(statistics.median(each), 2)


def costs(traced):
    """Times tensors and training steps twice. In between, a trace starts, or nothing happens."""
    kept, values = tensor(MIB), {}
    layers = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True) for _ in range(6)]).cuda()
    optimizer = torch.optim.AdamW(layers.parameters())
    # The CPU waits for the GPU in the long steps, and the GPU for the CPU in the short ones.
    batches = {"long_step_us": torch.randn(8, 256, 768, device="cuda"), "short_step_us": torch.randn(8, 64, 768, device="cuda")}

    def step(batch):
        layers(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    def timed():
        each = {"tensor_us": times(lambda: tensor(4096), 20000)}
        for name, batch in batches.items():
            for _ in range(5):
                step(batch)
            each[name] = times(lambda: step(batch), 10, 9)
        return each

    before = timed()
    if traced:
        from gpumem_trace import GPUMemTrace, gpu_mem_trace

        def guard():
            with GPUMemTrace(silent=True, on_exit_report=False) as trace:
                return trace.used

        @gpu_mem_trace
        def decorated():
            pass

        guard()
        values["guard_us"] = times(guard, 2000)
        stdout, sys.stdout = sys.stdout, open(os.devnull, "w")
        decorated()
        values["decorated_us"] = times(decorated, 2000)
        sys.stdout = stdout
        outer = GPUMemTrace(silent=True)
    values |= {name: [before[name], after] for name, after in timed().items()}
    if traced:
        values["exact"] = outer.is_exact
    return {**values, "kept": len(kept)}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))

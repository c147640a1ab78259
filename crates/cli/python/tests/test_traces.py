"""Traces on a simulated GPU: `GPUMEM_SIM=16GiB python -m unittest discover crates/cli/python/tests`."""

import asyncio
import contextlib
import copy
import functools
import gc
import importlib.metadata
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import warnings
from unittest import mock

import gpumem_trace
from gpumem_trace import (
    Data,
    Error,
    GPUMemory,
    GPUMemTrace,
    callbacks,
    gpu_mem_get,
    gpu_mem_get_all,
    gpu_mem_get_used_fast,
    gpu_mem_restore,
    gpu_mem_trace,
    gpu_with_max_free_mem,
    sim,
)

MIB = 1 << 20


def lines(code):
    """Returns what the code prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code()
    return out.getvalue().splitlines()


def line(used, peaked, ctx=""):
    return f"△Used Peaked MB: {used:6,} {peaked:6,}" + (f" ({ctx})" if ctx else "")


def blip(mib):
    """Allocates memory and frees it at once."""
    sim.alloc(mib * MIB).free()


class Fastai(unittest.TestCase):
    """The sequences of fastai's documentation."""

    def test_reports(self):
        def code():
            trace = GPUMemTrace()
            kept = sim.alloc(10 * MIB)
            blip(15)
            trace.report()
            self.assertEqual(tuple(trace.data()), (10, 15))
            trace.report("2nd run")
            trace.report_n_reset("3rd")
            self.assertEqual(trace.data(), Data(0, 0))
            kept.free()
            trace.report("4th")

        self.assertEqual(lines(code), [line(10, 15), line(10, 15, "2nd run"), line(10, 15, "3rd"), line(-10, 0, "4th")])

    def test_the_documentation(self):
        def code():
            mtrace = GPUMemTrace()
            mtrace.report()
            mtrace.report("2nd run of some_code()")
            for i in range(3):
                mtrace.reset()
                mtrace.report(f"i={i}")
            mtrace = GPUMemTrace(ctx="foobar")
            mtrace.report()
            mtrace.report("1st try")
            mtrace = GPUMemTrace(silent=True)
            mtrace.report()
            mtrace.silent = False
            mtrace.report()
            mtrace.silent = True
            mtrace.report_n_reset()
            with GPUMemTrace():
                blip(1)
            with GPUMemTrace(ctx="some context"):
                blip(2)
            with GPUMemTrace(ctx="some_func", on_exit_report=False) as mtrace:
                blip(3)
            mtrace.report("measured in ctx")
            with GPUMemTrace(on_exit_report=False) as mtrace:
                blip(4)
            blip(100)
            print(mtrace)

        expected = [line(0, 0), line(0, 0, "2nd run of some_code()"), *(line(0, 0, f"i={i}") for i in range(3))]
        expected += [line(0, 0, "foobar"), line(0, 0, "foobar: 1st try"), line(0, 0)]
        expected += [line(0, 1, "exit"), line(0, 2, "some context: exit"), line(0, 3, "some_func: measured in ctx"), line(0, 4)]
        self.assertEqual(lines(code), expected)

    def test_a_trace_in_another_one(self):
        def code():
            with GPUMemTrace(ctx="train"):
                with GPUMemTrace(ctx="forward"):
                    blip(3)

        self.assertEqual(lines(code), [line(0, 3) + "   (train > forward: exit)", line(0, 3, "train: exit")])

    def test_start_and_stop(self):
        trace = GPUMemTrace()
        trace.stop()
        kept = sim.alloc(7 * MIB)
        self.assertEqual(trace.data(), (0, 0))
        trace.start()
        blip(5)
        self.assertEqual((trace.data(), trace.used, trace.peaked), ((0, 5), 0, 5 * MIB))
        self.assertTrue(trace.is_exact and trace.is_measured)
        kept.free()

    def test_queries(self):
        before = gpu_mem_get()
        kept = sim.alloc(160 * MIB)
        after = gpu_mem_get()
        self.assertEqual((after.total, after.used - before.used), (16 * 1024, 160))
        self.assertEqual((gpu_mem_get_all(), gpu_with_max_free_mem()), ([after], (0, after.free)))
        self.assertEqual(gpu_mem_get_used_fast(0), after.used)
        for wrong in (99, -1, "cuda:0"):
            self.assertRaises(Error, gpu_mem_get, wrong)
        kept.free()


class Decorated(unittest.TestCase):
    def test_functions(self):
        @gpu_mem_trace
        def forward():
            blip(25)
            return sim.alloc(10 * MIB)

        class Model:
            @gpu_mem_trace
            def step(self):
                raise ValueError("kept")

            @gpu_mem_trace
            @staticmethod
            def load(size):
                blip(size)

            @gpu_mem_trace(ctx="named")
            @classmethod
            def name(cls):
                return cls.__name__

        class Callable:
            def __call__(self):
                blip(6)

        def code():
            gpu_mem_trace(functools.partial(Callable()))()
            kept.append(forward())
            with self.assertRaisesRegex(ValueError, "kept"):
                Model().step()
            Model.load(4)
            self.assertEqual(Model.name(), "Model")

        kept = []
        expected = [line(0, 6, "Callable: exit"), line(10, 15, "forward: exit"), line(0, 0, "Model.step: exit"), line(0, 4, "Model.load: exit"), line(0, 0, "named: exit")]
        self.assertEqual(lines(code), expected)
        self.assertEqual(forward.__name__, "forward")

    def test_generators(self):
        @gpu_mem_trace
        def batches(count):
            for batch in range(count):
                blip(2)
                got = yield batch
                if got:
                    blip(got)
            return "end"

        def code():
            inner = batches(2)
            self.assertEqual(next(inner), 0)
            blip(50)  # not in the generator
            self.assertEqual(inner.send(6), 1)
            with self.assertRaises(StopIteration) as stop:
                next(inner)
            self.assertEqual(stop.exception.value, "end")
            closed = batches(2)
            next(closed)
            closed.close()

        self.assertEqual(lines(code), [line(0, 6, "batches: exit"), line(0, 2, "batches: exit")])

    def test_tasks_that_share_a_thread(self):
        @gpu_mem_trace
        async def task(mib, steps):
            kept = sim.alloc(mib * MIB)
            for _ in range(steps):
                await asyncio.sleep(0)
                blip(1)
            kept.free()
            return mib

        @gpu_mem_trace
        async def stream(count):
            for at in range(count):
                blip(at + 1)
                yield at

        async def main():
            got = await asyncio.gather(task(10, 5), task(20, 3), task(30, 1))
            return got + [at async for at in stream(3)]

        got = []
        printed = lines(lambda: got.extend(asyncio.run(main())))
        self.assertEqual(got, [10, 20, 30, 0, 1, 2])
        expected = [line(0, peak, "task: exit") for peak in (31, 21, 11)]
        self.assertEqual(printed, [*expected, line(0, 3, "stream: exit")])


class Lines(unittest.TestCase):
    def test_lines(self):
        @gpumem_trace.lines
        def forward(depth):
            kept = sim.alloc(10 * MIB)
            for _ in range(2):
                blip(30)
            if depth:
                forward(depth - 1)
            return kept

        first = forward.__wrapped__.__code__.co_firstlineno + 2
        printed = lines(lambda: self.assertEqual(forward(0).bytes, 10 * MIB))
        rows = [(row["line"] - first, row["calls"], row["used"] // MIB, row["peak"] // MIB) for row in forward.table.rows]
        self.assertEqual(rows, [(0, 1, 10, 10), (1, 3, 0, 10), (2, 2, 0, 40), (3, 1, 0, 10), (5, 1, 0, 10)])
        self.assertEqual(len(printed), 7)
        self.assertEqual(printed[1], "    used     peak  calls   line")
        self.assertTrue(printed[2].endswith("              kept = sim.alloc(10 * MIB)"), printed[2])
        self.assertTrue(forward.table.is_exact and "in MB:" in printed[0], printed[0])
        # A call inside of it has its own lines.
        lines(lambda: forward(1).free())
        self.assertEqual([row["peak"] // MIB for row in forward.table.rows], [10, 10, 40, 10, 50, 10])
        self.assertEqual(lines(lambda: gpumem_trace.lines(silent=True)(blip)(1)), [])

    def test_a_function_with_one_line(self):
        measured = gpumem_trace.lines(lambda: sim.alloc(3 * MIB), silent=True)
        block = measured()
        self.assertEqual([row["used"] for row in measured.table.rows], [block.bytes])

    def test_what_has_no_lines(self):
        async def task():
            pass

        with self.assertRaisesRegex(TypeError, "plain function"):
            gpu_mem_restore(task)

        for function in (task, len):
            with self.assertRaisesRegex(TypeError, "cannot be measured"):
                gpumem_trace.lines(function)


class Peaks(unittest.TestCase):
    def jax(self, *statistics, is_started=True):
        """Returns a JAX whose GPU has these statistics, one after the other."""
        read = iter([dict(zip(["bytes_in_use", "peak_bytes_in_use"], (value * MIB for value in of))) for of in statistics])
        gpu = mock.Mock(platform="gpu", local_hardware_id=0, memory_stats=lambda: next(read))
        bridge = mock.Mock()
        bridge.backends_are_initialized.side_effect = [is_started, True]
        modules = {"jax": mock.Mock(local_devices=lambda: [gpu]), "jax._src.xla_bridge": bridge}
        return mock.patch.dict(sys.modules, modules)

    def test_a_block(self):
        with gpumem_trace.peak() as p:
            kept = sim.alloc(10 * MIB)
            blip(30)
        self.assertEqual((p.used, p.peak, p.pool, str(p)), (kept.bytes, 40 * MIB, None, "used 10.0 MB, peak 40.0 MB"))
        with p:
            kept.free()
        self.assertEqual((p.used, p.peak), (-10 * MIB, 0))
        self.assertEqual(lines(lambda: gpumem_trace.peak(ctx="none").__exit__()), [])

    def test_a_peak_inside_of_the_pool_of_jax(self):
        for statistics, is_started, pool in (
            ([(100, 150), (110, 200)], True, (10 * MIB, 100 * MIB, 100 * MIB)),
            ([(100, 150), (90, 150)], True, (-10 * MIB, None, 50 * MIB)),
            ([(110, 200)], False, (110 * MIB, 200 * MIB, 200 * MIB)),
            ([(1, 1), ()], True, None),
        ):
            with self.jax(*statistics, is_started=is_started), gpumem_trace.peak() as p:
                pass
            self.assertEqual(p.pool, pool)

    def test_sentences(self):
        for statistics, text in (
            ([(0, 150), (10, 200)], "Its arrays in there: used 10.0 MB, peak 200.0 MB"),
            ([(100, 150), (110, 150)], "used 10.0 MB, peak at most 50.0 MB, because JAX keeps only the highest of the process"),
            ([(), ()], "what is inside of a pool of JAX is not known, because JAX gives no statistics of a GPU"),
        ):
            with self.jax(*statistics):
                with gpumem_trace.peak() as p:
                    pass
                self.assertIn(text, str(p))


class Tensors(unittest.TestCase):
    """`test_frameworks.py` lists PyTorch's own."""

    def test_without_pytorch(self):
        with self.assertRaisesRegex(Error, "has not imported PyTorch; call tensors after `import torch`"):
            gpumem_trace.tensors()

    def test_the_table(self):
        def row(name, kind, device, size, *shared):
            return {"name": name, "kind": kind, "device": device, "bytes": size, "shape": (2, 3), "dtype": "float32", "shared": list(shared)}

        rows = [row("x", "other", "cpu", 64 * MIB), row("w.grad", "gradient", "cuda:0", MIB), row("?", "other", "cuda:0", None)]
        rows[2]["shape"] = None
        rows.append(row("w", "parameter", "cuda:0", 2 * MIB, "a", "b", "c", "d"))
        table = gpumem_trace.Tensors(rows, {"cuda:0": 5 * MIB})
        expected = """\
        MB  device  kind             tensor
      2.00  cuda:0  parameter        w (2, 3) float32, shared with a, b, c and 1 more
      1.00  cuda:0  gradient         w.grad (2, 3) float32
         ?  cuda:0  other            ? float32
     64.00  in 1 more
total: 3.00 of 5.00 that PyTorch has in use on cuda:0 (parameter 2.00, gradient 1.00); 64.00 on cpu (other 64.00); \
without 1 whose size cannot be read"""
        self.assertEqual(table.text(3), expected)
        self.assertEqual(table.totals["cuda:0"], {"parameter": 2 * MIB, "gradient": MIB})
        self.assertTrue(str(gpumem_trace.Tensors([], {})).endswith("total: no tensors"))


class Recordings(unittest.TestCase):
    """These need the command `gpumem`."""

    def test_a_part_of_the_program(self):
        kept = [sim.alloc(100 * MIB)]

        def load():
            kept.append(sim.alloc(20 * MIB))

        older = GPUMemTrace(silent=True, ctx="older")
        with GPUMemTrace(silent=True, ctx="around") as trace:
            with gpumem_trace.record() as recording:
                load()
                older.reset()
                older.stop()
                blip(70)
                with self.assertRaisesRegex(Error, "cannot record to .*: this process is recorded already, to "):
                    gpumem_trace.record().start()
            load()
        # The recording has nothing that is older or younger. The trace goes on.
        self.assertEqual((trace.used, trace.peak, trace.is_exact), (40 * MIB, 90 * MIB, True))
        data = recording.data()
        self.assertEqual(data["devices"][0]["peak_bytes"], 90 * MIB)
        self.assertEqual(data["not_freed"]["bytes"], 20 * MIB)
        self.assertEqual((data["missing"]["unreadable_items"], data["missing"]["contradictory"]), (0, False))
        self.assertIn("the peak was 90", recording.report())
        self.assertTrue(recording.svg().startswith("<svg"))
        with self.assertRaisesRegex(Error, "`gpumem report --nothing .*unexpected argument '--nothing'"):
            recording.report("--nothing")
        path = recording.path
        if not os.fork():
            # The child does not remove the file.
            del recording
            os._exit(gc.collect() * 0)
        os.wait()
        self.assertTrue(os.path.exists(path))
        del recording
        gc.collect()
        self.assertFalse(os.path.exists(path))

    def interrupts(self):
        """Makes SIGALRM raise KeyboardInterrupt. Returns a list that gets an item each time."""

        def interrupted(signal_number, frame):
            fired.append(True)
            raise KeyboardInterrupt

        fired = []
        self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, interrupted))
        return fired

    def test_interrupts_and_lost_recordings(self):
        # Not all instructions of a loop are in the `try` around it.
        def record_until_interrupted():
            with gpumem_trace.record():
                blip(1)
            # Python drops an exception in a finalizer.
            while not fired:
                time.sleep(0.001)

        fired = self.interrupts()
        for delay in range(1, 40):
            fired.clear()
            try:
                signal.setitimer(signal.ITIMER_REAL, delay / 2000)
                record_until_interrupted()
            except KeyboardInterrupt:
                pass
            gc.collect()
        gpumem_trace.record().start()
        with gpumem_trace.record() as recording:
            blip(3)
            with self.assertRaisesRegex(Error, "the recording has not ended; leave its `with` block first"):
                recording.report()
        self.assertEqual(recording.data()["devices"][0]["peak_bytes"], 3 * MIB)
        with self.assertRaisesRegex(Error, "nothing was recorded yet"):
            gpumem_trace.record().svg()
        with self.assertRaisesRegex(ValueError, "is not a path: it contains a null character"):
            gpumem_trace.record("a\0b")

    def test_steps_at_the_recursion_limit_end(self):
        @gpu_mem_trace
        def generator():
            yield 1

        @gpu_mem_trace
        async def coroutine():
            pass

        @gpu_mem_trace
        async def async_generator():
            yield 1

        async def each():
            async for _ in async_generator():
                pass

        def run(awaited):
            try:
                awaited.send(None)
            except StopIteration:
                pass

        def down(n, code):
            return down(n - 1, code) if n else code()

        limit = sys.getrecursionlimit()
        warned = warnings.catch_warnings()
        warned.__enter__()
        self.addCleanup(warned.__exit__, None, None, None)
        # A step that cannot be called is not awaited.
        warnings.simplefilter("ignore")
        for code in (lambda: list(generator()), lambda: run(coroutine()), lambda: run(each())):
            outcomes = set()
            for depth in range(100, 200):
                sys.setrecursionlimit(200)
                try:
                    with contextlib.redirect_stdout(io.StringIO()):
                        down(depth, code)
                        outcomes.add("ended")
                except RecursionError:
                    outcomes.add("too deep")
                finally:
                    sys.setrecursionlimit(limit)
            self.assertEqual(outcomes, {"ended", "too deep"})

    def test_a_trace_keeps_nothing_alive(self):
        with contextlib.redirect_stdout(io.StringIO()) as lines:
            trace = GPUMemTrace(ctx=["a\0b"])
            block = sim.alloc(5 * MIB)
            trace.report(block)
            del block
            trace.report(1.0)
            trace.report(True)
            trace.__init__(ctx="again")
            del trace
            GPUMemTrace().report()
        self.assertRegex(lines.getvalue(), r"5      0 \(\['a.*b'\]: .*\n.* 0      5 \(.*: 1.0\)\n.*: True\)\n△Used Peaked MB:      0      0\n$")

    @unittest.skipIf(sys.version_info < (3, 11), "an older Python calls the handler of a signal at any instruction")
    def test_an_interrupted_start_leaves_no_trace(self):
        @gpu_mem_trace
        def nothing():
            pass

        def until_interrupted():
            # Python drops an exception in a finalizer.
            while not fired:
                nothing()
                self.assertLess(time.monotonic(), end)

        fired, end = self.interrupts(), time.monotonic() + 60
        for at in range(200):
            fired.clear()
            with contextlib.redirect_stdout(io.StringIO()):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0003 + at * 1e-6)
                    until_interrupted()
                except KeyboardInterrupt:
                    pass
        with GPUMemTrace(silent=True, ctx="after") as trace:
            blip(2)
            block = sim.alloc(MIB)
            # A trace that is open would be around this one.
            self.assertEqual([row["scopes"] for row in trace.live()], [["after"]])
        self.assertEqual((trace.used, trace.peak), (MIB, 2 * MIB))
        block.free()

    def test_threads_take_turns(self):
        done = []

        def work():
            for _ in range(20):
                try:
                    with gpumem_trace.record() as recording:
                        blip(1)
                    done.append(recording.is_complete)
                except Error as why:
                    self.assertIn("this process is recorded already, to ", str(why))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertTrue(done and all(done))
        with gpumem_trace.record():
            pass

    def test_a_file(self):
        with self.assertRaisesRegex(Error, "cannot record to /nothing/a.capture: No such file"):
            gpumem_trace.record("/nothing/a.capture").start()
        with tempfile.TemporaryDirectory() as folder:
            recording = gpumem_trace.record(os.path.join(folder, "ä.capture"))
            # The second one replaces the first.
            for mib in (5, 7):
                with recording:
                    blip(mib)
            self.assertEqual(recording.data()["devices"][0]["peak_bytes"], 7 * MIB)
            self.assertEqual(gpumem_trace.record("-x.capture").path, os.path.join(os.getcwd(), "-x.capture"))
            with mock.patch.dict(os.environ, PATH=folder), mock.patch("sysconfig.get_path", lambda _: folder):
                with self.assertRaisesRegex(Error, "the command gpumem is neither in .* nor in a folder of PATH; install gpumem-trace"):
                    recording.report()

    def test_what_is_live(self):
        kept = []

        def load(mib):
            kept.append(sim.alloc(mib * MIB))

        thread = threading.Thread(target=load, args=(3,))
        with GPUMemTrace(silent=True, ctx="own") as own, GPUMemTrace(silent=True, ctx="all", all_threads=True) as every:
            load(10)
            load(20)
            blip(30)
            thread.start()
            thread.join()
        self.assertEqual([row["bytes"] // MIB for row in own.live()], [20, 10])
        self.assertEqual([row["bytes"] // MIB for row in every.live()], [20, 10, 3])
        row = own.live()[0]
        self.assertEqual((row["device"], row["scopes"]), (0, ["own", "all"]))
        # Before 3.11, the library is that of ctypes.
        if sys.version_info >= (3, 11):
            self.assertIsNone(row["library"])
            here = load.__code__.co_firstlineno + 1
            self.assertTrue(row["line"].endswith(f"test_traces.py:{here}"), row)
            self.assertTrue(any(frame.endswith(f"test_traces.py:{here}") for frame in row["frames"]), row)
        kept.pop().free()
        self.assertEqual(len(every.live()), 2)


class Epochs(unittest.TestCase):
    """`test_frameworks.py` runs the callbacks."""

    def test_a_loop(self):
        logged, kept = [], []
        epochs = callbacks.Epochs(lambda values, step: logged.append((step, values)))
        for epoch in range(2):
            kept.append(sim.alloc(10 * MIB))
            blip(40)
            epochs.end(epoch, step=epoch * 5)
        epochs.stop()
        self.assertEqual(logged[1], (5, {"gpumem/used_MB": 20, "gpumem/peak_MB": 60}))
        self.assertEqual(epochs.rows[0], {"epoch": 0, "used": 10 * MIB, "peak": 50 * MIB, "is_exact": True})
        # Traces after it are not inside of it.
        self.assertEqual(lines(lambda: GPUMemTrace(ctx="after").report()), [line(0, 0, "after")])

    def test_layers(self):
        def data(_):
            peak = {
                "allocated_bytes": 30 * MIB,
                "by_class": [{"class": "weights", "bytes": 20 * MIB}, {"class": "activations", "bytes": 10 * MIB}],
                "by_module": [{"module": "Net.layers.0 … 11", "bytes": 24 * MIB}, {"module": None, "bytes": 6 * MIB}],
            }
            other = {"allocated_bytes": 1, "by_class": [], "by_module": []}
            devices = [{"peak": None}, {"peak": other}, {"peak": peak}]
            return {"torch": {"missing": None, "missing_modules": "it is older than 2.10" if logged else None, "devices": devices}}

        logged, err = [], io.StringIO()
        with mock.patch.object(gpumem_trace.record, "data", data), contextlib.redirect_stderr(err):
            epochs = callbacks.Epochs(lambda values, step: logged.append(values), layers=True)
            epochs.end(0)
            epochs.end(1)
            epochs.stop()
        self.assertEqual(
            logged[0],
            {
                "gpumem/used_MB": 0, "gpumem/peak_MB": 0, "gpumem/class/weights_MB": 20, "gpumem/class/activations_MB": 10,
                "gpumem/layer/Net.layers.0 … 11_MB": 24, "gpumem/layer/outside of all layers_MB": 6,
            },
        )
        self.assertEqual(epochs.rows[0]["layers"], {"Net.layers.0 … 11": 24 * MIB, "outside of all layers": 6 * MIB})
        # The training goes on without them.
        self.assertEqual(logged[1], {"gpumem/used_MB": 0, "gpumem/peak_MB": 0})
        self.assertEqual(err.getvalue(), "gpumem: the layers of the epochs are not known: it is older than 2.10\n")

    def test_a_framework_that_is_not_there(self):
        with mock.patch.dict(sys.modules, dict.fromkeys(["lightning.pytorch", "pytorch_lightning", "transformers"])):
            with self.assertRaisesRegex(ImportError, "needs PyTorch Lightning; install it with `pip install lightning`"):
                callbacks.LightningCallback
            with self.assertRaisesRegex(ImportError, "install it with `pip install transformers`"):
                from gpumem_trace.callbacks import TransformersCallback  # noqa: F401
        self.assertFalse(hasattr(callbacks, "Callback"))


class Threads(unittest.TestCase):
    def test_each_thread_has_its_own(self):
        found = {}

        def work(mib):
            with GPUMemTrace(silent=True) as trace:
                for _ in range(200):
                    blip(mib)
                    with GPUMemTrace(silent=True) as inner:
                        blip(mib + 1)
                    assert inner.data() == (0, mib + 1), inner
            found[mib] = trace.data()

        threads = [threading.Thread(target=work, args=(mib,)) for mib in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(found, {mib: (0, mib + 1) for mib in range(1, 9)})


    def test_threads_share_functions_traces_and_blocks(self):
        @gpumem_trace.lines(silent=True)
        def line():
            return shared.used

        shared, blocks = GPUMemTrace(silent=True), [sim.alloc(4096) for _ in range(500)]
        start, used = threading.Barrier(4), set()

        def work():
            start.wait()
            for block in blocks:
                block.free()
            # Traces also count threads that are in no trace, such as the one that allocated the blocks.
            start.wait()
            for _ in range(500):
                line()
                shared.__init__(silent=True)
                with GPUMemTrace(silent=True) as own:
                    kept = sim.alloc(MIB)
                    shared.reset()
                    used.add(own.used)
                    kept.free()
                str(line.table)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(used, {MIB})
        self.assertEqual([row["calls"] for row in line.table.rows], [2000])


class Ends(unittest.TestCase):
    def test_what_cannot_be_traced(self):
        for wrong in (int, "load", property(lambda self: 1)):
            with self.assertRaisesRegex(TypeError, "cannot be traced"):
                gpu_mem_trace(wrong)
        with self.assertRaisesRegex(TypeError, "ctx='train'"):
            GPUMemTrace("train")
        for device in (-1, 1 << 32, "cuda:0"):
            with self.assertRaisesRegex(Error, "is not the CUDA number"):
                GPUMemTrace(device=device)
        for thing in (GPUMemTrace(silent=True), sim.alloc(MIB)):
            with self.assertRaisesRegex(TypeError, "cannot be copied"):
                copy.copy(thing)

    def test_a_subclass_that_starts_nothing(self):
        def nothing(trace):
            trace.name = "mine"

        for parent in (GPUMemTrace, gpumem_trace.peak):
            kind = type("Trace", (parent,), {"__init__": nothing})
            for use in (kind.__enter__, kind.start, kind.report, kind.data, kind.live, str, lambda trace: trace.used):
                with self.assertRaisesRegex(Error, r"not started: `Trace.__init__` has to call `super\(\).__init__"):
                    use(kind())
            self.assertIs(kind().ctx, None)

    def test_a_generator_holds_nothing(self):
        @gpu_mem_trace
        def batches(first):
            del first
            for _ in range(2):
                yield sim.alloc(10 * MIB)

        @gpu_mem_trace
        async def stream(first):
            del first
            for _ in range(2):
                yield sim.alloc(10 * MIB)

        async def main():
            async for block in stream(sim.alloc(MIB)):
                del block
                self.assertEqual(trace.used, 0)

        def code():
            for block in batches(sim.alloc(MIB)):
                del block
                self.assertEqual(trace.used, 0)
            asyncio.run(main())

        trace = GPUMemTrace(silent=True)
        self.assertEqual(len(lines(code)), 2)

    def test_a_trace_that_python_has_finalized(self):
        code = """
import gc
from gpumem_trace import *
class Model:
    def __del__(self):
        self.trace.report()
        assert not self.trace.is_measured or self.trace.data() == (0, 0)
model = Model()
model.trace = GPUMemTrace()
model.trace.model = model
del model
gc.collect()
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr.count("Error")), (0, 0), done.stderr)

    def test_output_that_cannot_be_written(self):
        code = "from gpumem_trace import *\nwith GPUMemTrace(): raise ValueError('mine')"
        for env, shown in (({"PYTHONIOENCODING": "ascii"}, "?Used Peaked MB:      0      0 (exit)\n"), ({"GPUMEM_REPORT": "off"}, "")):
            done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True)
            self.assertEqual(done.stdout, shown)
            self.assertIn("ValueError: mine", done.stderr)
            self.assertNotIn("During handling", done.stderr)

    def test_a_traceback_that_holds_memory(self):
        held = []

        class Weak:
            def __init__(self):
                self.block = sim.alloc(64 * MIB)

        @gpu_mem_restore
        def step():
            weights = Weak()
            held.append(id(weights))
            raise MemoryError("CUDA out of memory")

        trace = GPUMemTrace()
        with self.assertRaises(MemoryError) as raised:
            step()
        gc.collect()
        self.assertEqual((trace.data(), str(raised.exception)), ((0, 64), "CUDA out of memory"))

    def test_the_version(self):
        with mock.patch("importlib.metadata.version", {"gpumem-trace": "1.2"}.get):
            self.assertEqual(gpumem_trace.__version__, "1.2")
        with mock.patch("importlib.metadata.version", side_effect=importlib.metadata.PackageNotFoundError):
            with self.assertRaisesRegex(AttributeError, "is not installed"):
                gpumem_trace.__version__
        self.assertFalse(hasattr(gpumem_trace, "versions"))

    def test_errors(self):
        with self.assertRaisesRegex(Error, "device 99"):
            GPUMemTrace(device=99)
        with self.assertRaisesRegex(Error, "no simulated GPU 3"):
            sim.alloc(1, device=3)
        with self.assertRaises(Error):
            sim.alloc(1 << 50)
        self.assertEqual(lines(lambda: GPUMemTrace(ctx="two\nlines").report()), [line(0, 0, "two\\nlines")])
        self.assertEqual(lines(lambda: GPUMemTrace(ctx="half \ud800").report("half \ud800")), [line(0, 0, "half ?: half ?")])

    def test_a_cache_is_mentioned_once(self):
        code = "import sys; sys.modules['cupy'] = sys; from gpumem_trace import *; [GPUMemTrace().report() for _ in range(2)]"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual(done.stdout.count("Used Peaked"), 2)
        self.assertEqual(done.stderr.count("gpumem: CuPy keeps freed memory"), 1, done.stderr)

    def test_a_pytorch_that_fails(self):
        code = """
import sys, types
sys.modules["torch"] = torch = types.ModuleType("torch")
from gpumem_trace import GPUMemTrace, sim
class Cuda:
    def is_initialized(self):
        raise RuntimeError("it is broken")
with GPUMemTrace(ctx="first", silent=True):
    torch.cuda = Cuda()
kept = []
for _ in range(2):
    with GPUMemTrace(ctx="second") as trace:
        kept.append(sim.alloc(5 << 20))
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual(done.stdout, "△Used Peaked MB:      5      0 (second: exit)\n" * 2, done.stderr)
        self.assertEqual(done.stderr.count("PyTorch's tensors are not seen, because it is broken; lines count"), 1, done.stderr)

    def test_without_a_gpu(self):
        code = """
from gpumem_trace import *
with GPUMemTrace(ctx="off") as trace:
    pass
assert not trace.is_measured and not trace.is_exact and trace.data() == (0, 0)
from gpumem_trace import peak
with peak() as p:
    pass
assert str(p) == "nothing was measured"
from gpumem_trace.callbacks import Epochs
epochs = Epochs(print)
epochs.end(0)
assert epochs.rows == []
with GPUMemTrace(device=1) as trace:
    pass
assert not trace.is_measured
assert gpu_mem_get() == gpu_mem_get(1) == (0, 0, 0) and gpu_mem_get_all() == [] and gpu_with_max_free_mem() == (None, 0)
preload_pytorch()
"""
        env = {name: value for name, value in os.environ.items() if name != "GPUMEM_SIM"}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, ""), done.stderr)
        self.assertEqual(done.stderr.count("gpumem: "), 1, done.stderr)

    def test_an_async_generator_that_the_loop_closes(self):
        done, errors = [], []

        @gpu_mem_trace
        async def rows():
            try:
                yield sim.alloc(MIB)
                yield None
            finally:
                await asyncio.sleep(0)
                done.append(True)

        async def main():
            asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
            main.rows = rows()
            await main.rows.__anext__()

        asyncio.run(main())
        self.assertEqual((done, errors), ([True], []))

    def test_a_recursion_that_is_too_deep(self):
        @gpu_mem_trace
        def deeper(n):
            return deeper(n + 1)

        self.assertRaises(RecursionError, deeper, 0)

    def test_a_fork(self):
        trace = GPUMemTrace(ctx="parent")
        if not hasattr(os, "fork"):
            return
        child = os.fork()
        if child == 0:
            with GPUMemTrace(ctx="child"):
                pass
            trace.report()
            os._exit(8 if trace.is_measured or trace.is_exact else 7)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 7)
        blip(3)
        self.assertEqual(trace.data(), (0, 3))


if __name__ == "__main__":
    unittest.main()

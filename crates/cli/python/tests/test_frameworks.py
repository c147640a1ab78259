"""What needs a framework, on a simulated GPU. `.ci/wheel` runs it without them. To run it: `pip install torch lightning transformers accelerate`."""

import contextlib
import csv
import gc
import importlib.util
import io
import pickle
import sys
import tempfile
import unittest
import warnings
import weakref
from unittest import mock

import gpumem_trace
from gpumem_trace import callbacks, sim

MIB = 1 << 20
kept = []


def needs(*modules):
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return unittest.skipIf(missing, f"not installed: {', '.join(missing)}")


def setUpModule():
    missing = [module for module in ("torch", "lightning", "pytorch_lightning", "transformers", "accelerate") if importlib.util.find_spec(module) is None]
    if missing:
        print(f"skipped: the tests that need {', '.join(missing)}, which are not installed", file=sys.stderr)


@needs("torch")
class Tensors(unittest.TestCase):
    def setUp(self):
        global torch
        import torch

        gc.collect()

    def model(self):
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = torch.nn.Embedding(100, 64)
                self.head = torch.nn.Linear(64, 100, bias=False)
                self.head.weight = self.embed.weight
                self.norm = torch.nn.BatchNorm1d(64)
                self.cache = [torch.zeros(10, 10)]
                self.same = [self.head]

            def forward(self, x):
                return self.head(self.norm(self.embed(x)))

        model = Model()
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.zeros(2, dtype=torch.int64)).sum().backward()
        optimizer.step()
        return model, optimizer

    def rows(self, *things):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return {row["name"]: row for row in gpumem_trace.tensors(*things).rows}

    def test_a_model_and_its_optimizer(self):
        model, optimizer = self.model()
        rows = self.rows(model, optimizer)
        weight = {"name": "embed.weight", "kind": "parameter", "device": "cpu", "bytes": 25600, "shape": (100, 64), "dtype": "float32"}
        self.assertEqual(rows["embed.weight"], {**weight, "shared": ["head.weight"]})
        self.assertEqual((rows["embed.weight.grad"]["kind"], rows["embed.weight.grad"]["shared"]), ("gradient", ["head.weight.grad"]))
        kinds = {name: rows[name]["kind"] for name in ("norm.running_mean", "embed.weight.exp_avg", "norm.bias.exp_avg_sq", "cache.0")}
        self.assertEqual(list(kinds.values()), ["buffer", "optimizer state", "optimizer state", "other"])
        # All of it is found without being told, and has other names.
        others = self.rows()
        for name in kinds:
            self.assertEqual(others[f"Model.{name}"]["bytes"], rows[name]["bytes"])
        self.assertEqual(self.rows({"adam": optimizer})["Model.embed.weight.exp_avg"]["kind"], "optimizer state")

    def test_what_shares_storage_is_counted_once(self):
        first = torch.zeros(1000, 1000)
        views = [first[:10], first.T, first.detach()]
        rows = gpumem_trace.tensors({"views": views, "first": first}).rows
        self.assertEqual([row["bytes"] for row in rows if row["bytes"] >= 4_000_000], [4_000_000])
        self.assertEqual((rows[0]["name"], rows[0]["shared"]), ("views.0", ["views.1", "views.2", "first"]))

    def test_unusual_tensors(self):
        class Own(torch.Tensor):
            @classmethod
            def __torch_function__(cls, *args, **kwargs):
                raise ValueError("its own")

        emptied = torch.zeros(1000)
        emptied.untyped_storage().resize_(0)
        thing = {
            "meta": torch.empty(1000, device="meta"),
            "emptied": emptied,
            "lazy": torch.nn.LazyLinear(3),
            "sparse": torch.eye(300).to_sparse(),
            "own": torch.zeros(1000).as_subclass(Own),
            "dead": weakref.proxy(Own()),
        }
        result = (torch.zeros(1000, requires_grad=True) * 2).sum()
        rows = self.rows(thing)
        self.assertEqual([name for name in rows if name in thing], ["sparse", "own"])
        self.assertEqual(sum(row["bytes"] for row in gpumem_trace.tensors(thing).rows if row["shape"] == (300, 300)), 6000)
        del result

        def inside(x):
            found.extend(gpumem_trace.tensors({"batched": x}).rows)
            return x.sum()

        found = []
        torch.vmap(inside)(torch.zeros(4, 1000))
        self.assertEqual([row["bytes"] for row in found if row["name"] == "batched"], [None])

    def test_nothing_is_kept_alive(self):
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)
        model = torch.nn.Linear(3, 3)
        model(torch.zeros(3)).sum().backward()
        alive = [weakref.ref(thing) for thing in (model, model.weight, model.weight.grad)]
        table = gpumem_trace.tensors(model)
        del model
        self.assertEqual([thing() for thing in alive], [None] * 3)
        self.assertIn("weight.grad (3, 3) float32", str(table.text(1000)))

    @needs("pandas")
    def test_a_frame(self):
        weight = torch.zeros(10)
        frame = gpumem_trace.tensors([weight]).frame()
        self.assertEqual(list(frame.columns), ["name", "kind", "device", "bytes", "shape", "dtype", "shared"])
        self.assertEqual(int(frame[frame.name == "0"].bytes.iloc[0]), 40)


def work():
    """What each epoch does."""
    kept.append(sim.alloc(10 * MIB))
    sim.alloc(40 * MIB).free()


ROWS = [{"epoch": epoch, "used": (epoch + 1) * 10 * MIB, "peak": (epoch + 5) * 10 * MIB, "is_exact": True} for epoch in range(3)]


class Callbacks(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.addCleanup(kept.clear)

    def lightning(self, name):
        trainers = importlib.import_module(name)
        loggers = importlib.import_module("lightning.pytorch.loggers" if name == "lightning" else "pytorch_lightning.loggers")
        import torch

        class Module(trainers.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)

            def training_step(self, batch, at):
                if at == 0:
                    work()
                return self.layer(batch).sum()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        # Each has its own base class.
        callbacks.__dict__.pop("LightningCallback", None)
        with mock.patch.dict(sys.modules, {"pytorch_lightning" if name == "lightning" else "lightning.pytorch": None}):
            # Lightning sends it to other processes like this.
            callback = pickle.loads(pickle.dumps(callbacks.LightningCallback()))
        logger = loggers.CSVLogger(self.folder.name)
        options = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "accelerator": "cpu"}
        trainer = trainers.Trainer(max_epochs=3, callbacks=[callback], logger=logger, **options)
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(8, 4), batch_size=2))
        self.assertIsInstance(callback, trainers.Callback)
        self.assertEqual(callback.rows, ROWS)
        with open(f"{logger.log_dir}/metrics.csv") as file:
            logged = [row for row in csv.DictReader(file) if row["gpumem/used_MB"]]
        self.assertEqual([float(row["gpumem/peak_MB"]) for row in logged], [50, 60, 70])
        self.assertEqual([(row["epoch"], row["step"]) for row in logged], [("0", "3"), ("1", "7"), ("2", "11")])

    @needs("torch", "lightning")
    def test_lightning(self):
        self.lightning("lightning")

    @needs("torch", "pytorch_lightning")
    def test_pytorch_lightning(self):
        self.lightning("pytorch_lightning")

    @needs("torch", "transformers", "accelerate")
    def test_transformers(self):
        import torch
        import transformers

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)

            def forward(self, x):
                return {"loss": self.layer(x).sum()}

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, at):
                if at == 0:
                    work()
                return {"x": torch.zeros(4)}

        options = {"per_device_train_batch_size": 2, "report_to": [], "save_strategy": "no", "logging_strategy": "epoch"}
        options["use_cpu" if hasattr(transformers.TrainingArguments, "use_cpu") else "no_cuda"] = True
        arguments = transformers.TrainingArguments(self.folder.name, num_train_epochs=3, **options)
        trainer = transformers.Trainer(Model(), arguments, train_dataset=Data())
        callback = callbacks.TransformersCallback(trainer)
        trainer.add_callback(callback)
        trainer.remove_callback(transformers.ProgressCallback)
        trainer.train()
        self.assertEqual(callback.rows, ROWS)
        logged = [row for row in trainer.state.log_history if "gpumem/used_MB" in row]
        self.assertEqual(logged[0], {"gpumem/used_MB": 10, "gpumem/peak_MB": 50, "epoch": 1, "step": 4})
        self.assertEqual(sum("loss" in row for row in trainer.state.log_history), 3)
        # A training may end inside of an epoch.
        trainer.args.max_steps = 5
        trainer.train()
        self.assertEqual([row["epoch"] for row in callback.rows], [0, 1])
        # One was not there when this training started, and the other has no GPU.
        trainer.remove_callback(callback)
        late = callbacks.TransformersCallback(trainer)
        late.on_train_begin = mock.Mock()
        trainer.add_callback(late)
        trainer.add_callback(callbacks.TransformersCallback(trainer, device=99))
        with contextlib.redirect_stderr(io.StringIO()) as err:
            trainer.train()
        self.assertRegex(err.getvalue(), "^gpumem: the epochs are not measured: .*device 99.*\n$")

    @needs("torch", "accelerate")
    def test_accelerate(self):
        import accelerate

        class Tracker(accelerate.tracking.GeneralTracker):
            name, requires_logging_directory, tracker = "list", False, None

            def store_init_configuration(self, values):
                pass

            def log(self, values, step=None, **kwargs):
                logged.append((step, values))

        logged = []
        accelerator = accelerate.Accelerator(cpu=True, log_with=Tracker())
        accelerator.init_trackers("test")
        epochs = callbacks.Epochs(accelerator.log)
        for epoch in range(3):
            work()
            epochs.end(epoch)
        epochs.stop()
        self.assertEqual(epochs.rows, ROWS)
        self.assertEqual(logged[2], (2, {"gpumem/used_MB": 30, "gpumem/peak_MB": 70}))


if __name__ == "__main__":
    unittest.main()

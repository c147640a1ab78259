"""What needs a framework, on a simulated GPU. `.ci/wheel` runs it without them. To run it: `pip install torch lightning transformers accelerate`."""

import gc
import importlib.util
import unittest
import warnings
import weakref

import gpumem_trace

MIB = 1 << 20


def needs(*modules):
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return unittest.skipIf(missing, f"not installed: {', '.join(missing)}")


@needs("torch")
class Tensors(unittest.TestCase):
    def setUp(self):
        global torch
        import torch

        warnings.simplefilter("error")
        self.addCleanup(warnings.resetwarnings)

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
        for name, row in rows.items():
            if name != "Tensor":
                self.assertEqual(others[f"Model.{name}"]["bytes"], row["bytes"])
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
        self.assertEqual(int(frame[frame.name == "0"].bytes.iloc[0]), weight.nbytes)


if __name__ == "__main__":
    unittest.main()

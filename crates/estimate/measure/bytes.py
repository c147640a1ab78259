#!/usr/bin/env python3
"""Prints the bytes of PyTorch's tensors in small steps on a CPU: the values that `adapters.rs`, `decode.rs`, `optimizers.rs` and
`parallel.rs` of `tests/counted` expect. `measure.py bytes.jsonl --cpu` counts steps of a small Llama.

    python3 bytes.py
    python3 -m torch.distributed.run --standalone --nproc-per-node=2 bytes.py     for two ranks

It needs torch, no GPU and no network. With `fully_shard`, gloo copies what it adds up; the values of gradients that are added up or that
have a smaller type have these copies, which NCCL does not make.
"""

import os
import time

import torch

import techniques
from counting import Bytes
from measure import run_phases

cross_entropy = torch.nn.functional.cross_entropy


def alone():
    x, y = torch.randn(8, 100), torch.randint(0, 50, (8,))
    for name, step in [("two passes", {"micro_batches": 2}), ("adapter", {"adapters": {"rank": 4, "targets": ["2"]}})]:
        layers = [torch.nn.Linear(100, 50), torch.nn.ReLU(), torch.nn.Linear(50, 50)]
        model = torch.nn.ModuleDict({"inner": torch.nn.Sequential(*layers)})
        if "adapters" in step:
            techniques.add_adapters(model, step["adapters"])
        optimizer = techniques.make_optimizer({"optimizer": "sgd"}, model)
        counter = Bytes([*model.parameters(), x, y])
        base = counter.now
        found = run_phases(step, counter, lambda: cross_entropy(model["inner"](x), y), optimizer, [], count=1)
        print(name, [(phase, peak - base) for phase, peak in found])
    for shapes in [((50, 100), (50,), (50, 50), (50,)), ((64, 3, 3, 3), (64,), (10, 1024), (10,))]:
        parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.Adafactor(parameters)
        counter = Bytes([tensor for parameter in parameters for tensor in (parameter, parameter.grad)])
        base = counter.now
        counter.highest(optimizer.step)
        print(f"adafactor {shapes}: update", counter.highest(optimizer.step)[0] - base - 4 * len(shapes))


class Model(torch.nn.Module):
    """Two blocks and a head, which returns the loss."""

    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(64, size, bias=False) for size in (64, 64, 10)]
        self.blocks, self.head = torch.nn.ModuleList(map(torch.nn.Sequential, layers[:2])), layers[2]

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x), y)


def slowly(run):
    """Waits around a function, because gloo's threads refer to tensors for a moment."""

    def run_and_wait(*args, **kwargs):
        time.sleep(0.2)
        result = run(*args, **kwargs)
        time.sleep(0.2)
        return result

    return run_and_wait


def count_shards(counter):
    """Lets `fully_shard` tell a counter when it fills and frees the memory of parameters."""
    import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as fsdp_group

    def resize(tensor, size):
        storage = tensor.untyped_storage()
        if storage.size() != size:
            storage.resize_(size)
        counter.set(storage, size)

    fsdp_param.alloc_storage = lambda tensor: resize(tensor, tensor.numel() * tensor.itemsize)
    fsdp_param.free_storage = lambda tensor: resize(tensor, 0)
    if fsdp_group.foreach_reduce.__name__ == "foreach_reduce":
        fsdp_group.foreach_reduce = slowly(fsdp_group.foreach_reduce)


def shared():
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    choices = [("zero3", None, 1), ("zero2", None, 1), ("zero3", "bf16", 1), ("zero3", None, 2), ("replicas", None, 1), ("zero1", None, 1)]
    # The bytes of zero1 include the counters of two parameters, four bytes each.
    for kind, gathered, passes in choices:
        step = {"optimizer": "sgd", "micro_batches": passes, "data_parallel": {"kind": kind, "gathered": gathered}}
        has_shards = kind in ("zero2", "zero3")
        model = Model()
        x, y = torch.randn(4, 64), torch.randint(0, 10, (4,))
        if has_shards:
            model = techniques.distribute(model, step, blocks=model.blocks, mesh=mesh)
        counter = Bytes([*(getattr(p, "_local_tensor", p.data) for p in model.parameters()), x, y])
        if has_shards:
            count_shards(counter)
            run = model
        else:
            with counter:
                run = techniques.distribute(model, step)
        with counter:
            optimizer = techniques.make_optimizer(step, model)
        counter.highest = slowly(counter.highest)
        found = run_phases(step, counter, lambda: run(x, y), optimizer, [], count=1 if has_shards else 2)
        if torch.distributed.get_rank() == 0:
            print(kind, gathered, passes, found)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        shared()
    else:
        alone()

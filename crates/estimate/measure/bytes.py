#!/usr/bin/env python3
"""Counts the bytes of PyTorch's tensors in small steps, on a CPU. It prints the figures that `adapters.rs`,
`decode.rs`, `optimizers.rs` and `parallel.rs` of `tests/counted` expect.

    python3 bytes.py
    python3 bytes.py models > bytes.jsonl         steps of a small Llama, which needs transformers: `tests/measured.rs` compares them
    python3 -m torch.distributed.run --standalone --nproc-per-node=2 bytes.py     for two ranks

It needs torch, no GPU and no network. Each storage counts from the operation that makes it until it is freed. The counters of steps of
`torch.optim`, four bytes for each parameter, are on the CPU in real steps as well and are not counted. With `fully_shard`, gloo copies
what it adds up; the figures of gradients that are added up or that have a smaller type have these copies, which NCCL does not make.
"""

import gc
import json
import os
import sys
import time
import weakref
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent))
import steps  # noqa: E402


class Bytes(TorchDispatchMode):
    def __init__(self, *known):
        super().__init__()
        self.live, self.now, self.peak = {}, 0, 0
        for tensor in known:
            self.add(tensor)

    def set(self, storage, size):
        key = storage._cdata
        if key not in self.live:
            weakref.finalize(storage, self.set_key, key, None)
        self.set_key(key, size)

    def set_key(self, key, size):
        self.now -= self.live.pop(key, 0)
        if size is not None:
            self.live[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)

    def add(self, tensor):
        if isinstance(tensor, torch.Tensor) and type(tensor).__name__ != "DTensor":
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live:
                self.set(storage, storage.nbytes())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # The counters of steps.
            if not (isinstance(tensor, torch.Tensor) and tensor.dim() == 0 and function is torch.ops.aten._to_copy.default):
                self.add(tensor)
        return result

    def highest(self, run):
        """Returns the highest value while a function runs, and its result."""
        gc.collect()
        self.peak = self.now
        result = run()
        return self.peak, result


def phases(forward, parameters, inputs, optimizer, passes=1, count=2):
    """The highest sums of the phases of each step."""
    optimizer = optimizer([p for p in parameters if p.requires_grad])
    bytes_ = Bytes(*(p.data for p in parameters), *inputs)
    base, found = bytes_.now, []
    with bytes_:
        for _ in range(count):
            optimizer.zero_grad()
            for _ in range(passes):
                peak, loss = bytes_.highest(lambda: forward() / passes if passes > 1 else forward())
                found.append(peak - base)
                found.append(bytes_.highest(loss.backward)[0] - base)
            found.append(bytes_.highest(optimizer.step)[0] - base)
            del loss
    return found


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def alone():
    cross_entropy = torch.nn.functional.cross_entropy
    x, y = torch.randn(8, 100), torch.randint(0, 50, (8,))

    def small():
        return torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.ReLU(), torch.nn.Linear(50, 50))

    model = small()
    found = phases(lambda: cross_entropy(model(x), y), list(model.parameters()), [x, y], sgd, passes=2, count=1)
    print("two passes: forward, backward, forward, backward, update", found)
    model = torch.nn.ModuleDict({"inner": small()})
    steps.add_adapters(model, {"rank": 4, "targets": ["2"]})
    found = phases(lambda: cross_entropy(model["inner"](x), y), list(model.parameters()), [x, y], sgd, count=1)
    print("adapter: forward and backward", found[:2])
    for shapes in [((50, 100), (50,), (50, 50), (50,)), ((64, 3, 3, 3), (64,), (10, 1024), (10,))]:
        parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.Adafactor(parameters)
        bytes_ = Bytes(*(t for p in parameters for t in (p.data, p.grad)))
        base = bytes_.now
        with bytes_:
            for _ in range(2):
                peak, _ = bytes_.highest(optimizer.step)
        print(f"adafactor {shapes}: update", peak - base - 4 * len(shapes))


def models():
    import transformers

    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    # A CPU has other kernels for attention with shared keys.
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    length, batch = 64, 8
    some = {"rank": 4, "targets": ["q_proj", "v_proj"]}
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    # The models have no dropout: its mask has four bytes for each element on a CPU.
    every = {"rank": 4, "targets": names}
    adam, bf16 = {"optimizer": "adam"}, {"parameters": "bf16"}
    rows = {
        "plain": adam,
        "bf16": adam | bf16,
        "momentum": {"optimizer": "momentum"},
        "adafactor": {"optimizer": "adafactor"},
        "lion": {"optimizer": "lion"},
        "accumulation": adam | {"micro_batches": 3},
        "masters": adam | bf16 | {"master_weights": True},
        "checkpointing": adam | {"checkpointing": "blocks"},
        "adapters": adam | {"adapters": some},
        "adapters, bf16": adam | bf16 | {"adapters": some},
        "adapters everywhere, bf16": adam | bf16 | {"adapters": every},
        "adapters everywhere, bf16, checkpointing": adam | bf16 | {"adapters": every, "checkpointing": "blocks"},
    }
    adamw = torch.optim.AdamW
    torch.optim.AdamW = lambda parameters, **options: adamw(parameters, foreach=True, **options)
    for name, step in rows.items():
        config = transformers.LlamaConfig(**sizes)
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
        if step.get("parameters"):
            model = model.to(torch.bfloat16)
        if step.get("adapters"):
            steps.add_adapters(model, step["adapters"])
        if step.get("checkpointing"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        ids = torch.randint(0, sizes["vocab_size"], (batch, length))
        count = step.get("micro_batches", 1)
        optimizer = steps.make_optimizer(step, model)
        known = [*(p.data for p in model.parameters()), *model.buffers(), ids, *getattr(optimizer, "masters", [])]
        bytes_, found = Bytes(*known), []

        def forward():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            return loss / count if count > 1 else loss

        with bytes_:
            for _ in range(2):
                optimizer.zero_grad()
                for _ in range(count):
                    peak, loss = bytes_.highest(forward)
                    found += [["forward", peak], ["backward", bytes_.highest(loss.backward)[0]]]
                found.append(["update", bytes_.highest(optimizer.step)[0]])
                del loss
        config = {"architectures": ["LlamaForCausalLM"]} | sizes
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        step = {"batch": batch} | step
        print(json.dumps({"row": name, "config": config, "length": length, "step": step, "phases": found, "versions": versions}))


def sharded():
    import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as fsdp_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    current = [None]

    def resize(tensor, size):
        storage = tensor.untyped_storage()
        if storage.size() != size:
            storage.resize_(size)
        current[0].set(storage, size)

    fsdp_param.alloc_storage = lambda tensor: resize(tensor, tensor.numel() * tensor.itemsize)
    fsdp_param.free_storage = lambda tensor: resize(tensor, 0)

    reduce = fsdp_group.foreach_reduce

    def reduce_and_wait(*args, **kwargs):
        result = reduce(*args, **kwargs)
        # gloo's threads refer to tensors for a moment.
        time.sleep(0.1)
        return result

    fsdp_group.foreach_reduce = reduce_and_wait

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(64, 64, bias=False)

        def forward(self, x):
            return self.inner(x)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([Block(), Block()])
            self.head = torch.nn.Linear(64, 10, bias=False)

        def forward(self, x, y):
            for block in self.blocks:
                x = block(x)
            return torch.nn.functional.cross_entropy(self.head(x), y)

    bf16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for name, options, passes in [
        ("zero3", {}, 1),
        ("zero2", {"reshard_after_forward": False}, 1),
        ("zero3, gathered as bf16", bf16, 1),
        ("zero3, two passes", {}, 2),
    ]:
        model = Model()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        x, y = torch.randn(4, 64), torch.randint(0, 10, (4,))
        optimizer = sgd(model.parameters())
        current[0] = bytes_ = Bytes(*(p._local_tensor for p in model.parameters()), x, y)
        found = []
        with bytes_:
            for _ in range(passes):
                peak, loss = bytes_.highest(lambda: model(x, y))
                found.append(peak)
                found.append(bytes_.highest(loss.backward)[0])
            found.append(bytes_.highest(optimizer.step)[0])
        if torch.distributed.get_rank() == 0:
            print(f"{name}: forward and backward for each pass, update", found)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def zero1(parameters):
        return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, foreach=True)

    for name, make in [("replicas", sgd), ("zero1 (with counters of four bytes)", zero1)]:
        model = torch.nn.Sequential(*(torch.nn.Linear(64, size, bias=False) for size in (64, 64, 10)))
        x, y = torch.randn(4, 64), torch.randint(0, 10, (4,))
        bytes_ = Bytes(*(p.data for p in model.parameters()), x, y)
        found = []
        with bytes_:
            replica = torch.nn.parallel.DistributedDataParallel(model)
            optimizer = make(model.parameters())
            time.sleep(0.2)
            for _ in range(2):
                optimizer.zero_grad()
                peak, loss = bytes_.highest(lambda: torch.nn.functional.cross_entropy(replica(x), y))
                found += [peak, bytes_.highest(loss.backward)[0]]
                time.sleep(0.2)
                found.append(bytes_.highest(optimizer.step)[0])
                del loss
                time.sleep(0.2)
        if torch.distributed.get_rank() == 0:
            print(f"{name}: forward, backward, update of two steps", found)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        sharded()
    elif sys.argv[1:] == ["models"]:
        models()
    else:
        alone()

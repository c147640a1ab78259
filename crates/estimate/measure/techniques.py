"""Techniques that steps can have: adapters, optimizers, several GPUs and the generation of tokens."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from transformers import StaticCache


class Adapted(torch.nn.Module):
    """A linear layer with a low-rank adapter, like peft's `lora.Linear`."""

    def __init__(self, base, rank, dropout):
        super().__init__()
        self.base_layer = base
        self.dropout = torch.nn.Dropout(dropout) if dropout > 0 else torch.nn.Identity()
        self.lora_A = torch.nn.Linear(base.in_features, rank, bias=False, dtype=torch.float32)
        self.lora_B = torch.nn.Linear(rank, base.out_features, bias=False, dtype=torch.float32)
        self.scaling = 2.0

    def forward(self, x):
        result = self.base_layer(x)
        dtype = result.dtype
        x = x if x.dtype == self.lora_A.weight.dtype else x.to(dtype=self.lora_A.weight.dtype)
        result = result + self.lora_B(self.lora_A(self.dropout(x))) * self.scaling
        return result.to(dtype)


def add_adapters(model, lora):
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in lora["targets"] and isinstance(module, torch.nn.Linear):
            setattr(model.get_submodule(parent), last, Adapted(module, lora["rank"], lora.get("dropout", 0.0)))


class Lion(torch.optim.Optimizer):
    """`lion-pytorch`."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)
            self.update(p, p.grad, self.state[p]["exp_avg"])

    def update(self, p, grad, exp_avg):
        p.data.mul_(1.0)
        update = exp_avg.clone().mul_(0.9).add(grad, alpha=0.1).sign_()
        p.add_(update, alpha=-1e-4)
        exp_avg.mul_(0.99).add_(grad, alpha=0.01)


class Masters:
    """Parameters in `f32` beside those of the model, as Megatron-LM's `Float16OptimizerWithFloat16Params` has them."""

    def __init__(self, parameters, make):
        self.parameters = list(parameters)
        self.masters = [p.detach().clone().float() for p in self.parameters]
        self.inner = make(self.masters)

    def zero_grad(self):
        for p in [*self.parameters, *self.masters]:
            p.grad = None

    def step(self):
        for p, master in zip(self.parameters, self.masters):
            master.grad = p.grad.float()
            p.grad = None
        self.inner.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
    # The default of AdamW on a GPU.
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, foreach=True),
    "zero1": lambda parameters: ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, foreach=True),
    "adafactor": torch.optim.Adafactor,
    "lion": Lion,
}


def make_optimizer(step, model):
    kind = step.get("data_parallel", {}).get("kind")
    make = OPTIMIZERS["zero1" if kind == "zero1" else step["optimizer"]]
    parameters = [p for p in model.parameters() if p.requires_grad]
    return Masters(parameters, make) if step.get("master_weights") else make(parameters)


def distribute(model, step, blocks=None, **options):
    """Wraps or shards a model. `blocks` are those of transformers if there are no others."""
    parallel = step.get("data_parallel")
    if not parallel:
        return model
    if parallel["kind"] in ("replicas", "zero1"):
        return torch.nn.parallel.DistributedDataParallel(model)
    if parallel.get("gathered"):
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if parallel["kind"] == "zero2":
        options["reshard_after_forward"] = False
    if blocks is None:
        inner = getattr(model, "transformer", None) or model.model
        blocks = getattr(inner, "h", None) or inner.layers
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def generate(model, ids, decode):
    """Generates tokens. The attention mask is given, so that transformers does not guess one from the tokens."""
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "disable_compile": True}
    if isinstance(decode.get("cache"), dict):
        options["past_key_values"] = StaticCache(config=model.config, max_cache_len=decode["cache"]["static"])
    with torch.no_grad():
        model.generate(ids, max_new_tokens=decode["tokens"], min_new_tokens=decode["tokens"], **options)

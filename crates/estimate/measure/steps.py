#!/usr/bin/env python3
"""Measures steps that `measure.py` has not: generation, accumulation, other optimizers, adapters, checkpointing, and several
GPUs. docs/ESTIMATE.md says what for.

    python3 steps.py --out steps.jsonl                      all rows: four minutes on two GPUs; rows of several GPUs need two
    python3 steps.py --rows 'lora' --out steps.jsonl        the rows whose names match

It needs torch, torchvision, transformers and `measure.py`, and no network. Each row has a process of its own. Each line of the
result has the row's name, the fields of the step as `gpumem_estimate::Step` reads them, `peak`
(`torch.cuda.max_memory_allocated()` of both steps, without what was needed to build the model) and the peaks of the phases. Of
several GPUs, each rank writes a line.
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("TORCH_SYMBOLIZE_MODE", "dladdr")
sys.path.insert(0, str(Path(__file__).parent))
import measure  # noqa: E402
from processes import described  # noqa: E402

SEQUENCES = {"gpt2": 512, "gpt2-medium": 512, "llama-1b": 256}


def row(name, model, batch, gpus=1, **step):
    """A row. The other arguments are the fields of `Step`."""
    return {"row": name, "model": model, "batch": batch, "gpus": gpus, "step": {"batch": batch} | step}


def rows():
    def lora(rank, *targets, dropout=0.0):
        return {"rank": rank, "targets": list(targets), "dropout": dropout}

    yield row("decode/gpt2", "gpt2", 8, decode={"tokens": 128})
    yield row("decode/gpt2/long", "gpt2", 32, decode={"tokens": 400})
    yield row("decode/llama-1b/bf16", "llama-1b", 32, parameters="bf16", decode={"tokens": 64})
    yield row("decode/llama-1b/f32", "llama-1b", 32, decode={"tokens": 64})
    yield row("decode/gpt2/static", "gpt2", 32, decode={"tokens": 128, "cache": {"static": 640}})
    yield row("prefill/llama-1b/bf16", "llama-1b", 32, parameters="bf16", decode={"tokens": 1})
    yield row("accumulation/gpt2/adamw", "gpt2", 8, optimizer="adam", micro_batches=4)
    yield row("accumulation/resnet50/momentum", "resnet50", 8, optimizer="momentum", micro_batches=3)
    yield row("momentum/gpt2", "gpt2", 1, optimizer="momentum")
    yield row("momentum/resnet50", "resnet50", 8, optimizer="momentum")
    yield row("adafactor/gpt2", "gpt2", 1, optimizer="adafactor")
    yield row("adafactor/llama-1b", "llama-1b", 1, optimizer="adafactor", parameters="bf16")
    yield row("adafactor/resnet50", "resnet50", 1, optimizer="adafactor")
    yield row("lion/gpt2-medium", "gpt2-medium", 1, optimizer="lion")
    yield row("bf16/gpt2-medium/adamw", "gpt2-medium", 8, optimizer="adam", parameters="bf16")
    yield row("masters/gpt2-medium/adamw", "gpt2-medium", 1, optimizer="adam", parameters="bf16", master_weights=True)
    yield row("masters/llama-1b/adamw", "llama-1b", 8, optimizer="adam", parameters="bf16", master_weights=True)
    attention = lora(16, "q_proj", "v_proj")
    everything = lora(16, "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", dropout=0.05)
    yield row("lora/llama-1b/bf16", "llama-1b", 8, optimizer="adam", parameters="bf16", adapters=attention)
    yield row("lora/llama-1b/f32", "llama-1b", 8, optimizer="adam", adapters=attention)
    yield row("lora/llama-1b/bf16/all", "llama-1b", 8, optimizer="adam", parameters="bf16", adapters=everything)
    checkpointed = {"parameters": "bf16", "adapters": everything, "checkpointing": "blocks"}
    yield row("lora/llama-1b/bf16/all/blocks", "llama-1b", 8, optimizer="adam", **checkpointed)
    yield row("lora/llama-1b/autocast", "llama-1b", 8, optimizer="adam", autocast="bf16", adapters=attention)

    def parallel(kind, **more):
        return {"kind": kind, "ranks": 2} | more

    yield row("ddp/gpt2", "gpt2", 8, 2, optimizer="adam", data_parallel=parallel("replicas"))
    yield row("zero1/gpt2", "gpt2", 8, 2, optimizer="adam", data_parallel=parallel("zero1"))
    yield row("zero1/gpt2-medium", "gpt2-medium", 1, 2, optimizer="adam", data_parallel=parallel("zero1"))
    yield row("zero2/gpt2-medium", "gpt2-medium", 8, 2, optimizer="adam", data_parallel=parallel("zero2"))
    yield row("zero3/gpt2-medium", "gpt2-medium", 8, 2, optimizer="adam", data_parallel=parallel("zero3"))
    yield row("zero3/llama-1b", "llama-1b", 1, 2, optimizer="adam", data_parallel=parallel("zero3"))
    mixed = parallel("zero3", gathered="bf16")
    yield row("zero3/llama-1b/bf16", "llama-1b", 8, 2, optimizer="adam", data_parallel=mixed)
    checkpointed = {"data_parallel": mixed, "checkpointing": "blocks"}
    yield row("zero3/llama-1b/bf16/blocks", "llama-1b", 8, 2, optimizer="adam", **checkpointed)
    yield row("zero3/llama-1b/sgd/accumulation", "llama-1b", 1, 2, optimizer="sgd", micro_batches=2, data_parallel=mixed)
    yield row("zero3/llama-1b/inference", "llama-1b", 8, 2, data_parallel=mixed)


def add_adapters(model, lora):
    """Low-rank adapters as peft's `lora.Linear` has them."""
    import torch

    class Adapted(torch.nn.Module):
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

    for parameter in model.parameters():
        parameter.requires_grad = False
    for name, module in list(model.named_modules()):
        last = name.rsplit(".", 1)[-1]
        if last in lora["targets"] and isinstance(module, torch.nn.Linear):
            parent = model.get_submodule(name.rsplit(".", 1)[0])
            setattr(parent, last, Adapted(module, lora["rank"], lora.get("dropout", 0.0)))


def lion(parameters):
    """`lion-pytorch`."""
    import torch

    class Lion(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                update(p, p.grad, state["exp_avg"])

    def update(p, grad, exp_avg):
        p.data.mul_(1.0)
        update = exp_avg.clone().mul_(0.9).add(grad, alpha=0.1).sign_()
        p.add_(update, alpha=-1e-4)
        exp_avg.mul_(0.99).add_(grad, alpha=0.01)

    return Lion(parameters)


class Masters:
    """Parameters in `f32` beside those of the model, as Megatron-LM's `Float16OptimizerWithFloat16Params` has them."""

    def __init__(self, parameters, make):
        self.parameters = list(parameters)
        self.masters = [p.detach().clone().float() for p in self.parameters]
        self.inner = make(self.masters)
        self.state = self.inner.state

    def zero_grad(self):
        for p in [*self.parameters, *self.masters]:
            p.grad = None

    def step(self):
        import torch

        for p, master in zip(self.parameters, self.masters):
            master.grad = p.grad.float()
            p.grad = None
        self.inner.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)


def make_optimizer(step, model):
    import torch

    makers = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
        "adam": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
        "lion": lion,
    }
    make = makers[step["optimizer"]]
    parameters = [p for p in model.parameters() if p.requires_grad]
    if step.get("master_weights"):
        return Masters(parameters, make)
    if step.get("data_parallel", {}).get("kind") == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, lr=1e-4)
    return make(parameters)


def distribute(model, step):
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    parallel = step.get("data_parallel")
    if not parallel:
        return model
    if parallel["kind"] in ("replicas", "zero1"):
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    options = {}
    if parallel.get("gathered"):
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if parallel["kind"] == "zero2":
        options["reshard_after_forward"] = False
    inner = getattr(model, "transformer", None) or model.model
    for block in getattr(inner, "h", None) or inner.layers:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def run(row):
    import torch

    step, name = row["step"], row["model"]
    rank = int(os.environ.get("RANK", 0))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    device = torch.device("cuda", torch.cuda.current_device())
    if row["gpus"] > 1:
        torch.distributed.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    training = "optimizer" in step
    # The weights are made on the device, because random numbers take long on a CPU. The memory for this is not part of
    # the peak.
    with device:
        model = measure.build(name)
    if step.get("parameters") == "bf16":
        model = model.to(torch.bfloat16)
    if step.get("adapters"):
        add_adapters(model, step["adapters"])
    if step.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train(training)
    plain = model = model.to(device)
    model = distribute(model, step)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    result = dict(row) | {"rank": rank, "after_model": torch.cuda.memory_allocated()}
    result["parameters"] = sum(p.numel() for p in plain.parameters())
    length = SEQUENCES.get(name)
    if length:
        ids = torch.randint(0, 1000, (row["batch"], length)).to(device)
        batch = {"input_ids": ids} | ({"labels": ids, "use_cache": False} if training else {})
    else:
        image = torch.randn(row["batch"], 3, 224, 224).to(device)
        labels = torch.randint(0, 1000, (row["batch"],)).to(device)
    optimizer = make_optimizer(step, plain) if training else None
    autocast = torch.autocast("cuda", dtype=torch.bfloat16, enabled=step.get("autocast") == "bf16")
    count = step.get("micro_batches", 1)

    def forward():
        if length:
            output = model(**batch)
            return output.loss if training else output
        return torch.nn.functional.cross_entropy(model(image), labels)

    result["phases"], result["peak"] = [], 0
    torch.cuda.reset_peak_memory_stats()

    def done(phase):
        value = torch.cuda.max_memory_allocated()
        result["peak"] = max(result["peak"], value)
        result["phases"].append([phase, value])
        torch.cuda.reset_peak_memory_stats()

    for _ in range(1 if step.get("decode") else 2):
        if step.get("decode"):
            generate(plain, ids, step["decode"])
            done("decode")
            continue
        if training:
            optimizer.zero_grad()
            for _ in range(count):
                with autocast:
                    loss = forward()
                    loss = loss / count if count > 1 else loss
                done("forward")
                loss.backward()
                done("backward")
            optimizer.step()
            done("update")
        else:
            with torch.no_grad(), autocast:
                output = forward()
            done("forward")
            del output
    torch.cuda.synchronize()
    result["reserved"] = torch.cuda.max_memory_reserved()
    result["end"] = torch.cuda.memory_allocated()
    result["versions"], result["device"] = measure.versions(), torch.cuda.get_device_name()
    if row["gpus"] > 1:
        torch.distributed.destroy_process_group()
    return result


def generate(model, ids, decode):
    import torch
    from transformers import StaticCache

    options = {}
    cache = decode.get("cache")
    if isinstance(cache, dict):
        options["past_key_values"] = StaticCache(config=model.config, max_cache_len=cache["static"])
    tokens = decode["tokens"]
    with torch.no_grad():
        # The attention mask is given, so that transformers does not guess one from the tokens.
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            disable_compile=True,
            **options,
        )


def write(result, out):
    with open(out, "a") as file:
        file.write(json.dumps(result) + "\n")
    said = f"{result['peak'] / 2**20:10.1f} MiB" if "peak" in result else "error: " + result["error"].strip()[-300:]
    print(f"{result['row']:40} {said}", flush=True)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--rows", default=".*", help="a regular expression for the names of the rows")
    arguments.add_argument("--out", default="steps.jsonl")
    arguments.add_argument("--seconds", type=int, default=240, help="no row begins after this time")
    arguments.add_argument("--list", action="store_true")
    arguments.add_argument("--one", help="measures this row in this process")
    args = arguments.parse_args()
    chosen = [row for row in rows() if re.search(args.rows, row["row"])]
    if args.one:
        import transformers

        transformers.logging.set_verbosity_error()
        row = next(row for row in rows() if row["row"] == args.one)
        try:
            result = run(row)
        except BaseException as error:
            result = row | {"rank": int(os.environ.get("RANK", 0)), "error": described(error)}
        write(result, args.out)
        return 0 if "peak" in result else 1
    if args.list:
        for row in chosen:
            print(row["row"], row["gpus"])
        return 0
    began = time.time()
    Path(args.out).write_text("")
    visible = int(subprocess.check_output("nvidia-smi -L | wc -l", shell=True))
    # Rows run beside each other: torch's statistics are those of a process.
    number = 0
    for gpus, at_once in ((1, 3 * visible), (2, 3)):
        running = []
        for row in [row for row in chosen if row["gpus"] == gpus]:
            while len([child for child in running if child.poll() is None]) >= at_once:
                time.sleep(0.1)
            if visible < gpus or time.time() - began > args.seconds:
                write(row | {"error": f"{visible} GPUs, {time.time() - began:.0f} s"}, args.out)
                continue
            environment = os.environ | {"OMP_NUM_THREADS": "2"}
            launch = [sys.executable]
            if gpus == 1:
                environment["CUDA_VISIBLE_DEVICES"] = str(number % visible)
                number += 1
            else:
                launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
            one = ["--one", row["row"], "--out", args.out]
            running.append(subprocess.Popen([*launch, __file__, *one], env=environment))
        for child in running:
            child.wait()
    done = [json.loads(line) for line in Path(args.out).read_text().splitlines()]
    failed = [row["row"] for row in done if "error" in row]
    print(f"{len(done) - len(failed)} lines in {time.time() - began:.0f} s; not measured: {failed}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

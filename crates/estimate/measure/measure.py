#!/usr/bin/env python3
"""Measures the memory of PyTorch steps. docs/ESTIMATE.md says what for, and which rows there are.

    python3 measure.py --out rows.jsonl --traces traces     all rows
    python3 measure.py --rows 'gpt2/.*/sgd'                 the rows whose names match
    python3 measure.py --list                               names only; needs no GPU
    python3 measure.py --blind                              the rows of blind.txt instead

It needs a CUDA device, torch, torchvision and transformers, and no network: the configurations are built here and the
weights are random. Each model has a process, which builds the model on the CPU and forks one process for each row. So a
row's process starts with an empty allocator and without a CUDA context. Rows of different models run at the same time:
torch's statistics are those of one process. A row that runs out of memory is repeated while no other row runs.

One JSON object per row and line:

    row, model, batch, mode, precision, checkpointing, chosen   the row; `chosen` is `before`, `after` or `blind`
    shape            sizes of the input (sequence lengths, image)
    parameters, parameter_bytes, buffers, buffer_bytes
    after_model, after_inputs, after_optimizer                  `memory_allocated()`; after_optimizer: at the end of step 1
    steps            for each step: `peak` (`max_memory_allocated()`), `start`, `end`, and the peaks of forward, backward
                     and update
    peak             the largest peak of all steps: the figure that an estimate is compared with
    composition      the bytes by class at that peak, from torch's allocation history
    versions, device

With --traces, the allocation history of each row is written as well, as NAME.json.gz.
"""

import argparse
import fcntl
import gzip
import itertools
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path

from parameters import TRANSFORMERS, configuration
from processes import finish, start

# Names without line numbers. Looking up lines takes minutes.
os.environ.setdefault("TORCH_SYMBOLIZE_MODE", "dladdr")

CHOSEN = ["gpt2", "gpt2-medium", "llama-1b", "bert-base", "t5-small", "vit-b"]
CONVOLUTIONS = ["vgg19", "resnet50", "convnext_tiny", "mobilenet_v2"]
MODELS = CHOSEN + CONVOLUTIONS
BATCHES = [1, 8, 32]
MODES = ["inference", "sgd", "adamw"]
PRECISIONS = ["fp32", "bf16"]
# `checkpointing` recomputes each block of the transformers.
CHECKPOINTING = [False, True]
STEPS = 2

SHAPES = {
    "gpt2": {"sequence": 512},
    "gpt2-medium": {"sequence": 512},
    "llama-1b": {"sequence": 256},
    "bert-base": {"sequence": 256},
    "t5-small": {"source": 256, "target": 128},
}
IMAGE = {"image": 224}


def described(name, model, batch, mode, precision, checkpointing, chosen, shape):
    return {
        "row": name,
        "model": model,
        "batch": batch,
        "mode": mode,
        "precision": precision,
        "checkpointing": checkpointing,
        "chosen": chosen,
        "shape": shape,
    }


def rows():
    """All rows in a fixed order. `before`: the sum of the positions of a row's choices is even, so that each choice has as
    many rows before as after."""
    factors = [list(enumerate(choices)) for choices in (MODELS, BATCHES, MODES, PRECISIONS, CHECKPOINTING)]
    for (m, model), (b, batch), (o, mode), (p, precision), (c, checkpointing) in itertools.product(*factors):
        if checkpointing and (mode == "inference" or model in CONVOLUTIONS):
            continue
        name = f"{model}/{batch}/{mode}/{precision}" + ("/checkpointing" if checkpointing else "")
        chosen = "before" if (m + b + o + p + c) % 2 == 0 else "after"
        yield described(name, model, batch, mode, precision, checkpointing, chosen, SHAPES.get(model, IMAGE))


def blind_rows():
    """The rows of blind.txt, such as `t5-base:512,64/4/sgd/fp32`: a model with its sizes, the batch, the mode, the precision."""
    for name in Path(__file__).with_name("blind.txt").read_text().split():
        model, batch, mode, precision, *rest = name.split("/")
        model, sizes = model.split(":")
        sizes = [int(size) for size in sizes.split(",")]
        if model.startswith("t5"):
            shape = {"source": sizes[0], "target": sizes[1]}
        elif model.startswith(("gpt2", "bert", "llama")):
            shape = {"sequence": sizes[0]}
        else:
            shape = {"image": sizes[0]}
        yield described(name, model, int(batch), mode, precision, rest == ["checkpointing"], "blind", shape)


def is_torchvision(name):
    return name.startswith(("vgg", "resnet", "wide_resnet", "resnext", "convnext", "mobilenet"))


def build(name):
    """The model on the CPU, with random weights."""
    if is_torchvision(name):
        import torchvision

        return getattr(torchvision.models, name)(weights=None)
    if name not in TRANSFORMERS:
        raise ValueError(name)
    kind, config = configuration(name)
    # transformers chooses this by itself for these models. It is named, so that a later version measures the same.
    sdpa = {} if name.startswith("t5") else {"attn_implementation": "sdpa"}
    return kind._from_config(config, **sdpa)


def inputs(row, device):
    """The inputs of a step and its labels. They stay in memory during all steps."""
    import torch

    model, batch, shape = row["model"], row["batch"], row["shape"]
    training = row["mode"] != "inference"

    def tokens(length):
        return torch.randint(0, 1000, (batch, length)).to(device)

    if "image" in shape:
        size = shape["image"]
        image = torch.randn(batch, 3, size, size).to(device)
        labels = torch.randint(0, 1000, (batch,)).to(device) if training else None
        if is_torchvision(model):
            return {"image": image, "labels": labels}
        return {"pixel_values": image} | ({"labels": labels} if training else {})
    if "source" in shape:
        source, target = tokens(shape["source"]), tokens(shape["target"])
        return {"input_ids": source} | ({"labels": target} if training else {"decoder_input_ids": target})
    ids = tokens(shape["sequence"])
    # Without labels the causal models keep their key-value cache, as they do by default.
    return {"input_ids": ids} | ({"labels": ids} if training else {})


def forward(row, model, batch):
    """The loss, or the output of inference."""
    import torch

    if is_torchvision(row["model"]):
        logits = model(batch["image"])
        labels = batch["labels"]
        return logits if labels is None else torch.nn.functional.cross_entropy(logits, labels)
    if row["mode"] == "inference":
        return model(**batch)
    cache = {} if row["model"].startswith(("bert", "vit")) else {"use_cache": False}
    return model(**batch, **cache).loss


class History:
    """torch's allocation history, with the phases of the program."""

    def __init__(self):
        import torch

        self.phases = []
        self.owners = []
        torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="all", max_entries=5_000_000)

    def phase(self, name):
        self.phases.append((time.time_ns() // 1000, name))

    def owns(self, label, tensors):
        """Blocks that are live now and belong to these tensors have this class."""
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None and tensor.is_cuda}
        self.owners.append((time.time_ns() // 1000, label, addresses))

    def read(self):
        import torch

        events = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
        return events


def words_of(frames):
    """Returns the names that identify the operation of an allocation: C++ functions of operations, and the innermost Python lines."""
    names = []
    for frame in frames:
        name, file = frame.get("name", ""), frame.get("filename", "")
        if file.endswith(".py"):
            if "/torch/" not in file or "/torch/optim/" in file:
                names.append(f"{Path(file).stem}:{frame.get('line')}:{name}")
        elif re.search(r"cudnn|blas|workspace|empty|at::native::|Backward", name, re.IGNORECASE):
            names.append(re.sub(r"\(.*", "", name)[:80])
        if len(names) == 8:
            break
    return " < ".join(names)


def is_workspace(words):
    """cuDNN and cuBLAS ask the allocator for their workspaces; tensors come from a function `empty…` or `resize…`, and the buffers
    of sums from `…sum…`. The backward pass of a convolution shows no function of cuDNN."""
    functions = words.lower().split(" < ")[:4]
    asks = any(re.search(r"cudnn|blas|workspace|convolution_backward", function) for function in functions)
    return asks and not any(re.search(r"empty|resize|sum|depthwise", function) for function in functions)


def analyse(history):
    """The bytes by class at the highest moment, and the events in a short form."""
    events = history.read()
    words, short, blocks, live = {}, [], [], {}
    owners = list(history.owners)
    classes = {}

    def settle(until):
        """Gives the blocks that are live now the classes of the tensors that were named meanwhile."""
        while owners and owners[0][0] < until:
            _, label, addresses = owners.pop(0)
            for address in addresses:
                if address in live:
                    classes.setdefault(live[address], label)

    def phase_at(moment):
        names = [name for since, name in history.phases if since <= moment]
        return names[-1] if names else "start"

    in_use, highest, at, live_at_peak, without, highest_without = 0, 0, -1, [], 0, 0
    for event in events:
        action, address, size, moment = event["action"], event["addr"], event["size"], event.get("time_us", 0)
        settle(moment)
        where = words_of(event.get("frames", [])) if action == "alloc" else ""
        short.append([action, address, size, phase_at(moment), words.setdefault(where, len(words))])
        if action == "alloc":
            live[address] = len(blocks)
            block = {"size": -(-size // 512) * 512, "phase": phase_at(moment), "is_workspace": is_workspace(where)}
            blocks.append(block)
            in_use += block["size"]
            without += 0 if block["is_workspace"] else block["size"]
            highest_without = max(highest_without, without)
            if in_use > highest:
                highest, at, live_at_peak = in_use, len(short), list(live.values())
        elif action == "free_completed" and address in live:
            block = blocks[live.pop(address)]
            in_use -= block["size"]
            without -= 0 if block["is_workspace"] else block["size"]
    settle(float("inf"))

    composition = {}
    for number in live_at_peak:
        block = blocks[number]
        label = "workspace" if block["is_workspace"] else classes.get(number, f"other, from {block['phase']}")
        composition[label] = composition.get(label, 0) + block["size"]
    return {
        "composition": composition,
        "composition_sum": highest,
        "phase_of_peak": phase_at(events[at - 1].get("time_us", 0)) if at > 0 else None,
        "largest_workspace": max((block["size"] for block in blocks if block["is_workspace"]), default=0),
        "peak_without_workspace": highest_without,
    }, {"words": list(words), "events": short}


def measure(row, model, traces):
    import torch

    device = torch.device("cuda")
    torch.cuda.init()
    training = row["mode"] != "inference"
    history = History()
    history.phase("model")
    model.to(device)
    history.owns("weights", model.parameters())
    history.owns("buffers", model.buffers())
    result = dict(row)
    parameters, buffers = list(model.parameters()), list(model.buffers())
    result["parameters"] = sum(tensor.numel() for tensor in parameters)
    result["parameter_bytes"] = sum(tensor.nbytes for tensor in parameters)
    result["buffers"] = sum(tensor.numel() for tensor in buffers)
    result["buffer_bytes"] = sum(tensor.nbytes for tensor in buffers)
    result["after_model"] = torch.cuda.memory_allocated()
    model.train(training)
    if row["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    history.phase("inputs")
    batch = inputs(row, device)
    history.owns("inputs", batch.values())
    result["after_inputs"] = torch.cuda.memory_allocated()
    optimizer = None
    if row["mode"] == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    elif row["mode"] == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    steps, overall = [], 0
    torch.cuda.reset_peak_memory_stats()

    def peak():
        """The highest value since the last call. torch's own mark is reset, so the largest of all is kept here."""
        nonlocal overall
        value = torch.cuda.max_memory_allocated()
        overall = max(overall, value)
        torch.cuda.reset_peak_memory_stats()
        return value

    for number in range(1, STEPS + 1):
        step = {"start": torch.cuda.memory_allocated()}
        history.phase(f"forward {number}")
        if training:
            optimizer.zero_grad(set_to_none=True)
        with (
            torch.set_grad_enabled(training),
            torch.autocast("cuda", dtype=torch.bfloat16, enabled=row["precision"] == "bf16"),
        ):
            output = forward(row, model, batch)
        step["forward"] = peak()
        if training:
            step["after_forward"] = torch.cuda.memory_allocated()
            history.phase(f"backward {number}")
            output.backward()
            history.owns("gradients", [tensor.grad for tensor in parameters])
            step["backward"] = peak()
            step["after_backward"] = torch.cuda.memory_allocated()
            history.phase(f"update {number}")
            optimizer.step()
            states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
            history.owns("optimizer", states)
            step["update"] = peak()
        del output
        step["peak"] = max(step.get(phase, 0) for phase in ("forward", "backward", "update"))
        step["end"] = torch.cuda.memory_allocated()
        steps.append(step)
        history.phase(f"end {number}")
    torch.cuda.synchronize()
    result["after_optimizer"] = steps[0]["end"]
    result["steps"], result["peak"] = steps, overall
    result["reserved"] = torch.cuda.max_memory_reserved()
    found, trace = analyse(history)
    result |= found
    if traces:
        Path(traces).mkdir(parents=True, exist_ok=True)
        name = row["row"].replace("/", ".") + ".json.gz"
        with gzip.open(Path(traces) / name, "wt", compresslevel=3) as file:
            json.dump({"row": row["row"]} | trace, file)
    config = getattr(model, "config", None)
    result["attention"] = getattr(config, "_attn_implementation", None)
    result["versions"] = versions()
    result["device"] = torch.cuda.get_device_name()
    return result


def versions():
    import torch
    import torchvision
    import transformers

    found = {
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    try:
        found["driver"] = os.popen("nvidia-smi --query-gpu=driver_version --format=csv,noheader").read().split()[0]
    except (OSError, IndexError):
        found["driver"] = None
    return found


def run_model(name, chosen, args):
    """All rows of one model: first beside those of other models, then those that ran out of memory, alone."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(name)
    lock = open(args.lock, "w")

    def run(row, how):
        if time.time() > args.deadline:
            return row | {"error": "no time was left"}
        fcntl.flock(lock, how)
        try:
            began = time.time()
            return row | finish(start(lambda: measure(row, model, args.traces))) | {"seconds": round(time.time() - began, 1)}
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)

    again = []
    for row in chosen:
        result = run(row, fcntl.LOCK_SH)
        if result.get("out_of_memory"):
            again.append(row)
        else:
            print_row(result, args)
    for row in again:
        print_row(run(row, fcntl.LOCK_EX), args)


def print_row(result, args):
    line = json.dumps(result)
    with open(args.out, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(line + "\n")
    said = f"{result['peak'] / 2**20:10.1f} MiB" if "peak" in result else "error: " + result["error"].strip()[-120:]
    print(f"{result['row']:45} {said}", flush=True)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--rows", default=".*", help="a regular expression for the names of the rows")
    arguments.add_argument("--blind", action="store_true", help="the rows of blind.txt")
    arguments.add_argument("--chosen", choices=["before", "after"], help="only the rows chosen then")
    arguments.add_argument("--out", default="rows.jsonl")
    arguments.add_argument("--traces", help="a folder for the allocation histories")
    arguments.add_argument("--seconds", type=int, default=460, help="no row begins after this time")
    arguments.add_argument("--list", action="store_true")
    args = arguments.parse_args()
    all_rows = blind_rows() if args.blind else rows()
    chosen = [row for row in all_rows if re.search(args.rows, row["row"]) and args.chosen in (None, row["chosen"])]
    if args.list:
        for row in chosen:
            print(row["row"], row["chosen"])
        return 0
    args.deadline = time.time() + args.seconds
    args.lock = args.out + ".lock"
    Path(args.out).write_text("")
    Path(args.lock).write_text("")
    # The modules are imported once, before all forks. No CUDA context and no thread may exist in a process that forks.
    import torch  # noqa: F401
    import torchvision  # noqa: F401
    import transformers

    transformers.logging.set_verbosity_error()
    children = []
    for name in dict.fromkeys(row["model"] for row in chosen):
        of_model = [row for row in chosen if row["model"] == name]
        child = os.fork()
        if child == 0:
            try:
                run_model(name, of_model, args)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    done = [json.loads(line) for line in Path(args.out).read_text().splitlines()]
    failed = [row["row"] for row in done if "error" in row]
    print(f"{len(done) - len(failed)} of {len(chosen)} rows measured", flush=True)
    os.remove(args.lock)
    return 0 if not failed and len(done) == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Measures the memory of PyTorch's steps. docs/ESTIMATE.md says what for, and which rows there are.

    python3 measure.py h200.jsonl --rows 'gpt2/.*/sgd' --out rows.jsonl     the rows of a file whose names match
    python3 measure.py bytes.jsonl --cpu                                    counts the bytes of tensors on a CPU

It needs torch, torchvision and transformers, and no network: weights are random. Rows of several GPUs need these GPUs. Each rank of a row has
its own process, which starts with an empty allocator and without a CUDA context. Rows run at the same time, because torch's statistics are
those of one process. A row that runs out of memory is repeated while no other row runs. To measure a new row, write it into a file:

    row              its name
    model, config    a model of torchvision or of `tests/modules.jsonl`, or a configuration of transformers
    shape            `sequence`, `source` and `target`, or `image`
    step             the fields of `gpumem_estimate::Step`
    gpus             the number of ranks; 1 if it is missing

`measure.py` adds to these, for each rank, in bytes:

    phases                                      the highest `memory_allocated()` of each phase of two steps
    peak                                        the highest of them, with which an estimate is compared
    reserved                                    the most that the allocator held from the driver
    largest_workspace, peak_without_workspace   for models of torchvision, whose convolutions have workspaces
"""

import argparse
import gc
import inspect
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path

# Names without line numbers. Looking up lines takes minutes.
os.environ.setdefault("TORCH_SYMBOLIZE_MODE", "dladdr")

import torch  # noqa: E402
import torchvision  # noqa: E402
import transformers  # noqa: E402

import counting  # noqa: E402
import models  # noqa: E402
import techniques  # noqa: E402

KNOWN = models.lines()


class Cuda:
    """torch's statistics of the device."""

    def highest(self, run):
        torch.cuda.reset_peak_memory_stats()
        result = run()
        return torch.cuda.max_memory_allocated(), result


def start(work):
    """Starts a function in a separate process. `finish` returns its result."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            result = work()
        except BaseException as error:  # The parent must know of any error. The stack goes to stderr.
            traceback.print_exception(error, file=sys.stderr)
            text = "".join(traceback.format_exception_only(error)).strip()[-2000:]
            result = {"error": text, "out_of_memory": isinstance(error, torch.OutOfMemoryError)}
        with os.fdopen(write, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(write)
    return child, read


def finish(started):
    """Waits for a function. Returns its result, or an object with `error`."""
    child, read = started
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"the process ended with status {status}"}


def build(row):
    """The model of a row on the CPU."""
    name = row.get("model")
    return models.build(row.get("config") or KNOWN.get(name, {}).get("config"), name)


def inputs(row, model, device, training):
    """The inputs of a step, which stay in memory during all steps."""
    batch, shape = row["step"]["batch"], row["shape"]
    dtype, config, kind = next(model.parameters()).dtype, getattr(model, "config", None), type(model).__name__

    def numbers(*sizes):
        return torch.randn(batch, *sizes).to(device, dtype)

    def integers(*sizes):
        return torch.randint(0, 500, (batch, *sizes)).to(device)

    if kind == "CLIPModel":
        size = config.vision_config.image_size
        given = {"pixel_values": numbers(3, size, size), "input_ids": integers(shape["sequence"])}
        return given | ({"return_loss": True} if training else {})
    if "image" in shape:
        given = {"pixel_values" if config else "image": numbers(3, shape["image"], shape["image"])}
        return given | ({"labels": integers()} if training else {})
    if kind == "WhisperForConditionalGeneration":
        given, target = {"input_features": numbers(config.num_mel_bins, 2 * config.max_source_positions)}, integers(shape["sequence"])
    elif "source" in shape:
        given, target = {"input_ids": integers(shape["source"])}, integers(shape["target"])
    else:
        target = integers(shape["sequence"])
        given = {"input_ids": target}
    if training:
        # In training there is no cache of keys and values; in inference models keep it, as they do by default.
        has_cache = "use_cache" in inspect.signature(model.forward).parameters
        return given | {"labels": target} | ({"use_cache": False} if has_cache else {})
    return given if "input_ids" in given and "source" not in shape else given | {"decoder_input_ids": target}


def prepare(row, model, device):
    """Prepares a model on a device for a step. Returns the forward pass, the optimizer, and all tensors that live before the step."""
    step = row["step"]
    training = "optimizer" in step
    if step.get("parameters") == "bf16":
        model = model.to(torch.bfloat16)
    if step.get("adapters"):
        techniques.add_adapters(model, step["adapters"])
    if step.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train(training)
    model.to(device)
    batch = inputs(row, model, device, training)
    run = techniques.distribute(model, step)
    if device.type == "cuda":
        # What was needed to shard the model is not part of the step.
        gc.collect()
        torch.cuda.empty_cache()
    optimizer = techniques.make_optimizer(step, model) if training else None
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=step.get("autocast") == "bf16")

    def forward():
        if step.get("decode"):
            return techniques.generate(model, batch["input_ids"], step["decode"])
        with torch.set_grad_enabled(training), autocast:
            if "image" in batch:
                logits = run(batch["image"])
                return torch.nn.functional.cross_entropy(logits, batch["labels"]) if training else logits
            return run(**batch).loss if training else run(**batch)

    tensors = [value for value in batch.values() if torch.is_tensor(value)]
    return forward, optimizer, [*model.parameters(), *model.buffers(), *tensors, *getattr(optimizer, "masters", [])]


def run_phases(step, counter, forward, optimizer, found, count=2):
    """Runs steps. Adds the name and the highest memory of each phase to `found`."""
    passes = step.get("micro_batches", 1)

    def phase(name, run):
        peak, result = counter.highest(run)
        found.append([name, peak])
        return result

    for _ in range(count):
        if optimizer is None:
            phase("decode" if step.get("decode") else "forward", forward)
            continue
        optimizer.zero_grad()
        for _ in range(passes):
            loss = phase("forward", lambda: forward() / passes if passes > 1 else forward())
            phase("backward", loss.backward)
        phase("update", optimizer.step)
        del loss
    return found


def is_workspace(frames):
    """cuDNN and cuBLAS ask the allocator for their workspaces; tensors come from a function `empty…` or `resize…`, and the buffers
    of sums from `…sum…`. The backward pass of a convolution shows no function of cuDNN."""
    names = []
    for frame in frames:
        name, file = frame.get("name", ""), frame.get("filename", "")
        if file.endswith(".py") and ("/torch/" not in file or "/torch/optim/" in file):
            names.append(f"{Path(file).stem}:{name}")
        elif not file.endswith(".py") and re.search(r"cudnn|blas|workspace|empty|at::native::|Backward", name, re.IGNORECASE):
            names.append(re.sub(r"\(.*", "", name)[:80])
    words = " ".join(names[:4]).lower()
    return re.search(r"cudnn|blas|workspace|convolution_backward", words) and not re.search(r"empty|resize|sum|depthwise", words)


def workspaces(events):
    """The largest workspace in a history of allocations, and the peak without workspaces."""
    live, now, highest, largest = {}, 0, 0, 0
    for event in events:
        size = -(-event["size"] // 512) * 512
        if event["action"] == "free_completed":
            now -= live.pop(event["addr"], 0)
        elif event["action"] == "alloc" and is_workspace(event.get("frames", [])):
            largest = max(largest, size)
        elif event["action"] == "alloc":
            live[event["addr"]] = size
            now += size
            highest = max(highest, now)
    return {"largest_workspace": largest, "peak_without_workspace": highest}


def measure(row, model, rank, device):
    step, has_history = row["step"], "image" in row["shape"] and device != "cpu"
    if device != "cpu":
        # Otherwise, other ranks would wait for the one without a GPU.
        assert row.get("gpus", 1) <= torch.cuda.device_count(), "there are not enough GPUs"
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    if row.get("gpus", 1) > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(row["gpus"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
        torch.distributed.init_process_group("nccl", device_id=torch.device(device))
    torch.manual_seed(0)
    if has_history:
        torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="all", max_entries=5_000_000)
    forward, optimizer, tensors = prepare(row, model, torch.device(device))
    counter = counting.Bytes(tensors) if device == "cpu" else Cuda()
    result = row | {"rank": rank, "parameters": sum(tensor.numel() for tensor in model.parameters())}
    result["phases"] = run_phases(step, counter, forward, optimizer, [], 1 if step.get("decode") else 2)
    result["peak"] = max(peak for _, peak in result["phases"])
    result["versions"] = {module.__name__: module.__version__ for module in (torch, torchvision, transformers)}
    if device != "cpu":
        result["reserved"], result["device"] = torch.cuda.max_memory_reserved(), torch.cuda.get_device_name()
    if has_history:
        result |= workspaces(torch.cuda.memory._snapshot()["device_traces"][rank])
    return result


def measure_all(rows, args, at_once):
    """Measures rows, at most `at_once` at the same time. Returns the rows that ran out of memory while others ran, and those for which no time
    was left."""
    left, running, built = [], [], (None, None)
    while rows or running:
        if rows and len(running) < at_once:
            row = rows.pop(0)
            if time.time() > args.deadline:
                left.append(row)
                continue
            key = row.get("config") or row["model"]
            # Rows of one model get copies of it by `fork`.
            built = built if built[0] == key else (key, build(row))
            ranks = range(row.get("gpus", 1))
            running.append((row, [start(lambda: measure(row, built[1], rank, args.device)) for rank in ranks]))
            continue
        row, started = running.pop(0)
        results = [row | finish(rank) for rank in started]
        if at_once > 1 and any(result.get("out_of_memory") for result in results):
            left.append(row)
            continue
        for result in results:
            with open(args.out, "a") as file:
                file.write(json.dumps(result) + "\n")
            shown = f"{result['peak'] / 2**20:10.1f} MiB" if "peak" in result else "error: " + result["error"].strip()[-200:]
            print(f"{row['row']:45} {shown}", flush=True)
    return left


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("file", help="a file with rows")
    arguments.add_argument("--rows", default="", help="a regular expression for the names of the rows")
    arguments.add_argument("--out", default="rows.jsonl")
    arguments.add_argument("--cpu", dest="device", action="store_const", const="cpu", default="cuda")
    arguments.add_argument("--at-once", type=int, default=4)
    arguments.add_argument("--seconds", type=int, default=460, help="no row starts after this time")
    args = arguments.parse_args()
    args.deadline = time.time() + args.seconds
    rows = [json.loads(line) for line in Path(args.file).read_text().splitlines()]
    given = ("row", "model", "config", "shape", "step", "gpus", "chosen")
    rows = {row["row"]: {key: row[key] for key in given if key in row} for row in rows if re.search(args.rows, row["row"])}
    Path(args.out).write_text("")
    # No CUDA context and no thread may exist in a process that forks.
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    several = [row for row in rows.values() if row.get("gpus", 1) > 1]
    left = measure_all([row for row in rows.values() if row not in several], args, args.at_once)
    left = measure_all(left + several, args, 1)
    print(f"{len(rows) - len(left)} of {len(rows)} rows were tried", flush=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Predicts the memory of the programs of published tables, measures it, and writes the table of `docs/book/src/predictions.md`.

    python crates/cli/proof/table.py predict target/release/gpumem [--only xmem,gpumemnet-vgg16-32] [--jobs 6]
    python crates/cli/proof/table.py measure target/release/gpumem [--jobs 3]
    python crates/cli/proof/table.py survive target/release/gpumem [--jobs 3]
    python crates/cli/proof/table.py page [FOLDER]

`predict` only makes dry runs; its results are committed before anything is measured. `measure` runs each program without gpumem. `survive`
runs each with `gpumem run --limit`, on the smallest GPU that was predicted and on one that is 3 % smaller. `all` is all four, one after the
other. The results are in `docs/predictions`, a line for each row of `published.py`; `--folder` names another folder. With several jobs,
programs run at the same time while their predictions together fit on the GPU. It needs an NVIDIA GPU on which NVML lists the processes,
PyTorch, torchvision and transformers 5; `page` needs none of them.
"""

import glob
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial

import harness
from harness import GIB, HERE, MIB, Failed, Skipped
from published import APART, ROWS, TABLES

REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
RESULTS, PAGE = os.path.join(REPOSITORY, "docs/predictions"), os.path.join(REPOSITORY, "docs/book/src/predictions.md")
START, END = "<!-- Written by crates/cli/proof/table.py: start -->", "<!-- end -->"
FIRST_GPU = {"CUDA_VISIBLE_DEVICES": "0"}
# Before a prediction counts the context, this is added for it.
CONTEXT = 527 * MIB
# Parts of the predicted smallest GPU: the program must run with the first one, and must fail with the second one.
SHARES = (1, 0.97)
LOCK = threading.Lock()


def results(folder, phase):
    """Returns the results of a phase by the names of their rows."""
    path = os.path.join(folder, phase + ".jsonl")
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        return {row.pop("row"): row for row in map(json.loads, file)}


def save(folder, phase, name, values):
    """Adds a result to the file of its phase, so that an interrupted command keeps those before it."""
    with LOCK:
        known = {**results(folder, phase), name: values}
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, phase + ".jsonl"), "w") as file:
            file.writelines(json.dumps({"row": row, **known[row]}) + "\n" for row in ROWS if row in known)


class Room:
    """The memory of the GPU, which programs share while their predictions fit in it."""

    def __init__(self):
        self.changed, self.total, self.free = threading.Condition(), None, None

    @contextmanager
    def taken(self, size):
        with self.changed:
            if self.total is None:
                # What the driver keeps for itself is not free.
                self.total = self.free = int(harness.smi("gpu=memory.total")[0][0]) * MIB - 2 * GIB
            size = min(size, self.total)
            self.changed.wait_for(lambda: size <= self.free)
            self.free -= size
        try:
            yield
        finally:
            with self.changed:
                self.free += size
                self.changed.notify_all()


ROOM = Room()


def options_of(proof, name, card=None):
    """Returns the options of a dry run, and its environment. Ranks with a GPU each are processes on the first GPU."""
    card = card or proof.arguments.card
    own = ["--card-per-process"] if ROWS[name].gpus > 1 else []
    return ["--dry", *own, *(["--card", card] if card else [])], FIRST_GPU if own else {}


def predict(proof, name):
    options, env = options_of(proof, name)
    ran = proof.run(ROWS[name].command, options, env=env)
    reports = [proof.report(file) for file in ran.files]
    devices = [device for report in reports for device in report["devices"]]
    blocks = max(device["peak_bytes"] or 0 for device in devices)
    peaks = [device["process_peak"] for device in devices if device["peak_bytes"]]
    process = max(peak["bytes"] for peak in peaks) if all(peaks) else None
    reserved, allocated = (max(rank[key] for rank in ran.said) for key in ("reserved", "allocated"))
    card = smallest_card(proof, name, process or blocks + CONTEXT, allocated) if ROWS[name].gpus == 1 else None
    unknown = sum(report["dry_run"]["unknown_values"] for report in reports)
    values = {"reserved": reserved, "driver": blocks, "process": process, "card": card, "unknown": unknown, "seconds": round(ran.seconds, 1)}
    # A prediction that takes longer than a minute is too slow.
    return "INFO" if ran.seconds <= 60 else False, values


def smallest_card(proof, name, enough, too_small):
    """Returns the size of the smallest GPU on which the program runs to its end and gets all that it requests: at most 2 % too large."""

    def fits(card):
        options, env = options_of(proof, name, f"{card}B")
        return tried(proof, name, options, env)

    for _ in range(10):
        if fits(enough):
            break
        # A smaller GPU may do, because the allocator divides its memory otherwise there.
        enough = int(enough * 1.01)
    else:
        raise Failed(f"it does not run on a GPU of {enough} bytes")
    middle = int(enough * 0.981)
    while enough - too_small > enough / 50:
        if fits(middle):
            enough = middle
        else:
            too_small = max(too_small, middle)
        middle = (too_small + enough) // 2
    # A smaller GPU may be enough although one in between is not, because the allocator divides its memory differently on each.
    while fits(int(enough * SHARES[1])):
        enough = int(enough * SHARES[1])
    return enough


def tried(proof, name, options, env=()):
    """Runs a program on another GPU. Returns whether it ran to its end and got all that it requested."""
    words, folder = proof.recording("--stacks", "none", *options)
    command = [*words, *ROWS[name].command]
    try:
        done = subprocess.run(command, env={**os.environ, **dict(env)}, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired:
        raise Failed(f"it took more than 240 s with {' '.join(options)}") from None
    rejected = [proof.report(file)["refused"] for file in glob.glob(f"{folder}/*.capture")]
    missed = sum(requests["count"] - requests["obtained_soon"] for requests in rejected if requests)
    if done.returncode and not missed:
        raise Failed(f"it ended with {done.returncode} with {' '.join(options)}, and got all that it requested: {done.stderr[-1500:]}")
    return not missed


def predicted(proof, name):
    values = results(proof.arguments.folder, "predicted").get(name)
    if not values:
        raise Skipped("it is not predicted yet")
    return values


@contextmanager
def on_gpu(proof, name):
    """Waits until the GPU has room for the program, and yields the program's predictions."""
    values, gpus = predicted(proof, name), len(harness.smi("gpu=index"))
    if gpus < ROWS[name].gpus:
        raise Skipped(f"{gpus} of {ROWS[name].gpus} GPUs")
    with ROOM.taken((values["process"] or values["driver"] + 2 * CONTEXT) + GIB):
        yield values


def measure(proof, name):
    with on_gpu(proof, name) as expected:
        ran = proof.run(ROWS[name].command)
    reserved, process = (max((rank[key] or 0 for rank in ran.said)) for key in ("reserved", "process"))
    # If the allocator gave memory back, the last reading of NVML is not the highest.
    is_highest = process and all(rank["at_end"] == rank["reserved"] for rank in ran.said)
    machine = {"gpu": ran.facts["gpu"], "driver": harness.smi("gpu=driver_version")[0][0], "torch": ran.facts["torch"]}
    values = {"reserved": reserved, "process": process if is_highest else None, "seconds": round(ran.seconds, 1), **machine}
    errors = {key: error_of(expected[key], values[key]) for key in ("reserved", "process")}
    result = "PASS" if errors["reserved"] == 0 else "NEAR" if abs(errors["reserved"]) <= 0.01 else False
    if errors["process"] is not None and abs(errors["process"]) > 0.005:
        result = "NEAR" if result and abs(errors["process"]) <= 0.01 else False
    return result, {**values, "errors": errors}


def error_of(predicted, measured):
    """Returns the error of a prediction as a part of the measurement. None if one of the two is not known."""
    return predicted / measured - 1 if predicted and measured else None


def survive(proof, name):
    if ROWS[name].gpus > 1:
        raise Skipped("only programs on one GPU")
    with on_gpu(proof, name) as expected:
        runs = [tried(proof, name, ["--limit", f"{int(expected['card'] * share)}B"]) for share in SHARES]
    return runs == [True, False], {"card": expected["card"], "runs": runs}


PHASES = {"predict": (predict, "predicted"), "measure": (measure, "measured"), "survive": (survive, "survived")}


def case(proof, name, phases):
    for phase in phases:
        function, file = PHASES[phase]
        result, values = function(proof, name)
        save(proof.arguments.folder, file, name, values)
        yield result, f"{phase} {name}", values


def main(phase):
    phases = PHASES if phase == "all" else [phase]
    options = {
        "--card": {"help": "the GPU of the dry runs; without this option, that of the machine"},
        "--folder": {"default": RESULTS, "help": "the folder of the results"},
    }
    try:
        harness.main(__doc__, {name: partial(case, name=name, phases=phases) for name in ROWS}, options)
    finally:
        if phase == "all":
            write_page(RESULTS)


def mib(size):
    return f"{size / MIB:,.0f}" if size else ""


def percent(part, digits=2):
    return "" if part is None else "0" if part == 0 else f"{part:+.{digits}%}".replace("%", " %")


def line(name, predicted, measured):
    """Returns the line of a row in Markdown."""
    row = ROWS[name]
    label = ", ".join(f"batch {word}" if word.isdecimal() else word for word in row.name.split("-"))
    cells = [label, f"{row.measured:,.0f}" if row.measured else ""]
    cells.append("; ".join(f"{estimator} {percent(error, 1)}" for estimator, error in row.errors.items()))
    for key in ("reserved", "process"):
        values = predicted.get(key), measured.get(key)
        cells += [*map(mib, values), percent(error_of(*values))]
    return f"| {' | '.join([*cells, mib(predicted.get('card'))])} |"


def summary(predicted, measured, survived):
    """Returns the sentences above the table."""
    if not measured:
        return ["Nothing is measured yet." if predicted else "Nothing is predicted yet."]
    pairs = [(predicted[name], measured[name]) for name in measured if name in predicted]
    errors = {key: [error_of(before[key], after[key]) for before, after in pairs] for key in ("reserved", "process")}
    known = {key: [abs(error) for error in found if error is not None] for key, found in errors.items()}
    machines = sorted({f"{row['gpu']}, driver {row['driver']}, PyTorch {row['torch']}" for row in measured.values()})
    text = [f"Measured on {'; '.join(machines)}."]
    if known["reserved"]:
        equal, worst = known["reserved"].count(0), max(known["reserved"])
        text.append(f"Reserved: equal to the byte in {equal} of {len(known['reserved'])} programs; the largest error is {worst:.2%}.")
    if known["process"]:
        near = [sum(error <= limit for error in known["process"]) for limit in (0.005, 0.01)]
        count, worst = len(known["process"]), max(known["process"])
        text.append(f"The process: within 0.5 % in {near[0]} of {count}, within 1 % in {near[1]}; the largest error is {worst:.2%}.")
    seconds = max(row["seconds"] for row in predicted.values())
    text.append(f"A dry run took at most {seconds:.0f} s.")
    if survived:
        # A program that failed for another reason has no result, and counts here.
        good = sum(row["runs"] == [True, False] for row in survived.values())
        count = sum(row["card"] is not None for row in predicted.values())
        text.append(f"{good} of {count} programs ran to their end on the smallest GPU that was predicted, and failed on one 3 % smaller.")
    return [" ".join(text).replace("%.", " %.")]


def block(folder):
    """Returns what the page says about the results of a folder."""
    predicted, measured, survived = (results(folder, phase) for phase in ("predicted", "measured", "survived"))
    lines = summary(predicted, measured, survived)
    for name, table in TABLES.items():
        rows = [row for row in predicted if ROWS[row].table == name]
        if not rows:
            continue
        published = "published, process" if table.is_process else "published, reserved"
        head = ["program", published, "published estimators", "reserved, predicted", "measured", "error", "process, predicted"]
        head += ["measured", "error", "smallest GPU"]
        lines += ["", f"{table.title}. In MiB:", "", f"| {' | '.join(head)} |", "|---|--:|---|" + "--:|" * 7]
        lines += [line(row, predicted[row], measured.get(row, {})) for row in rows]
    lines += ["", "These rows are not repeated here:", "", "| program | published | needs |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in APART]
    return "\n".join(lines)


def write_page(folder):
    with open(PAGE) as file:
        before, _, rest = file.read().partition(START)
    _, _, after = rest.partition(END)
    with open(PAGE, "w") as file:
        file.write(f"{before}{START}\n\n{block(folder)}\n\n{END}{after}")


if __name__ == "__main__":
    PHASE = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if PHASE == "page":
        write_page(sys.argv[1] if len(sys.argv) > 1 else RESULTS)
    elif PHASE in (*PHASES, "all"):
        main(PHASE)
    else:
        sys.exit(__doc__)

#!/usr/bin/env python3
"""Checks dry runs with several cards, and processes that share one card, with the real driver.

    python crates/cli/proof/cards.py target/release/gpumem [--only small,two]

It needs an NVIDIA GPU and PyTorch; `two`, and the cases that compare NCCL's ranks with a real run's, need two GPUs.
"""

import shlex
import subprocess
from functools import partial

import harness
from harness import GIB, HERE, WITHOUT_TORCH, allocator, compared, program

FIRST_GPU = {"CUDA_VISIBLE_DEVICES": "0"}
EIGHT = ["--dry", "--cards", "8", "--card", "24GiB"]
ALONE = ["--dry", "--card", "80GiB", "--card-per-process"]


def check(proof, name, command, options, equal, gpus=1):
    """Checks that the program prints the values of a table."""
    if gpus > 1:
        harness.need_gpus(gpus)
    said = proof.run(command, options).facts
    is_right, pairs = compared({}, said, equal)
    yield is_right, name, {**pairs, "said": said}


def stages(proof, name, alone, env=()):
    """Checks that each stage of a model reserves as much on its own card as when it runs without the others on a single card."""
    cards = proof.run(program("stages"), EIGHT, env=env).facts["cards"]
    single = {stage: proof.run(program("stages", alone=stage), ["--dry", "--card", "24GiB"], env=env).facts["cards"] for stage in alone}
    yield len(cards) == 8 and all(reserved[0] == cards[stage] for stage, reserved in single.items()), name, {"cards": cards, "alone": single}


def ranks_on_cards(proof):
    """Checks that two ranks with FSDP and NCCL on two cards reserve as much as if each had a GPU to itself."""
    joined = reserved(proof, SHARDED, ["--dry", "--card", "80GiB", "--cards", "2"])
    apart = reserved(proof, SHARDED, ALONE, FIRST_GPU)
    yield len(joined) == 2 and joined == apart, "ranks_on_cards", {"on two cards": joined, "on one GPU each": apart}


def ranks(proof, name, command):
    """Compares two ranks as two processes, each with its own card: a dry run on one GPU, and a real run with NCCL on two GPUs."""
    dry, real = reserved(proof, command, ALONE, FIRST_GPU), reserved(proof, command, None)
    yield len(dry) == 2 and dry == real, name, {"dry": dry, "real": real}


def reserved(proof, command, options, env=()):
    return sorted(rank["reserved"] for rank in proof.run(command, options, env=env).said)


def share(proof, name, options):
    """Checks that only one of two processes gets 10 GiB on a shared card of 16 GiB."""
    first, second = (shlex.join(program("full", seconds=seconds)) for seconds in (12, 0))
    said = proof.run(["sh", "-c", f"{first} & sleep 9; {second}; wait"], options).said
    yield [process["has"] for process in said] == [10 * GIB, 0], name, {"said": said}


def large(proof, name):
    """Runs all ranks of a large model on one GPU."""
    command = [*program("", ranks=8)[:-3], f"{HERE}/large.py", name, "8"]
    ran = proof.run(command, ["--dry", "--card", "1TiB", "--card-per-process", "--stacks", "none"], env=FIRST_GPU)
    yield len(ran.said) == 8, name, {"seconds": round(ran.seconds), "said": ran.said}


def small(proof):
    """Trains GPT-2 on a card of 24 GiB, in dry runs on a GPU that has 4 GiB, 2 GiB and 1 GiB free."""
    found = {}
    for gib in (4, 2, 1):
        filled = subprocess.Popen(program("fill", left=gib * GIB), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            free = int(filled.stdout.readline())
            said = proof.run(program("gpt2"), ["--dry", "--card", "24GiB"]).facts
        finally:
            filled.communicate("")
        found[free] = [said["reserved"], said["allocated"]]
    yield len(found) == 3 and len(set(map(tuple, found.values()))) == 1, "small", {"by free bytes": found}


SHARDED = program("ranks", ranks=2, backend="nccl", size=8192, layers=12, bias=False, sharded=True)
TWO = {"total": [24 * GIB] * 2, "count": 2, "sum": 10}
TABLE = {
    # PyTorch uses the two cards of a machine.
    "two": dict(command=program("two"), options=["--dry", "--card", "24GiB"], equal=TWO, gpus=2),
    # The driver's own functions with two cards. The driver rejects requests with CUDA_ERROR_OUT_OF_MEMORY.
    "driver": dict(
        command=program("driver", file=WITHOUT_TORCH),
        options=["--dry", "--cards", "2", "--card", "12GiB"],
        equal={"totals": [12 * GIB] * 2, "refused": 2},
    ),
    # PyTorch sees eight cards on one GPU.
    **{
        f"eight_cards-{name}": dict(command=program(f"eight_{name}"), options=EIGHT, equal={"found": "expected"})
        for name in ("sees", "small", "full", "parallel")
    },
    # The weights of Llama 70B on eight cards of 80 GiB, and a forward pass.
    "split": dict(command=program("split"), options=["--dry", "--cards", "8", "--card", "80GiB"], equal={"has": "expected"}),
}
CASES = {
    "small": small,
    **{name: partial(check, name=name, **row) for name, row in TABLE.items()},
    "stages": partial(stages, name="stages", alone=(0, 4, 7)),
    "stages_expandable": partial(stages, name="stages_expandable", alone=(4,), env=allocator("expandable_segments:True")),
    "stages_async": partial(stages, name="stages_async", alone=(4,), env=allocator("backend:cudaMallocAsync")),
    "ranks_on_cards": ranks_on_cards,
    "share_dry": partial(share, name="share_dry", options=["--dry", "--card", "16GiB"]),
    "share_limit": partial(share, name="share_limit", options=["--limit", "16GiB"]),
    "ddp_gloo": partial(ranks, name="ddp_gloo", command=program("ranks", ranks=2, backend="gloo")),
    "ddp_nccl": partial(ranks, name="ddp_nccl", command=program("ranks", ranks=2, backend="nccl")),
    "fsdp_nccl": partial(ranks, name="fsdp_nccl", command=SHARDED),
    "llama70": partial(large, name="llama70"),
    "llama405": partial(large, name="llama405"),
}

if __name__ == "__main__":
    # `small` fills the GPU.
    harness.main(__doc__, CASES, alone={"small"})

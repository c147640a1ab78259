#!/usr/bin/env python3
"""Compares dry runs with real runs of the same programs.

    python crates/cli/proof/dry.py target/release/gpumem [--only gpt2,resnet] [--card 140GiB] [--jobs 5]

Each program runs with `gpumem run --dry` first, and then without gpumem. A row is PASS if both runs got the same memory from the driver,
and NEAR if they differ by at most 2 %. The sizes of OTHERS depend on values: a row of these is SAID if the report of the dry run says that
values were not computed. The script needs an NVIDIA GPU and PyTorch; `jax` and `cupy` need these packages, `cpp` needs nvcc.
"""

from functools import partial

import harness
from harness import WITHOUT_TORCH, allocator, program

# The programs that use only PyTorch.
PROGRAMS = {
    "gpt2": program("gpt2"),
    "gpt2_checkpoint": program("gpt2", checkpoint=True),
    "gpt2_autocast": program("gpt2", autocast="bfloat16"),
    "gpt2_clip": program("gpt2", layers=6, steps=3, lengths=[256], autocast="float16", clip=True),
    "llama": program("llama"),
    "generate": program("generate"),
    "resnet": program("vision", name="resnet50", sizes=[224, 160, 288, 224]),
    "resnet_benchmark": program("vision", name="resnet50", sizes=[224, 160], benchmark=True),
    "vit": program("vision", name="vit_l_16", sizes=[224], batch=8),
    "vgg": program("vision", name="vgg16", sizes=[224], batch=8),
    "mobilenet": program("vision", name="mobilenet_v3_large", sizes=[224, 192], batch=32),
    **{name: program(name) for name in ("blocks", "streams", "empty_cache", "compiled", "graph", "loader", "masks", "out_of_memory", "moe")},
}


# The sizes or the kernels of these depend on values.
OTHERS = ("graph_network", "recommender", "solvers", "chosen", "sparse", "experts", "detection", "segmentation", "adversarial", "beams",
          "speculative", "ragged")


def compare(proof, name, command, env=(), code=0, may_say=False):
    command = command(proof) if callable(command) else command
    card = ["--card", proof.arguments.card] if proof.arguments.card else []
    dry = proof.run(command, ["--dry", *card], code, env)
    real = proof.run(command, None, code, env)
    result, by = harness.near(dry.facts["reserved"], real.facts["reserved"])
    seconds = [round(ran.seconds, 1) for ran in (dry, real)]
    values = {"dry": dry.facts, "real": real.facts, "by": by, "seconds": seconds}
    if result != "PASS":
        # Some programs differ from run to run.
        values["again"] = proof.run(command, None, code, env).facts
        result = "PASS" if dry.facts["reserved"] == values["again"]["reserved"] else result
    reports = [proof.report(file) for file in dry.files]
    if len(reports) == 1 and (said := reports[0]["dry_run"]):
        values["unknown"] = [said["unknown_values"], [place["place"] for place in said["places"][:3]]]
        if may_say and result != "PASS" and said["unknown_values"]:
            result = "SAID"
    yield result, name, values


CASES = {name: partial(compare, name=name, command=command) for name, command in PROGRAMS.items()}
# Two ranks with gloo on one card.
RANKS = program("ranks", ranks=2, backend="gloo", size=2048)
CASES["ddp"] = partial(compare, name="ddp", command=RANKS, env={"CUDA_VISIBLE_DEVICES": "0"})
for name in OTHERS:
    CASES[name] = partial(compare, name=name, command=program(name, file="other_programs.py"), may_say=True)
for library in ("jax", "cupy"):
    CASES[library] = partial(compare, name=library, command=program(library, file=WITHOUT_TORCH))
for name in ("gpt2", "resnet", "blocks", "streams"):
    case = f"{name}:expandable"
    CASES[case] = partial(compare, name=case, command=PROGRAMS[name], env=allocator("expandable_segments:True"))
CASES["cpp"] = partial(compare, name="cpp", command=harness.Proof.cpp, code=7)

if __name__ == "__main__":
    harness.main(__doc__, CASES, {"--card": {"help": "the card of the dry runs"}})

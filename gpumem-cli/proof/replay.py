#!/usr/bin/env python3
"""Compares `gpumem what-if RECORDING` with real runs under the settings of its rows.

    python gpumem-cli/proof/replay.py target/release/gpumem [--only gpt2,resnet] [--keep FOLDER]

Each program of `dry.py` that has only PyTorch runs once with `gpumem run --torch`, and then without gpumem under each setting. The recording
is replayed. For each row a line PASS (PyTorch reserved as much, to the byte), NEAR (within 2 %) or FAIL is printed. So is one for its
smallest card: with `gpumem run --limit`, the program must run on a card that is 2 % larger, and should not on one that is 10 % smaller. It needs
an NVIDIA GPU and PyTorch.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

import dry

PROGRAMS = "gpt2,gpt2_checkpoint,llama,generate,resnet,vit,blocks,streams,empty_cache,compiled,graph,masks".split(",")


def what_if(gpumem, recording):
    done = subprocess.run([gpumem, "what-if", "--json", recording], capture_output=True, text=True)
    if not done.stdout:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def word(is_equal, by):
    return "PASS" if is_equal else "NEAR" if abs(by) <= 0.02 else "FAIL"


def compare(gpumem, folder, name):
    """The words and the lines of one program."""
    command = dry.command_of(name, folder)
    recording = os.path.join(folder, f"{name}.capture")
    # What a program compiles is compiled again in each run.
    plain = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    own, why, _ = dry.ran([gpumem, "run", "--torch", "-o", recording, "--", *command], plain)
    if not own:
        return [("FAIL", f"{name}: it cannot be recorded: {why}")]
    answer = what_if(gpumem, recording)
    modelled = answer["modelled"]
    exact = modelled["replayed_bytes"] == modelled["reserved_bytes"]
    lines = [("PASS" if exact else "FAIL", f"{name}: the replay has {modelled['replayed_bytes']}, the recording {modelled['reserved_bytes']}")]
    for row in answer["rows"]:
        setting = row["environment"].partition("=")[2]
        environment = {**plain, "PYTORCH_CUDA_ALLOC_CONF": setting}
        real, why, _ = dry.ran(command, environment)
        if not real:
            lines.append(("FAIL", f"{name} {setting}: it does not run: {why}"))
            continue
        most = row["most_bytes"] or 0
        by = (most - real["reserved"]) / max(real["reserved"], 1)
        lines.append((word(most == real["reserved"], by), f"{name} {setting or 'as it is'}: replayed {most}, real {real['reserved']}, {by:+.3%}"))
        card = row["smallest_card_bytes"]
        for share, has_to_run in ((1.02, True), (0.9, False)):
            limited = [gpumem, "run", "--limit", f"{int(card * share)}B", "-o", os.path.join(folder, "limited.capture"), "--", *command]
            runs = bool(dry.ran(limited, environment)[0])
            words = f"{'runs' if runs else 'does not run'} with {share:.0%} of its smallest card, {card}"
            lines.append(("PASS" if runs == has_to_run else "FAIL" if has_to_run else "NEAR", f"{name} {setting or 'as it is'}: {words}"))
    return lines


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("gpumem")
    parser.add_argument("--only", default=",".join(PROGRAMS))
    parser.add_argument("--keep", help="where the recordings are kept")
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        if arguments.keep:
            folder = arguments.keep
            os.makedirs(folder, exist_ok=True)
        for name in arguments.only.split(","):
            for result, line in compare(os.path.abspath(arguments.gpumem), folder, name):
                print(result, line, flush=True)
                failed += result == "FAIL"
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

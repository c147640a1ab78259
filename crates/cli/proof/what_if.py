#!/usr/bin/env python3
"""Compares the tables of `gpumem what-if` with real runs under the settings of their rows.

    python crates/cli/proof/what_if.py target/release/gpumem [--tables dry] [--only gpt2,resnet] [--jobs 6]

There are two tables of each program of `dry.py` that has only PyTorch: one of dry runs, and one of a recording that `gpumem run --torch` made.
The program also runs without gpumem under each setting. For each row of the recording a line PASS (PyTorch reserved as much, to the byte), NEAR
(within 2 %) or FAIL is printed. So is one for the smallest card of each row: with `gpumem run --limit`, the program has to run on a card that is 3 % larger, and not on one
that is 3 % smaller. It needs an NVIDIA GPU and PyTorch.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import dry

PROGRAMS = "gpt2,gpt2_checkpoint,llama,generate,resnet,vit,blocks,streams,empty_cache,compiled,graph,masks".split(",")


def what_if(gpumem, *arguments):
    done = subprocess.run([gpumem, "what-if", "--json", *arguments], capture_output=True, text=True)
    return json.loads(done.stdout) if done.stdout else sys.exit(done.stderr)


def word(is_equal, by):
    return "PASS" if is_equal else "NEAR" if abs(by) <= 0.02 else "FAIL"


def compare(gpumem, folder, name, jobs, tables):
    """The words and the lines of one program."""
    command = dry.command_of(name, folder)
    # Each run compiles its code again.
    plain = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    rows = []
    if "dry" in tables:
        begun = time.time()
        answer = what_if(gpumem, "--jobs", str(jobs), "--", *command)
        yield "INFO", f"{name}: dry, {time.time() - begun:.0f} s: {json.dumps(answer.get('best'))}"
        rows += [("dry", row) for row in answer["rows"]]
    if "recording" in tables:
        recording = os.path.join(folder, f"{name}.capture")
        own, why, _ = dry.ran([gpumem, "run", "--torch", "-o", recording, "--", *command], plain)
        if not own:
            yield "FAIL", f"{name}: it cannot be recorded: {why}"
            return
        answer = what_if(gpumem, recording)
        modelled = answer["modelled"]
        exact = modelled["replayed_bytes"] == modelled["reserved_bytes"]
        yield "PASS" if exact else "FAIL", f"{name}: the replay has {modelled['replayed_bytes']}, the recording {modelled['reserved_bytes']}"
        rows += [("recording", row) for row in answer["rows"]]

    def environment(setting):
        return {**plain, "PYTORCH_CUDA_ALLOC_CONF": setting}

    def runs_with(setting, card):
        output = os.path.join(folder, f"{name}-{card}-{abs(hash(setting))}.capture")
        return bool(dry.ran([gpumem, "run", "--limit", f"{card}B", "-o", output, "--", *command], environment(setting))[0])

    with ThreadPoolExecutor(jobs) as pool:
        settings = dict.fromkeys(row["environment"].partition("=")[2] for _, row in rows)
        reals = {setting: pool.submit(lambda of=setting: dry.ran(command, environment(of))[0]) for setting in settings}
        limited = []
        for table, row in rows:
            setting, card = row["environment"].partition("=")[2], row["smallest_card_bytes"] or 0
            for share in (1.03, 0.97):
                limited.append((table, setting, card, share, pool.submit(runs_with, setting, int(card * share))))
        for table, row in rows:
            setting, most = row["environment"].partition("=")[2], row["most_bytes"] or 0
            real = reals[setting].result()
            if not real:
                yield "FAIL", f"{name} {setting}: it does not run"
                continue
            by = (most - real["reserved"]) / max(real["reserved"], 1)
            # A dry run counts the memory of other libraries, and a recording only the cache.
            said = "INFO" if table == "dry" else word(most == real["reserved"], by)
            yield said, f"{name} {setting or 'as it is'}: {table} {most}, real {real['reserved']}, {by:+.3%}"
        for table, setting, card, share, runs in limited:
            words = f"{'runs' if runs.result() else 'does not run'} with {share:.0%} of the smallest card, {card} ({table})"
            yield "PASS" if runs.result() == (share > 1) else "FAIL", f"{name} {setting or 'as it is'}: {words}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("gpumem")
    parser.add_argument("--only", default=",".join(PROGRAMS))
    parser.add_argument("--tables", default="dry,recording")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep", help="where the recordings are kept")
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        if arguments.keep:
            folder = arguments.keep
            os.makedirs(folder, exist_ok=True)
        for name in arguments.only.split(","):
            for result, line in compare(os.path.abspath(arguments.gpumem), folder, name, arguments.jobs, arguments.tables):
                print(result, line, flush=True)
                failed += result == "FAIL"
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

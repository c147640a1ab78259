#!/usr/bin/env python3
"""Compares the tables of `gpumem what-if` with real runs under the settings of their rows.

    python crates/cli/proof/what_if.py target/release/gpumem [--tables dry] [--only gpt2,resnet] [--jobs 6]

There are two tables of each program of `dry.py` that only uses PyTorch: one of dry runs, and one of a recording that `gpumem run --torch`
made. The program also runs without gpumem under each setting. A row of the recording is PASS if PyTorch reserved as much, and NEAR if they
differ by at most 2 %. For the smallest card of each row, `gpumem run --limit` must run the program on a card that is 3 % larger, and must
fail on one that is 3 % smaller. It needs an NVIDIA GPU and PyTorch.
"""

import json
import shutil
from functools import partial

import harness
from dry import PROGRAMS
from harness import Failed, allocator


def compare(proof, name):
    command, tables, rows = PROGRAMS[name], proof.arguments.tables, []
    if "dry" in tables:
        answer = json.loads(proof.ask("what-if", "--json", "--jobs", str(proof.jobs), "--", *command))
        yield "INFO", f"{name}: dry", {"best": answer.get("best")}
        rows += [("dry", row) for row in answer["rows"]]
    if "recording" in tables:
        recording = proof.run(command, ["--torch"]).files[0]
        if proof.arguments.keep:
            shutil.copy(recording, f"{proof.arguments.keep}/{name}.capture")
        answer = json.loads(proof.ask("what-if", "--json", recording))
        replayed, reserved = (answer["modelled"][key] for key in ("replayed_bytes", "reserved_bytes"))
        yield replayed == reserved, f"{name}: replay", {"replayed": replayed, "recorded": reserved}
        rows += [("recording", row) for row in answer["rows"]]

    def ran(wanted):
        """Returns the memory that PyTorch reserved, or why the program does not run, with a setting and a card."""
        setting, card = wanted
        options = None if card is None else ["--limit", f"{card}B"]
        try:
            return proof.run(command, options, env=allocator(setting)).facts["reserved"]
        except Failed as error:
            return str(error)

    rows = [(table, row["environment"].partition("=")[2], row) for table, row in rows]
    cards = {setting: [None] for _, setting, _ in rows}
    for _, setting, row in rows:
        cards[setting] += [int((row["smallest_card_bytes"] or 0) * share) for share in SHARES]
    wanted = list(dict.fromkeys((setting, card) for setting, all in cards.items() for card in all))
    found = dict(zip(wanted, proof.map(ran, wanted)))
    for table, setting, row in rows:
        row_name, most, real = f"{name} {setting or 'as it is'}", row["most_bytes"] or 0, found[setting, None]
        result, by = harness.near(most, real) if isinstance(real, int) else ("FAIL", None)
        # A dry run counts the memory of other libraries, and a recording only the cache.
        result = "INFO" if table == "dry" and by else result
        yield result, row_name, {"table": table, "most": most, "real": real, "by": by}
        for share in SHARES:
            card = int((row["smallest_card_bytes"] or 0) * share)
            runs = isinstance(found[setting, card], int)
            yield runs == (share > 1), row_name, {"table": table, "card": card, "share": share, "runs": runs}


# Parts of the smallest card: the program must run with the first one, and must fail with the second one.
SHARES = (1.03, 0.97)
NAMES = ("gpt2", "gpt2_checkpoint", "llama", "generate", "resnet", "vit", "blocks", "streams", "empty_cache", "compiled", "graph", "masks")
CASES = {name: partial(compare, name=name) for name in NAMES}
OPTIONS = {
    "--tables": {"default": "dry,recording", "help": "dry, recording or both"},
    "--keep": {"help": "a folder where the recordings are kept"},
}

if __name__ == "__main__":
    # Each case runs up to `--jobs` programs at the same time.
    harness.main(__doc__, CASES, OPTIONS, alone=CASES)

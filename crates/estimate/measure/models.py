#!/usr/bin/env python3
"""Writes `tests/modules.jsonl` again: for each model in it, the number of parameters that torchvision or transformers gives it. Models that
have `modules` also get the parameters of each module. To add a model, add a line with its name and its `config`. This needs no GPU, no
network and little memory: the models are built without values."""

import json
from pathlib import Path

import torch
import torchvision
import transformers

FILE = Path(__file__).parent.parent / "tests" / "modules.jsonl"


def lines():
    """The models by name."""
    return {line["name"]: line for line in map(json.loads, FILE.read_text().splitlines()[1:])}


def build(config, name=None):
    """The model of a configuration, or of a name in torchvision."""
    if config is None:
        return getattr(torchvision.models, name)(weights=None)
    kind = getattr(transformers, config["architectures"][0])
    # The class changes the fields that it is given. T5 needs the start token to shift labels to the right.
    fields = {"decoder_start_token_id": 0} if "T5" in kind.__name__ else {}
    return kind(kind.config_class.from_dict(fields | json.loads(json.dumps(config))))


def modules(model):
    """The parameters of each module."""
    sums = {}
    for name, tensor in model.named_parameters():
        module = name.rpartition(".")[0]
        sums[module] = sums.get(module, 0) + tensor.numel()
    return sums


def main():
    transformers.logging.set_verbosity_error()
    result = [{"torch": torch.__version__, "torchvision": torchvision.__version__, "transformers": transformers.__version__}]
    for name, line in lines().items():
        with torch.device("meta"):
            model = build(line.get("config"), name)
        line["parameters"] = sum(tensor.numel() for tensor in model.parameters())
        if "modules" in line:
            line["modules"] = modules(model)
        result.append(line)
    FILE.write_text("".join(json.dumps(line) + "\n" for line in result))


if __name__ == "__main__":
    main()

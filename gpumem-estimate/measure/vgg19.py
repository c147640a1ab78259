#!/usr/bin/env python3
"""Prints the lines of `tests/vgg19.txt`: the output of each layer of torchvision's VGG19 for one image, and its bytes; 0 if it has
the memory of the input."""

import torch
import torchvision

model = torchvision.models.vgg19(weights=None).eval()


def line(path, input, output):
    is_same = input.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
    print(path, f"({', '.join(map(str, output.shape))})", 0 if is_same else output.nbytes)


def hook(path):
    return lambda _, inputs, output: line(path, inputs[0], output)


for path, module in model.named_modules():
    if not list(module.children()):
        module.register_forward_hook(hook(path))
    if path == "classifier":
        # `torch.flatten` is no module.
        module.register_forward_pre_hook(lambda _, inputs: line("flatten", inputs[0], inputs[0]))
with torch.no_grad():
    model(torch.zeros(1, 3, 224, 224))

#!/usr/bin/env python3
"""Prints the number of parameters of known models, as torchvision and transformers build them: the lines of
`tests/parameters.txt`. It needs no GPU, no network and little memory: the models are built without values."""

import sys

import torch
import torchvision
import transformers as t

torchvision_models = """alexnet vgg11 vgg13 vgg16 vgg19 vgg11_bn vgg13_bn vgg16_bn vgg19_bn resnet18 resnet34 resnet50 resnet101
resnet152 wide_resnet50_2 wide_resnet101_2 resnext50_32x4d resnext101_32x8d resnext101_64x4d mobilenet_v2 convnext_tiny convnext_small
convnext_base convnext_large vit_b_16 vit_b_32 vit_l_16 vit_l_32""".split()


def llama(**sizes):
    return t.LlamaForCausalLM, t.LlamaConfig(**sizes)


def gpt2(size, layers, heads):
    return t.GPT2LMHeadModel, t.GPT2Config(n_embd=size, n_layer=layers, n_head=heads)


def bert(size, layers, heads):
    return t.BertForMaskedLM, t.BertConfig(
        hidden_size=size, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * size
    )


def vit(size, layers, heads, patch):
    config = t.ViTConfig(
        hidden_size=size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * size,
        patch_size=patch,
        num_labels=1000,
    )
    return t.ViTForImageClassification, config


transformers_models = {
    "gpt2": gpt2(768, 12, 12),
    "gpt2-medium": gpt2(1024, 24, 16),
    "gpt2-large": gpt2(1280, 36, 20),
    "gpt2-xl": gpt2(1600, 48, 25),
    "bert-base": bert(768, 12, 12),
    "bert-large": bert(1024, 24, 16),
    "t5-small": (t.T5ForConditionalGeneration, t.T5Config()),
    "vit-b": vit(768, 12, 12, 16),
    "vit-l": vit(1024, 24, 16, 16),
    "llama-1b": llama(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    ),
    "llama-3b": llama(
        vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "llama-2-7b": llama(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    ),
    "llama-2-13b": llama(
        vocab_size=32000, hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40,
    ),
    "llama-2-70b": llama(
        vocab_size=32000, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "llama-3-8b": llama(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "llama-3-70b": llama(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8,
    ),
}

print(f"# torch {torch.__version__}, torchvision {torchvision.__version__}, transformers {t.__version__}")
with torch.device("meta"):
    for name in torchvision_models:
        model = getattr(torchvision.models, name)(weights=None)
        print("torchvision", name, sum(tensor.numel() for tensor in model.parameters()))
        sys.stdout.flush()
    for name, (kind, config) in transformers_models.items():
        model = kind(config)
        if getattr(config, "tie_word_embeddings", False):
            model.tie_weights()
        print("transformers", name, sum(tensor.numel() for tensor in model.parameters()))

#!/usr/bin/env python3
"""Prints the number of parameters of known models, as torchvision and transformers build them: the lines of
`tests/parameters.txt`. It needs no GPU, no network and little memory: the models are built without values. `measure.py`
builds the same models with values."""

import sys

TORCHVISION = """alexnet vgg11 vgg13 vgg16 vgg19 vgg11_bn vgg13_bn vgg16_bn vgg19_bn resnet18 resnet34 resnet50 resnet101
resnet152 wide_resnet50_2 wide_resnet101_2 resnext50_32x4d resnext101_32x8d resnext101_64x4d mobilenet_v2 convnext_tiny convnext_small
convnext_base convnext_large vit_b_16 vit_b_32 vit_l_16 vit_l_32""".split()

# The vocabulary, the size, the size inside the MLP, the blocks, the heads, the heads of keys, the size of a head, and whether
# the head has the weights of the embedding.
LLAMA = {
    "llama-160m": (32000, 768, 2048, 12, 12, 4, 64, False),
    "llama-1b": (128256, 2048, 8192, 16, 32, 8, 64, True),
    "llama-3b": (128256, 3072, 8192, 28, 24, 8, 128, True),
    "llama-2-7b": (32000, 4096, 11008, 32, 32, 32, 128, False),
    "llama-2-13b": (32000, 5120, 13824, 40, 40, 40, 128, False),
    "llama-2-70b": (32000, 8192, 28672, 80, 64, 8, 128, False),
    "llama-3-8b": (128256, 4096, 14336, 32, 32, 8, 128, False),
    "llama-3-70b": (128256, 8192, 28672, 80, 64, 8, 128, False),
}
# The size, the blocks and the heads.
OTHERS = {
    "gpt2": (768, 12, 12),
    "gpt2-medium": (1024, 24, 16),
    "gpt2-large": (1280, 36, 20),
    "gpt2-xl": (1600, 48, 25),
    "bert-base": (768, 12, 12),
    "bert-large": (1024, 24, 16),
    "t5-small": (512, 6, 8),
    "t5-base": (768, 12, 12),
    "vit-b": (768, 12, 12),
    "vit-l": (1024, 24, 16),
}
TRANSFORMERS = OTHERS | LLAMA


def configuration(name):
    """The class of a model of transformers, and its configuration."""
    import transformers as t

    if name in LLAMA:
        vocabulary, size, inner, layers, heads, key_value_heads, head_size, is_tied = LLAMA[name]
        return t.LlamaForCausalLM, t.LlamaConfig(
            vocab_size=vocabulary, hidden_size=size, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=key_value_heads, head_dim=head_size, tie_word_embeddings=is_tied, max_position_embeddings=8192,
        )
    size, layers, heads = OTHERS[name]
    if name.startswith("gpt2"):
        return t.GPT2LMHeadModel, t.GPT2Config(n_embd=size, n_layer=layers, n_head=heads)
    if name.startswith("t5"):
        # The start token is needed to shift labels to the right.
        start = {"decoder_start_token_id": 0}
        config = t.T5Config(d_model=size, d_ff=4 * size, num_layers=layers, num_heads=heads, **start)
        return t.T5ForConditionalGeneration, config
    sizes = dict(hidden_size=size, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * size)
    if name.startswith("bert"):
        return t.BertForMaskedLM, t.BertConfig(**sizes)
    return t.ViTForImageClassification, t.ViTConfig(num_labels=1000, **sizes)


def main():
    import torch
    import torchvision
    import transformers

    print(f"# torch {torch.__version__}, torchvision {torchvision.__version__}, transformers {transformers.__version__}")
    with torch.device("meta"):
        for name in TORCHVISION:
            model = getattr(torchvision.models, name)(weights=None)
            print("torchvision", name, sum(tensor.numel() for tensor in model.parameters()))
            sys.stdout.flush()
        for name in TRANSFORMERS:
            kind, config = configuration(name)
            model = kind(config)
            if getattr(config, "tie_word_embeddings", False):
                model.tie_weights()
            print("transformers", name, sum(tensor.numel() for tensor in model.parameters()))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Trains a large model for two steps, to find out in a dry run how much memory it needs.

    gpumem run --dry --card 4TiB --torch -- python crates/cli/proof/large.py llama405 8

The number is how many ranks share the model (FSDP); for `dit`, a diffusion transformer, it is the batch. The process is rank 0, and
PyTorch's fake process group moves no data. One line of JSON contains the peak of the memory that the allocator got from the driver, and
the peak of the tensors. `llama8` and `dit` also run for real on a large card. With `torchrun`, all ranks are processes with NCCL, on the
first GPU:

    gpumem run --dry --card 4TiB --card-per-process -- torchrun --nproc-per-node 8 crates/cli/proof/large.py llama405 8
"""

import json
import os
import sys

import torch
from torch import nn

from programs import figures, llama_model, trained

LLAMA = {
    "llama8": (4096, 14336, 32, 32),
    "llama70": (8192, 28672, 80, 64),
    "llama405": (16384, 53248, 126, 128),
}


def decoder(name, ranks):
    """Trains Llama 3 or Mixtral 8x7B in bf16, with AdamW and checkpoints."""
    with torch.device("meta"):
        if name == "mixtral":
            from transformers import MixtralConfig, MixtralForCausalLM

            model = MixtralForCausalLM(MixtralConfig()).to(torch.bfloat16)
        else:
            model = llama_model(*LLAMA[name], keys=8, words=128256, max_position_embeddings=8192)
    if ranks > 1:
        from torch.distributed import init_process_group
        from torch.distributed.fsdp import fully_shard
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if "RANK" in os.environ:
            # NCCL rejects two ranks of one machine on one GPU.
            os.environ["NCCL_HOSTID"] = f"machine{os.environ['RANK']}"
            torch.cuda.set_device(0)
            init_process_group("nccl")
        else:
            init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    model.to_empty(device="cuda")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()

    def loss(_):
        x = torch.randint(0, model.config.vocab_size, (1, 4096), device="cuda")
        return model(input_ids=x, labels=x, use_cache=False).loss

    trained(torch.optim.AdamW(model.parameters(), foreach=True), 2, loss)


class Block(nn.Module):
    """A block of DiT."""

    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(size, elementwise_affine=False) for _ in range(2)])
        self.inputs, self.output = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(approximate="tanh"), nn.Linear(4 * size, size))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(size, 6 * size))

    def forward(self, x, condition):
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(condition)[:, None].chunk(6, -1)
        q, k, v = self.inputs(self.norms[0](x) * (1 + scale) + shift).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate * self.output(attention)
        return x + gate_mlp * self.mlp(self.norms[1](x) * (1 + scale_mlp) + shift_mlp)


def dit(batch, size=1152, depth=28, heads=16):
    """Trains DiT-XL/2 in f32, on latent images of 32 x 32."""
    patches, blocks = nn.Conv2d(4, size, 2, 2), nn.ModuleList([Block(size, heads) for _ in range(depth)])
    times, output = nn.Sequential(nn.Linear(256, size), nn.SiLU(), nn.Linear(size, size)), nn.Linear(size, 32)
    model = nn.ModuleList([patches, blocks, times, output]).cuda()

    def loss(_):
        x = patches(torch.randn(batch, 4, 32, 32, device="cuda")).flatten(2).transpose(1, 2)
        condition = times(torch.randn(batch, 256, device="cuda"))
        for block in blocks:
            x = block(x, condition)
        return output(x).square().mean()

    trained(torch.optim.AdamW(model.parameters()), 3, loss)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("dit", "mixtral", *LLAMA) or not sys.argv[2].isdecimal():
        sys.exit("usage: large.py llama8|llama70|llama405|mixtral RANKS, or dit BATCH")
    name, number = sys.argv[1], int(sys.argv[2])
    dit(number) if name == "dit" else decoder(name, number)
    print(json.dumps(figures()), flush=True)

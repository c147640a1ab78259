#!/usr/bin/env python3
"""The programs of the rows in `published.py`: models of published tables, built from their published settings, with random weights and inputs.

    python crates/cli/proof/published_programs.py vision '{"name": "vgg16", "batch": 32}'

It prints what `programs.py` prints. `process` is the memory of the process as NVML shows it at the end, or null if NVML does not list it,
and `at_end` is what PyTorch's allocator had reserved then.
"""

import collections
import ctypes
import json
import os
import sys

import torch
from torch import distributed
from torch.nn import functional

from driver import ProcessInfo, Sampler
from programs import KEPT, figures, trained

# Values of the published config.json of each model, by the names that it has there. What is not here has the default of the class, or, like
# the parameters of the rotary embedding, changes no size.
MODELS = {
    # bert-base-cased and bert-large-cased
    "bert_base": ("Bert", "ForMaskedLM", {"vocab_size": 28996}),
    "bert_large": (
        "Bert",
        "ForMaskedLM",
        {"vocab_size": 28996, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    # xlnet-base-cased and xlnet-large-cased, with a classifier of two classes
    "xlnet_base": ("XLNet", "ForSequenceClassification", {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072}),
    "xlnet_large": ("XLNet", "ForSequenceClassification", {"d_model": 1024, "n_layer": 24, "n_head": 16, "d_inner": 4096}),
    "gpt2_large": ("GPT2", "LMHeadModel", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt2_xl": ("GPT2", "LMHeadModel", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "distilgpt2": ("GPT2", "LMHeadModel", {"n_layer": 6}),
    # cerebras/Cerebras-GPT-111M
    "cerebras_111m": ("GPT2", "LMHeadModel", {"n_layer": 10, "n_inner": 3072, "n_positions": 2048, "activation_function": "gelu"}),
    # EleutherAI/gpt-neo-125M
    "gpt_neo_125m": (
        "GPTNeo",
        "ForCausalLM",
        {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]]},
    ),
    # Qwen/Qwen3-4B
    "qwen3_4b": (
        "Qwen3",
        "ForCausalLM",
        {
            "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        },
    ),
    # deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B
    "deepseek_1_5b": (
        "Qwen2",
        "ForCausalLM",
        {
            "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
            "num_key_value_heads": 2, "tie_word_embeddings": False,
        },
    ),
    # google/gemma-2-2b-it
    "gemma2_2b": (
        "Gemma2",
        "ForCausalLM",
        {
            "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
        },
    ),
    # meta-llama/Llama-3.2-3B-Instruct
    "llama3_2_3b": (
        "Llama",
        "ForCausalLM",
        {
            "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
            "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        },
    ),
    # meta-llama/Llama-3.1-8B
    "llama3_1_8b": (
        "Llama",
        "ForCausalLM",
        {
            "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "tie_word_embeddings": False, "max_position_embeddings": 8192,
        },
    ),
}


def optimizer_of(name, weights):
    if name == "Adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(weights, lr=1e-3, relative_step=False)
    return getattr(torch.optim, name)(weights, lr=1e-3)


def vision(name, batch, size=224, classes=1000, optimizer="Adam", steps=3):
    """Trains a model of torchvision in f32."""
    import torchvision

    more = {"aux_logits": False, "init_weights": False} if name == "inception_v3" else {}
    model = getattr(torchvision.models, name)(num_classes=classes, **more).cuda()
    optimizer = optimizer_of(optimizer, model.parameters())

    def loss(_):
        x, y = torch.randn(batch, 3, size, size).cuda(), torch.randint(classes, (batch,)).cuda()
        return functional.cross_entropy(model(x), y)

    trained(optimizer, steps, loss)
    KEPT.extend([model, optimizer])


def built(name):
    """Returns a model of transformers, whose weights are not set."""
    import transformers

    family, head, values = MODELS[name]
    return getattr(transformers, family + head)(getattr(transformers, family + "Config")(**values))


def language(name, batch, tokens, optimizer="Adam", steps=3):
    """Trains a model of transformers in f32."""
    from transformers.initialization import no_init_weights

    # On the CPU, random weights of some models would take a minute.
    with no_init_weights():
        model = built(name)
    model.tie_weights()
    model.cuda().train()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.02)
    optimizer = optimizer_of(optimizer, model.parameters())
    words = model.config.vocab_size

    def loss(_):
        x = torch.randint(words, (batch, tokens)).cuda()
        labels = torch.randint(2, (batch,)).cuda() if "Classification" in type(model).__name__ else x
        return model(input_ids=x, labels=labels).loss

    trained(optimizer, steps, loss)
    KEPT.extend([model, optimizer])


def kept_by_checkpoints():
    """Keeps attention and every second matrix product for the backward pass, as torchtitan's selective checkpoints do."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    operators, count = torch.ops.aten, collections.Counter()
    attention = [getattr(operators, f"_scaled_dot_product_{kind}_attention").default for kind in ("flash", "efficient", "cudnn")]

    def policy(context, operator, *_, **__):
        if operator == operators.mm.default:
            count[context.is_recompute] += 1
            is_kept = count[context.is_recompute] % 2 == 1
        else:
            is_kept = operator in attention
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def llama(batch, fake=0, tokens=8192, steps=3):
    """Trains Llama 3.1 8B as torchtitan does: FSDP with weights in f32 that are cast to bf16, AdamW, and selective checkpoints. With `fake`,
    this is the first of so many ranks, and its collectives move nothing."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank, gpus = int(os.environ.get("RANK", 0)), torch.cuda.device_count()
    if fake:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        distributed.init_process_group("fake", rank=0, world_size=fake, store=FakeStore())
    else:
        if gpus == 1:
            # NCCL rejects two ranks of one machine on one GPU.
            os.environ["NCCL_HOSTID"] = f"machine{rank}"
        torch.cuda.set_device(rank % gpus)
        distributed.init_process_group("nccl")
    with torch.device("meta"):
        model = built("llama3_1_8b")
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = fully_shard(checkpoint_wrapper(layer, context_fn=kept_by_checkpoints), **policy)
    fully_shard(model, **policy)
    model.to_empty(device="cuda").train()
    with torch.no_grad():
        for weight in model.parameters():
            weight.to_local().normal_(0, 0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def loss(_):
        x = torch.randint(model.config.vocab_size, (batch, tokens)).cuda()
        return model(input_ids=x, labels=x, use_cache=False).loss

    trained(optimizer, steps, loss)
    distributed.destroy_process_group()
    return {"rank": rank}


def process_memory():
    """Returns the memory of this process as NVML shows it; None if NVML does not list the process."""
    try:
        sampler = Sampler()
    except OSError:
        return None
    used = []
    for gpu in sampler.handles:
        listed, count = (ProcessInfo * 256)(), ctypes.c_uint(256)
        failed = sampler.nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu, ctypes.byref(count), listed)
        used += [] if failed else [entry.used for entry in listed[: count.value] if entry.pid == os.getpid()]
    return max(used, default=None)


def main():
    torch.manual_seed(0)
    facts = globals()[sys.argv[1]](**json.loads(sys.argv[2])) or {}
    torch.cuda.synchronize()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    memory = {**figures(), "at_end": torch.cuda.memory_reserved(), "process": process_memory()}
    print(json.dumps({**memory, **facts, **machine}), flush=True)


if __name__ == "__main__":
    main()

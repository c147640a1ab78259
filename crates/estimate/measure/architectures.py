#!/usr/bin/env python3
"""Measures `torch.cuda.max_memory_allocated()` of two steps of models with random weights, for each architecture that `Model::from_config` reads
and that `measure.py` does not have. Each row runs in a process of its own. `cargo test -p gpumem-estimate measured -- --nocapture` prints the
estimates of the same rows.

    python3 architectures.py --list            # rows as JSON: name, config, length, batch, mode, dtype
    python3 architectures.py --out FILE --seconds 90
"""

import argparse
import json
import time

from modules import (
    clip, gemma, gemma2, gemma3, llama4_text, mistral, mixtral, neox_sizes, phi, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe,
    sizes, whisper_sizes,
)
from processes import finish, start

# These are real models. Large ones have fewer layers.
MODELS = {
    "qwen2.5-0.5b": (512, qwen2(tie_word_embeddings=True, **sizes(24, 896, 14, 2, 4864, 151936))),
    "qwen3-0.6b": (512, qwen3(tie_word_embeddings=True, **sizes(28, 1024, 16, 8, 3072, 151936, head_dim=128))),
    "mistral-window": (1024, mistral(sliding_window=256, **sizes(4, 2048, 16, 4, 7168, 32000))),
    "mixtral-4": (512, mixtral(num_local_experts=8, num_experts_per_tok=2, **sizes(4, 1024, 16, 4, 3584, 32000))),
    "qwen3-moe-4": (512, qwen3_moe(num_experts=32, num_experts_per_tok=8, moe_intermediate_size=768, head_dim=128, **sizes(4, 2048, 16, 4, 6144, 151936))),
    "qwen2-moe-4": (512, qwen2_moe(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=1408, shared_expert_intermediate_size=5632, **sizes(4, 2048, 16, 16, 5632, 151936))),
    "gemma-6": (512, gemma(head_dim=256, **sizes(6, 2048, 8, 1, 8192, 256000))),
    "gemma-2-6": (512, gemma2(head_dim=256, sliding_window=128, **sizes(6, 2304, 8, 4, 9216, 128000))),
    "gemma-3-1b": (640, gemma3(head_dim=256, sliding_window=512, **sizes(26, 1152, 4, 1, 6912, 262144))),
    "phi-2-6": (512, phi(partial_rotary_factor=0.4, resid_pdrop=0.1, **sizes(6, 2560, 32, 32, 10240, 51200))),
    "phi-3-mini-6": (512, phi3(sliding_window=2047, **sizes(6, 3072, 32, 32, 8192, 32064))),
    "pythia-410m": (512, neox_sizes(24, 1024, 16, 4096, 50304, rotary_pct=0.25)),
    "llama-4-4": (512, llama4_text(num_local_experts=4, interleave_moe_layer_step=2, intermediate_size_mlp=4096, head_dim=64, **sizes(4, 1024, 16, 4, 2048, 32000))),
    "whisper-small": (128, whisper_sizes(768, 12, 12)),
    "clip-vit-base-patch32": (77, clip(text_config={}, vision_config={})),
}


def rows():
    for name, (length, fields) in MODELS.items():
        for mode, dtype in [("inference", "f32"), ("adamw", "f32"), ("adamw", "bf16"), ("inference", "bf16")]:
            yield {"name": name, "config": fields, "length": length, "batch": 4, "mode": mode, "dtype": dtype}


def measure(row):
    import torch
    import transformers

    fields, training = row["config"], row["mode"] != "inference"
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[row["dtype"]]
    torch.manual_seed(0)
    kind = getattr(transformers, fields["architectures"][0])
    settings = kind.config_class.from_dict(fields)
    torch.set_default_dtype(dtype)
    with torch.device("cuda"):
        model = kind(settings)
    torch.set_default_dtype(torch.float32)
    model.train(training)
    batch, length = row["batch"], row["length"]

    def tokens(count):
        return torch.randint(0, 1000, (batch, count), device="cuda")

    name = kind.__name__
    if name == "CLIPModel":
        given = {"pixel_values": torch.randn(batch, 3, 224, 224, device="cuda", dtype=dtype), "input_ids": tokens(length)}
        given |= {"return_loss": True} if training else {}
    elif name == "WhisperForConditionalGeneration":
        ids = tokens(length)
        given = {"input_features": torch.randn(batch, 80, 3000, device="cuda", dtype=dtype)}
        given |= {"labels": ids} if training else {"decoder_input_ids": ids}
    else:
        ids = tokens(length)
        given = {"input_ids": ids} | ({"labels": ids, "use_cache": False} if training else {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4) if training else None
    result = dict(row, parameters=sum(tensor.numel() for tensor in model.parameters()))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    result["before"] = torch.cuda.memory_allocated()
    phases = []

    def phase(label):
        phases.append([label, torch.cuda.max_memory_allocated()])
        torch.cuda.reset_peak_memory_stats()

    for _ in range(2):
        if training:
            optimizer.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(training):
            output = model(**given)
            if training:
                output = output.loss
        phase("forward")
        if training:
            output.backward()
            phase("backward")
            optimizer.step()
            phase("update")
        del output
    result["phases"], result["peak"] = phases, max(value for _, value in phases)
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out")
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--models", help="only models whose names begin with one of these, separated by commas")
    args = parser.parse_args()
    chosen = [row for row in rows() if not args.models or row["name"].startswith(tuple(args.models.split(",")))]
    if args.list:
        for row in chosen:
            print(json.dumps(row))
        return
    import torch  # noqa: F401, so that children need not load it
    import transformers

    transformers.logging.set_verbosity_error()
    for fields in {row["config"]["architectures"][0] for row in chosen}:
        getattr(transformers, fields)
    deadline, running = time.time() + args.seconds, []
    with open(args.out, "w") as file:
        header = {"torch": torch.__version__, "transformers": transformers.__version__, "driver": None}
        file.write(json.dumps(header) + "\n")
        while chosen or running:
            while chosen and len(running) < args.at_once and time.time() < deadline:
                row = chosen.pop(0)
                running.append((row, start(lambda: measure(row))))
            if not running:
                break
            row, started = running.pop(0)
            result = row | finish(started)
            file.write(json.dumps(result) + "\n")
            file.flush()
            print(result.get("name"), result.get("mode"), result.get("dtype"), result.get("peak", result.get("error", "")[-200:]), flush=True)


main()

#!/usr/bin/env python3
"""Writes the headers of GGUF files into `tests/gguf/`, and `tests/gguf/files.jsonl`: what the Python package `gguf` says about them. A file has
all that a file of the model has, but no weights: the length that it would have is in `files.jsonl`. `all_types.gguf` has a tensor of each
type and its data."""

import json
import math
import os
from collections import Counter
from pathlib import Path

import numpy
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Type, GGUFReader, GGUFWriter

FOLDER = Path(__file__).parent.parent / "tests" / "gguf"
lines = []


def write(name, architecture, blocks, size, heads, key_value_heads, inner, vocabulary, more=(), others=(), **choices):
    """Writes the header of a decoder. `more` is metadata, and `others` are tensors."""
    path = FOLDER / (name + ".gguf")
    writer = GGUFWriter(path, architecture)
    writer.add_name(name)
    metadata = {
        "block_count": blocks, "embedding_length": size, "attention.head_count": heads,
        "attention.head_count_kv": key_value_heads, "feed_forward_length": inner, "context_length": 8192,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    if head_size := choices.get("head_size"):
        metadata |= {"attention.key_length": head_size, "attention.value_length": head_size}
    if experts := choices.get("experts"):
        count, used, width, shared = experts
        metadata |= {"expert_count": count, "expert_used_count": used}
        metadata |= {"expert_feed_forward_length": width} if width != inner else {}
        metadata |= {"expert_shared_feed_forward_length": shared} if shared else {}
    for key, value in (metadata | dict(more)).items():
        key = key if key.startswith("tokenizer.") else f"{architecture}.{key}"
        add = writer.add_float32 if isinstance(value, float) else writer.add_array if isinstance(value, list) else writer.add_uint32
        add(key, value)
    data = 0
    for tensor, shape, kind in decoder(blocks, size, heads, key_value_heads, inner, vocabulary, **choices) + list(others):
        block, bytes_of_block = GGML_QUANT_SIZES[kind]
        assert shape[-1] % block == 0
        bytes_of = math.prod(shape) // block * bytes_of_block
        writer.add_tensor_info(tensor, shape, numpy.dtype(numpy.float32), bytes_of, raw_dtype=kind)
        data = -(-data // 32) * 32 + bytes_of
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = os.path.getsize(path)
    length = -(-header // 32) * 32 + data
    # The package reads a file of full length; the file has no data in it.
    os.truncate(path, -(-length // 32) * 32)
    tensors, by_type = GGUFReader(path).tensors, Counter()
    for tensor in tensors:
        by_type[tensor.tensor_type.name.lower()] += int(tensor.n_elements)
    bytes_read = sum(int(tensor.n_bytes) for tensor in tensors)
    os.truncate(path, header)
    lines.append({"name": name, "length": length, "tensors": len(tensors), "elements": by_type.total(), "bytes": bytes_read, "types": by_type})


def decoder(blocks, size, heads, key_value_heads, inner, vocabulary, *, head_size=None, bias=(), extra=(), kind=Type.Q4_K,
            tied=False, joined=False, gate=True, norms=("attn_norm", "ffn_norm"), norm_bias=False, experts=None, other=Type.Q6_K):
    """The tensors of a decoder, as llama.cpp names them."""
    head_size = head_size or size // heads
    q, kv = heads * head_size, key_value_heads * head_size
    tensors = []

    def add(name, shape, of=kind):
        tensors.append((f"{name}.weight", shape, of))
        if name.split(".")[-1] in bias or norm_bias and name.endswith("norm"):
            tensors.append((f"{name}.bias", (shape[0],), Type.F32))

    add("token_embd", (vocabulary, size), other)
    add("output_norm", (size,), Type.F32)
    if not tied:
        add("output", (vocabulary, size), other)
    for block in range(blocks):
        parts = [(norm, (size,), Type.F32) for norm in norms] + [(norm, (head_size,), Type.F32) for norm in extra]
        if joined:
            parts.append(("attn_qkv", (q + 2 * kv, size)))
        else:
            parts += [("attn_q", (q, size)), ("attn_k", (kv, size)), ("attn_v", (kv, size), other)]
        parts.append(("attn_output", (size, q)))
        if experts:
            count, _used, width, shared = experts
            parts += [("ffn_gate_inp", (count, size), Type.F32), ("ffn_gate_exps", (count, width, size))]
            parts += [("ffn_up_exps", (count, width, size)), ("ffn_down_exps", (count, size, width), other)]
            if shared:
                parts += [("ffn_gate_inp_shexp", (size,), Type.F32), ("ffn_gate_shexp", (shared, size))]
                parts += [("ffn_up_shexp", (shared, size)), ("ffn_down_shexp", (size, shared))]
        else:
            parts += [("ffn_gate", (inner, size))] if gate is True else []
            parts += [("ffn_up", (2 * inner if gate == "joined" else inner, size)), ("ffn_down", (size, inner), other)]
        for name, *shape in parts:
            add(f"blk.{block}.{name}", *shape)
    return tensors


QKV = ("attn_q", "attn_k", "attn_v")
HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
FOUR_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
ALL_BIASES = ("attn_qkv", "attn_output", "ffn_up", "ffn_down", "output")
TOKENS = {"tokenizer.ggml.tokens": [f"{number:x}" for number in range(300)]}

write("llama-3-8b", "llama", 32, 4096, 32, 8, 14336, 128256, {"rope.dimension_count": 128} | TOKENS,
      [("rope_freqs.weight", (64,), Type.F32)])
write("llama-3.2-1b", "llama", 16, 2048, 32, 8, 8192, 128256, head_size=64, tied=True, kind=Type.IQ4_XS)
write("mixtral-8x7b", "llama", 32, 4096, 32, 8, 14336, 32000, experts=(8, 2, 14336, 0), kind=Type.Q3_K, other=Type.Q5_K)
write("qwen2.5-7b", "qwen2", 28, 3584, 28, 4, 18944, 152064, bias=QKV, kind=Type.Q8_0, other=Type.Q8_0)
write("qwen3-8b", "qwen3", 36, 4096, 32, 8, 12288, 151936, head_size=128, extra=HEAD_NORMS)
write("qwen3-30b-a3b", "qwen3moe", 48, 2048, 32, 4, 6144, 151936, head_size=128, extra=HEAD_NORMS, experts=(128, 8, 768, 0))
write("qwen1.5-moe-a2.7b", "qwen2moe", 24, 2048, 16, 16, 5632, 151936, bias=QKV, experts=(60, 4, 1408, 5632),
      kind=Type.Q4_0, other=Type.Q5_1)
write("gemma-2b", "gemma", 18, 2048, 8, 1, 16384, 256000, head_size=256, tied=True, kind=Type.BF16, other=Type.BF16)
write("gemma-2-9b", "gemma2", 42, 3584, 16, 8, 14336, 256000,
      {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 4096},
      head_size=256, tied=True, norms=FOUR_NORMS, kind=Type.Q2_K, other=Type.Q4_K)
write("gemma-3-1b", "gemma3", 26, 1152, 4, 1, 6912, 262144, {"attention.sliding_window": 512}, head_size=256, tied=True,
      extra=HEAD_NORMS, norms=FOUR_NORMS, kind=Type.Q4_0, other=Type.Q8_0)
write("phi-3-mini", "phi3", 32, 3072, 32, 32, 8192, 32064, {"rope.dimension_count": 96, "attention.sliding_window": 2047},
      joined=True, gate="joined")
write("phi-2", "phi2", 32, 2560, 32, 32, 10240, 51200, {"rope.dimension_count": 32}, joined=True, gate=False,
      norms=("attn_norm",), norm_bias=True, bias=ALL_BIASES, kind=Type.F16, other=Type.F16)
write("pythia-160m", "gptneox", 12, 768, 12, 12, 3072, 50304, {"rope.dimension_count": 16}, joined=True, gate=False,
      norm_bias=True, bias=ALL_BIASES[:-1], kind=Type.F16, other=Type.F16)

# One tensor of each type.
path = FOLDER / "all_types.gguf"
writer = GGUFWriter(path, "none")
writer.add_custom_alignment(64)
for kind in [kind for kind in GGML_QUANT_SIZES if kind != Type.Q8_1]:
    name, (block, size) = f"tensor.{kind.name.lower()}", GGML_QUANT_SIZES[kind]
    writer.add_tensor_info(name, (3, 2 * block), numpy.dtype(numpy.float32), 6 * size, raw_dtype=kind)
    writer.tensors[-1][name].tensor = numpy.zeros(6 * size, dtype=numpy.uint8)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
by_type = {tensor.tensor_type.name.lower(): [int(tensor.n_elements), int(tensor.n_bytes)] for tensor in GGUFReader(path).tensors}
lines.append({"name": "all_types", "length": os.path.getsize(path), "all": by_type})
(FOLDER / "files.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

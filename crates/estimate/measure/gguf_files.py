#!/usr/bin/env python3
"""Writes the headers of GGUF files into `tests/gguf/`, and `tests/gguf/files.jsonl`: what the Python package `gguf` says about them. A file has
all that a file of the model has, but no weights: the length that it would have is in `files.jsonl`. `all_types.gguf` has a tensor of each
type and its data."""

import json
import os

import numpy
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Type, GGUFReader, GGUFWriter

folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "gguf")
os.makedirs(folder, exist_ok=True)
lines = []


def bytes_of(shape, kind):
    block, size = GGML_QUANT_SIZES[kind]
    elements = 1
    for length in shape:
        elements *= length
    assert shape[-1] % block == 0
    return elements // block * size


def write(name, architecture, metadata, tensors):
    """`tensors`: names, shapes with the innermost size last, and types."""
    path = os.path.join(folder, name + ".gguf")
    writer = GGUFWriter(path, architecture)
    writer.add_name(name)
    for key, value in metadata.items():
        key = key if "." in key and key.split(".")[0] in ("tokenizer", "general") else f"{architecture}.{key}"
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    for tensor, shape, kind in tensors:
        size = bytes_of(shape, kind)
        writer.add_tensor_info(tensor, shape, numpy.dtype(numpy.float32), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = os.path.getsize(path)
    data = 0
    for _, shape, kind in tensors:
        data = -(-data // 32) * 32 + bytes_of(shape, kind)
    length = -(-header // 32) * 32 + data
    elements = bytes_read = 0
    by_type = {}
    # The package reads a file of full length; the file has no data in it.
    os.truncate(path, -(-length // 32) * 32)
    for tensor in GGUFReader(path).tensors:
        elements += int(tensor.n_elements)
        bytes_read += int(tensor.n_bytes)
        kind = tensor.tensor_type.name.lower()
        by_type[kind] = by_type.get(kind, 0) + int(tensor.n_elements)
    os.truncate(path, header)
    lines.append({"name": name, "length": length, "tensors": len(tensors), "elements": elements, "bytes": bytes_read, "types": by_type})


def decoder(blocks, size, heads, key_value_heads, inner, vocabulary, *, head_size=None, bias=(), extra=(), kind=Type.Q4_K,
            tied=False, joined=False, gate=True, norms=("attn_norm", "ffn_norm"), norm_bias=False, experts=None, other=Type.Q6_K):
    """The tensors of a decoder, as llama.cpp names them."""
    head_size = head_size or size // heads
    q, kv = heads * head_size, key_value_heads * head_size
    tensors = [("token_embd.weight", (vocabulary, size), other), ("output_norm.weight", (size,), Type.F32)]
    if norm_bias:
        tensors.append(("output_norm.bias", (size,), Type.F32))
    if not tied:
        tensors.append(("output.weight", (vocabulary, size), other))
        if "output" in bias:
            tensors.append(("output.bias", (vocabulary,), Type.F32))
    for block in range(blocks):
        def add(name, shape, of=kind, part=None):
            tensors.append((f"blk.{block}.{name}.weight", shape, of))
            if (part or name) in bias:
                tensors.append((f"blk.{block}.{name}.bias", (shape[0],), Type.F32))

        for norm in norms:
            add(norm, (size,), Type.F32)
            if norm_bias:
                tensors.append((f"blk.{block}.{norm}.bias", (size,), Type.F32))
        for norm in extra:
            add(norm, (head_size,), Type.F32)
        if joined:
            add("attn_qkv", (q + 2 * kv, size))
        else:
            add("attn_q", (q, size))
            add("attn_k", (kv, size))
            add("attn_v", (kv, size), other)
        add("attn_output", (size, q))
        if experts:
            count, width, shared = experts
            add("ffn_gate_inp", (count, size), Type.F32)
            add("ffn_gate_exps", (count, width, size))
            add("ffn_up_exps", (count, width, size))
            add("ffn_down_exps", (count, size, width), other)
            if shared:
                add("ffn_gate_inp_shexp", (size,), Type.F32)
                add("ffn_gate_shexp", (shared, size))
                add("ffn_up_shexp", (shared, size))
                add("ffn_down_shexp", (size, shared))
        elif gate == "joined":
            add("ffn_up", (2 * inner, size))
            add("ffn_down", (size, inner), other)
        else:
            if gate:
                add("ffn_gate", (inner, size))
            add("ffn_up", (inner, size))
            add("ffn_down", (size, inner), other)
    return tensors


def sizes(blocks, size, heads, key_value_heads, inner, **others):
    return {
        "block_count": blocks, "embedding_length": size, "attention.head_count": heads,
        "attention.head_count_kv": key_value_heads, "feed_forward_length": inner, "context_length": 8192,
        "attention.layer_norm_rms_epsilon": 1e-5, **others,
    }


def words(count):
    return {"tokenizer.ggml.tokens": [f"{number:x}" for number in range(count)]}


write("llama-3-8b", "llama", {**sizes(32, 4096, 32, 8, 14336), "rope.dimension_count": 128, **words(300)},
      decoder(32, 4096, 32, 8, 14336, 128256) + [("rope_freqs.weight", (64,), Type.F32)])
write("llama-3.2-1b", "llama", {**sizes(16, 2048, 32, 8, 8192), "attention.key_length": 64, "attention.value_length": 64},
      decoder(16, 2048, 32, 8, 8192, 128256, tied=True, kind=Type.IQ4_XS))
write("mixtral-8x7b", "llama", {**sizes(32, 4096, 32, 8, 14336), "expert_count": 8, "expert_used_count": 2},
      decoder(32, 4096, 32, 8, 14336, 32000, experts=(8, 14336, 0), kind=Type.Q3_K, other=Type.Q5_K))
write("qwen2.5-7b", "qwen2", sizes(28, 3584, 28, 4, 18944),
      decoder(28, 3584, 28, 4, 18944, 152064, bias=("attn_q", "attn_k", "attn_v"), kind=Type.Q8_0, other=Type.Q8_0))
write("qwen3-8b", "qwen3", {**sizes(36, 4096, 32, 8, 12288), "attention.key_length": 128, "attention.value_length": 128},
      decoder(36, 4096, 32, 8, 12288, 151936, extra=("attn_q_norm", "attn_k_norm")))
write("qwen3-30b-a3b", "qwen3moe",
      {**sizes(48, 2048, 32, 4, 6144), "attention.key_length": 128, "attention.value_length": 128, "expert_count": 128,
       "expert_used_count": 8, "expert_feed_forward_length": 768},
      decoder(48, 2048, 32, 4, 6144, 151936, head_size=128, extra=("attn_q_norm", "attn_k_norm"), experts=(128, 768, 0)))
write("qwen1.5-moe-a2.7b", "qwen2moe",
      {**sizes(24, 2048, 16, 16, 5632), "expert_count": 60, "expert_used_count": 4, "expert_feed_forward_length": 1408,
       "expert_shared_feed_forward_length": 5632},
      decoder(24, 2048, 16, 16, 5632, 151936, bias=("attn_q", "attn_k", "attn_v"), experts=(60, 1408, 5632),
              kind=Type.Q4_0, other=Type.Q5_1))
write("gemma-2b", "gemma", {**sizes(18, 2048, 8, 1, 16384), "attention.key_length": 256, "attention.value_length": 256},
      decoder(18, 2048, 8, 1, 16384, 256000, head_size=256, tied=True, kind=Type.BF16, other=Type.BF16))
write("gemma-2-9b", "gemma2",
      {**sizes(42, 3584, 16, 8, 14336), "attention.key_length": 256, "attention.value_length": 256,
       "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 4096},
      decoder(42, 3584, 16, 8, 14336, 256000, head_size=256, tied=True,
              norms=("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), kind=Type.Q2_K, other=Type.Q4_K))
write("gemma-3-1b", "gemma3",
      {**sizes(26, 1152, 4, 1, 6912), "attention.key_length": 256, "attention.value_length": 256, "attention.sliding_window": 512},
      decoder(26, 1152, 4, 1, 6912, 262144, head_size=256, tied=True, extra=("attn_q_norm", "attn_k_norm"),
              norms=("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), kind=Type.Q4_0, other=Type.Q8_0))
write("phi-3-mini", "phi3", {**sizes(32, 3072, 32, 32, 8192), "rope.dimension_count": 96, "attention.sliding_window": 2047},
      decoder(32, 3072, 32, 32, 8192, 32064, joined=True, gate="joined"))
write("phi-2", "phi2", {**sizes(32, 2560, 32, 32, 10240), "rope.dimension_count": 32},
      decoder(32, 2560, 32, 32, 10240, 51200, joined=True, gate=False, norms=("attn_norm",), norm_bias=True,
              bias=("attn_qkv", "attn_output", "ffn_up", "ffn_down", "output"), kind=Type.F16, other=Type.F16))
write("pythia-160m", "gptneox", {**sizes(12, 768, 12, 12, 3072), "rope.dimension_count": 16},
      decoder(12, 768, 12, 12, 3072, 50304, joined=True, gate=False, norm_bias=True,
              bias=("attn_qkv", "attn_output", "ffn_up", "ffn_down"), kind=Type.F16, other=Type.F16))

# One tensor of each type.
path = os.path.join(folder, "all_types.gguf")
writer = GGUFWriter(path, "none")
writer.add_custom_alignment(64)
kinds = [kind for kind in GGML_QUANT_SIZES if kind != Type.Q8_1]
for kind in kinds:
    block, size = GGML_QUANT_SIZES[kind]
    shape, count = (3, 2 * block), 6 * size
    writer.add_tensor_info(f"tensor.{kind.name.lower()}", shape, numpy.dtype(numpy.float32), count, raw_dtype=kind)
    writer.tensors[-1][f"tensor.{kind.name.lower()}"].tensor = numpy.zeros(count, dtype=numpy.uint8)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
by_type = {tensor.tensor_type.name.lower(): [int(tensor.n_elements), int(tensor.n_bytes)] for tensor in GGUFReader(path).tensors}
lines.append({"name": "all_types", "length": os.path.getsize(path), "all": by_type})
with open(os.path.join(folder, "files.jsonl"), "w") as file:
    for line in lines:
        file.write(json.dumps(line) + "\n")

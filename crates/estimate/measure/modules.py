#!/usr/bin/env python3
"""Writes the lines of `tests/modules.jsonl`: configurations, and what transformers makes of them. It needs no GPU, no network and
little memory: the models are built without values. Models of full size have their number of parameters; those with two layers the
parameters of each module as well."""

import json


def family(architecture, model_type):
    """A function that makes a configuration of an architecture from its fields."""
    return lambda **fields: {"architectures": [architecture], "model_type": model_type, **fields}


llama = family("LlamaForCausalLM", "llama")
mistral = family("MistralForCausalLM", "mistral")
mixtral = family("MixtralForCausalLM", "mixtral")
qwen2 = family("Qwen2ForCausalLM", "qwen2")
qwen3 = family("Qwen3ForCausalLM", "qwen3")
qwen2_moe = family("Qwen2MoeForCausalLM", "qwen2_moe")
qwen3_moe = family("Qwen3MoeForCausalLM", "qwen3_moe")
gemma = family("GemmaForCausalLM", "gemma")
gemma2 = family("Gemma2ForCausalLM", "gemma2")
gemma3 = family("Gemma3ForCausalLM", "gemma3_text")
gemma3_with_images = family("Gemma3ForConditionalGeneration", "gemma3")
phi = family("PhiForCausalLM", "phi")
phi3 = family("Phi3ForCausalLM", "phi3")
neox = family("GPTNeoXForCausalLM", "gpt_neox")
llama4 = family("Llama4ForConditionalGeneration", "llama4")
llama4_text = family("Llama4ForCausalLM", "llama4_text")
gpt2 = family("GPT2LMHeadModel", "gpt2")
bert = family("BertForMaskedLM", "bert")
vit = family("ViTForImageClassification", "vit")
t5 = family("T5ForConditionalGeneration", "t5")
whisper = family("WhisperForConditionalGeneration", "whisper")
clip = family("CLIPModel", "clip")


def sizes(layers, hidden, heads, key_value_heads, inner, vocabulary, **others):
    return dict(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=key_value_heads,
        intermediate_size=inner, vocab_size=vocabulary, **others,
    )


def neox_sizes(layers, hidden, heads, inner, vocabulary, **others):
    return neox(
        **others, num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, intermediate_size=inner,
        vocab_size=vocabulary,
    )


def llama4_sizes(experts, step):
    return llama4(
        text_config=dict(
            model_type="llama4_text", num_local_experts=experts, interleave_moe_layer_step=step, intermediate_size_mlp=16384,
            head_dim=128, **sizes(48, 5120, 40, 8, 8192, 202048),
        ),
        vision_config=dict(
            model_type="llama4_vision_model", hidden_size=1408, image_size=336, intermediate_size=5632,
            num_attention_heads=16, num_hidden_layers=34, patch_size=14, projector_input_dim=4096,
            projector_output_dim=4096, vision_output_dim=4096,
        ),
    )


def t5_sizes(size, hidden, layers, heads, head_size=64, **others):
    return t5(d_model=size, d_ff=hidden, num_layers=layers, num_heads=heads, d_kv=head_size, **others)


def whisper_sizes(size, layers, heads, **others):
    fields = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in
              (("layers", layers), ("attention_heads", heads), ("ffn_dim", 4 * size))}
    return whisper(d_model=size, **fields, **others)


full = {
    "mistral-7b-v0.1": mistral(sliding_window=4096, **sizes(32, 4096, 32, 8, 14336, 32000)),
    "mistral-7b-v0.3": mistral(sliding_window=None, **sizes(32, 4096, 32, 8, 14336, 32768)),
    "mistral-nemo": mistral(head_dim=128, sliding_window=None, **sizes(40, 5120, 32, 8, 14336, 131072)),
    "mixtral-8x7b": mixtral(num_local_experts=8, num_experts_per_tok=2, **sizes(32, 4096, 32, 8, 14336, 32000)),
    "mixtral-8x22b": mixtral(num_local_experts=8, num_experts_per_tok=2, **sizes(56, 6144, 48, 8, 16384, 32768)),
    "qwen2.5-0.5b": qwen2(tie_word_embeddings=True, **sizes(24, 896, 14, 2, 4864, 151936)),
    "qwen2.5-7b": qwen2(tie_word_embeddings=False, use_sliding_window=False, **sizes(28, 3584, 28, 4, 18944, 152064)),
    "qwen2.5-72b": qwen2(tie_word_embeddings=False, **sizes(80, 8192, 64, 8, 29568, 152064)),
    "qwen3-0.6b": qwen3(head_dim=128, tie_word_embeddings=True, **sizes(28, 1024, 16, 8, 3072, 151936)),
    "qwen3-8b": qwen3(head_dim=128, tie_word_embeddings=False, **sizes(36, 4096, 32, 8, 12288, 151936)),
    "qwen3-32b": qwen3(head_dim=128, tie_word_embeddings=False, **sizes(64, 5120, 64, 8, 25600, 151936)),
    "qwen1.5-moe-a2.7b": qwen2_moe(
        num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
        decoder_sparse_step=1, **sizes(24, 2048, 16, 16, 5632, 151936),
    ),
    "qwen3-30b-a3b": qwen3_moe(
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, head_dim=128, decoder_sparse_step=1,
        mlp_only_layers=[], **sizes(48, 2048, 32, 4, 6144, 151936),
    ),
    "qwen3-235b-a22b": qwen3_moe(
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536, head_dim=128, **sizes(94, 4096, 64, 4, 12288, 151936)
    ),
    "gemma-2b": gemma(head_dim=256, **sizes(18, 2048, 8, 1, 16384, 256000)),
    "gemma-7b": gemma(head_dim=256, **sizes(28, 3072, 16, 16, 24576, 256000)),
    "gemma-2-2b": gemma2(head_dim=256, sliding_window=4096, **sizes(26, 2304, 8, 4, 9216, 256000)),
    "gemma-2-9b": gemma2(head_dim=256, sliding_window=4096, **sizes(42, 3584, 16, 8, 14336, 256000)),
    "gemma-2-27b": gemma2(head_dim=128, sliding_window=4096, **sizes(46, 4608, 32, 16, 36864, 256000)),
    "gemma-3-1b": gemma3(head_dim=256, sliding_window=512, sliding_window_pattern=6, **sizes(26, 1152, 4, 1, 6912, 262144)),
    "gemma-3-4b": gemma3_with_images(
        text_config=dict(model_type="gemma3_text", sliding_window=1024, **sizes(34, 2560, 8, 4, 10240, 262208)),
        vision_config=dict(
            model_type="siglip_vision_model", hidden_size=1152, image_size=896, intermediate_size=4304,
            num_attention_heads=16, num_hidden_layers=27, patch_size=14, vision_use_head=False,
        ),
    ),
    "phi-1.5": phi(**sizes(24, 2048, 32, None, 8192, 51200)),
    "phi-2": phi(partial_rotary_factor=0.4, **sizes(32, 2560, 32, 32, 10240, 51200)),
    "phi-3-mini": phi3(sliding_window=2047, **sizes(32, 3072, 32, 32, 8192, 32064)),
    "phi-4": phi3(sliding_window=None, **sizes(40, 5120, 40, 10, 17920, 100352)),
    "pythia-160m": neox_sizes(12, 768, 12, 3072, 50304, rotary_pct=0.25),
    "pythia-12b": neox_sizes(36, 5120, 40, 20480, 50688, rotary_pct=0.25),
    "gpt-neox-20b": neox_sizes(44, 6144, 64, 24576, 50432, rotary_pct=0.25),
    "llama-3.1-405b": llama(**sizes(126, 16384, 128, 8, 53248, 128256)),
    "llama-4-scout": llama4_sizes(16, 1),
    "llama-4-maverick": llama4_sizes(128, 2),
    "t5-small": t5_sizes(512, 2048, 6, 8),
    "t5-base": t5_sizes(768, 3072, 12, 12),
    "t5-3b": t5_sizes(1024, 16384, 24, 32, 128),
    "flan-t5-xl": t5_sizes(2048, 5120, 24, 32, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "whisper-tiny": whisper_sizes(384, 4, 6),
    "whisper-small": whisper_sizes(768, 12, 12),
    "whisper-large-v3": whisper_sizes(1280, 32, 20, num_mel_bins=128, vocab_size=51866),
    "clip-vit-base-patch32": clip(text_config={}, vision_config={}),
    "clip-vit-large-patch14": clip(
        text_config=dict(hidden_size=768, intermediate_size=3072, num_attention_heads=12, projection_dim=768),
        vision_config=dict(
            hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_hidden_layers=24, patch_size=14,
            projection_dim=768,
        ),
        projection_dim=768,
    ),
}

small = sizes(2, 64, 4, 2, 96, 50)
same_heads = {**small, "num_key_value_heads": 4}
two_layers = {
    "llama": llama(attention_bias=True, mlp_bias=True, **small),
    "llama, tied": llama(tie_word_embeddings=True, head_dim=32, **small),
    "mistral": mistral(sliding_window=8, **small),
    "mixtral": mixtral(num_local_experts=3, num_experts_per_tok=2, **small),
    "qwen2": qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=1, **small),
    "qwen3": qwen3(head_dim=24, attention_bias=True, **small),
    "qwen2_moe": qwen2_moe(
        num_experts=5, num_experts_per_tok=2, moe_intermediate_size=40, shared_expert_intermediate_size=24,
        mlp_only_layers=[1], **small,
    ),
    "qwen3_moe": qwen3_moe(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40, decoder_sparse_step=2, **small),
    "gemma": gemma(head_dim=32, **small),
    "gemma2": gemma2(head_dim=32, sliding_window=8, **small),
    "gemma3_text": gemma3(head_dim=32, sliding_window=8, layer_types=["sliding_attention", "full_attention"], **small),
    "gemma3": gemma3_with_images(
        text_config=dict(model_type="gemma3_text", head_dim=32, **small),
        vision_config=dict(
            model_type="siglip_vision_model", hidden_size=48, image_size=32, intermediate_size=64, num_attention_heads=4,
            num_hidden_layers=1, patch_size=8,
        ),
        mm_tokens_per_image=4,
    ),
    "phi": phi(qk_layernorm=True, resid_pdrop=0.1, embd_pdrop=0.1, **same_heads),
    "phi3": phi3(sliding_window=8, partial_rotary_factor=0.75, pad_token_id=0, **small),
    "gpt_neox": neox_sizes(2, 64, 4, 96, 50),
    "gpt_neox, one after the other": neox_sizes(
        2, 64, 4, 96, 50, use_parallel_residual=False, attention_bias=False, hidden_dropout=0.1
    ),
    "llama4": llama4(
        text_config=dict(
            model_type="llama4_text", num_local_experts=3, interleave_moe_layer_step=2, intermediate_size_mlp=72,
            head_dim=16, no_rope_layers=[1, 0], attention_chunk_size=8, pad_token_id=0, **small,
        ),
        vision_config=dict(
            model_type="llama4_vision_model", hidden_size=48, image_size=28, intermediate_size=64, num_attention_heads=4,
            num_hidden_layers=1, patch_size=14, projector_input_dim=32, projector_output_dim=40, vision_output_dim=40,
        ),
    ),
    "gpt2": gpt2(n_embd=64, n_layer=2, n_head=4, vocab_size=50, n_positions=32),
    "bert": bert(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=50,
        max_position_embeddings=32,
    ),
    "vit": vit(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8,
        num_labels=7,
    ),
    "t5": t5_sizes(64, 96, 2, 4, 16, vocab_size=50),
    "t5, gated": t5_sizes(
        64, 96, 2, 4, 24, vocab_size=50, num_decoder_layers=1, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    "whisper": whisper_sizes(
        64, 2, 4, vocab_size=50, num_mel_bins=8, max_source_positions=20, max_target_positions=24, dropout=0.1,
        activation_dropout=0.1, pad_token_id=0,
    ),
    "clip": clip(
        text_config=dict(hidden_size=48, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=50),
        vision_config=dict(
            hidden_size=64, intermediate_size=96, num_attention_heads=4, num_hidden_layers=1, image_size=32, patch_size=8
        ),
        projection_dim=40,
    ),
}


def modules(model):
    """The parameters of each module."""
    sums = {}
    for name, tensor in model.named_parameters():
        module = name.rpartition(".")[0]
        sums[module] = sums.get(module, 0) + tensor.numel()
    return sums


def main():
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}))
    with torch.device("meta"):
        for models, has_modules in [(full, False), (two_layers, True)]:
            for name, fields in models.items():
                kind = getattr(transformers, fields["architectures"][0])
                # The class changes the fields that it is given.
                model = kind(kind.config_class.from_dict(json.loads(json.dumps(fields))))
                line = {"name": name, "config": fields, "parameters": sum(tensor.numel() for tensor in model.parameters())}
                if has_modules:
                    line["modules"] = modules(model)
                print(json.dumps(line))


if __name__ == "__main__":
    main()

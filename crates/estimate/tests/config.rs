//! Tests configurations of Hugging Face.

use gpumem_estimate::{Model, Optimizer, Step};

fn error(config: &str) -> String {
    Model::from_config(config, 16).unwrap_err().to_string()
}

#[test]
fn what_is_not_known_is_an_error() {
    for empty in ["{}", "[]"] {
        let next = "give a `config.json` of Hugging Face, a file .gguf, .safetensors or .toml, or a model as JSON";
        assert_eq!(error(empty), format!("config.json: it names no architecture and has no `layers`; {next}"));
    }
    let unknown = error(r#"{"architectures": ["NewLM"]}"#);
    assert!(unknown.starts_with("config.json: the architecture `NewLM` is not supported; supported are "), "{unknown}");
    let diffusers = error(r#"{"_class_name": "UNet2DConditionModel", "sample_size": 64}"#);
    let expected = "config.json: the architecture `UNet2DConditionModel` is not supported; supported are ";
    assert!(diffusers.starts_with(expected), "{diffusers}");
    assert!(Model::known_architectures().all(|name| unknown.contains(name)), "{unknown}");
    let llama = |field: &str| format!(r#"{{"architectures": ["LlamaForCausalLM"], {field}}}"#);
    assert_eq!(
        error(&llama(r#""hidden_act": "gelu_10""#)),
        "config.json: `hidden_act` is \"gelu_10\", which is not supported"
    );
    assert!(error(&llama(r#""attention_bias": "yes""#)).ends_with("`attention_bias` is \"yes\" and not a boolean"));
    let gpt2 = |field: &str| format!(r#"{{"architectures": ["GPT2LMHeadModel"], {field}}}"#);
    assert!(error(&gpt2(r#""add_cross_attention": true"#)).ends_with("is true; only false is supported"));
    let qwen3 = |field: &str| format!(r#"{{"model_type": "qwen3", {field}}}"#);
    let layers = r#""num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]"#;
    assert!(error(&qwen3(layers)).ends_with("`layer_types` has \"linear_attention\", which is not supported"));
    let layers = r#""num_hidden_layers": 2, "layer_types": ["full_attention"]"#;
    assert!(error(&qwen3(layers)).ends_with("`layer_types` has fewer elements than the model has layers: 1 and 2"));
}

#[test]
fn hostile_numbers_are_errors() {
    let llama = |field: &str| format!(r#"{{"architectures": ["LlamaForCausalLM"], {field}}}"#);
    assert!(error(&llama(r#""hidden_size": -1"#)).ends_with("`hidden_size` is -1 and not a whole number"));
    assert!(error(&llama(r#""num_attention_heads": 0"#)).ends_with("`num_attention_heads` is 0"));
    let deep = error(&llama(r#""num_hidden_layers": 65537"#));
    assert_eq!(deep, "config.json: `num_hidden_layers` is 65537; a model of at most 1024 blocks is estimated");
    assert!(error(r#"{"architectures": ["GPT2LMHeadModel"], "n_embd": 9223372036854775800}"#).ends_with("too large"));
    assert!(error(&"[".repeat(1_000_000)).starts_with("config.json: this is not JSON"));
    let huge = Model::from_config(&llama(r#""hidden_size": 4611686018427387904"#), 16).unwrap();
    assert!(Step::inference(1).estimate(&huge).is_err());
    for size in ["num_key_value_heads", "vocab_size", "intermediate_size", "num_hidden_layers", "hidden_size"] {
        assert_eq!(error(&llama(&format!(r#""{size}": 0"#))), format!("config.json: `{size}` is 0"));
    }
    assert!(error(&llama(r#""hidden_size": 4097"#)).ends_with("4097 features cannot be divided among 32 heads"));
    let bert = r#"{"architectures": ["BertForMaskedLM"], "hidden_size": 100}"#;
    assert!(error(bert).ends_with("100 features cannot be divided among 12 heads"));
    let gpt2 = r#"{"architectures": ["GPT2LMHeadModel"], "n_embd": 100}"#;
    assert!(error(gpt2).ends_with("100 features cannot be divided among 12 heads"));
}

#[test]
fn contradictions_are_errors() {
    let llama = |field: &str| format!(r#"{{"architectures": ["LlamaForCausalLM"], {field}}}"#);
    assert!(error(&llama(r#""model_type": "gpt2""#)).ends_with(r#"has the `model_type` "llama", and this is "gpt2""#));
    assert!(Model::from_config(&llama(r#""model_type": "llama""#), 16).is_ok());
    let quantized = error(&llama(r#""quantization_config": {"quant_method": "gptq", "bits": 4}"#));
    assert!(quantized.contains("`quant_method` gptq"), "{quantized}");
    assert!(Model::from_config(&llama(r#""quantization_config": null"#), 16).is_ok());
}

/// The model has as many blocks as a file can ask for. Each block differs from the one before it.
#[test]
fn the_most_blocks_are_estimated() {
    let types: Vec<_> = (0..1024).map(|at| if at % 2 == 0 { "full_attention" } else { "sliding_attention" }).collect();
    let config = serde_json::json!({
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 16, "hidden_size": 8, "head_dim": 2, "intermediate_size": 8,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1024, "layer_types": types,
        "use_sliding_window": true, "sliding_window": 4
    });
    let model = Model::from_config(&config.to_string(), 16).unwrap();
    let training = Step::training(1, Optimizer::Sgd).estimate(&model).unwrap();
    // Each block has queries, keys, values and the output, three products of an MLP, and four norms.
    assert_eq!(training.parameters, 1024 * (8 * (4 + 2 + 2 + 4) + 3 * 8 * 8 + 8 + 8 + 2 + 2) + 2 * 16 * 8 + 8);
}

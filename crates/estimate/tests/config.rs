//! Tests configurations of Hugging Face.

use gpumem_estimate::{Model, Optimizer, Step};

fn error(config: &str) -> String {
    Model::from_config(config, 16).unwrap_err().to_string()
}

/// Each configuration has the class `Llama` unless it names another one.
#[test]
fn errors_say_why() {
    let next = "give a `config.json` of Hugging Face, a file .gguf, .safetensors or .toml, or a model as JSON";
    for empty in ["{}", "[]"] {
        assert_eq!(error(empty), format!("config.json: it names no architecture and has no `layers`; {next}"));
    }
    assert!(error(&"[".repeat(1_000_000)).starts_with("config.json: this is not JSON"));
    for (class, name) in [("architectures", r#"["NewLM"]"#), ("_class_name", r#""UNet2DConditionModel""#)] {
        let unknown = error(&format!(r#"{{"{class}": {name}, "sample_size": 64}}"#));
        let name = name.trim_matches(['[', ']', '"']);
        let expected = format!("config.json: the architecture `{name}` is not supported; supported are ");
        assert!(unknown.starts_with(&expected), "{unknown}");
        assert!(Model::known_architectures().all(|name| unknown.contains(name)), "{unknown}");
    }
    for (fields, expected) in [
        (r#""hidden_act": "gelu_10""#, "config.json: `hidden_act` is \"gelu_10\", which is not supported"),
        (r#""attention_bias": "yes""#, "`attention_bias` is \"yes\" and not a boolean"),
        (r#""model_type": "gpt2", "add_cross_attention": true"#, "is true; only false is supported"),
        (
            r#""model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]"#,
            "`layer_types` has \"linear_attention\", which is not supported",
        ),
        (
            r#""model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"]"#,
            "`layer_types` has fewer elements than the model has layers: 1 and 2",
        ),
        // Hostile numbers.
        (r#""hidden_size": -1"#, "`hidden_size` is -1 and not a whole number"),
        (r#""model_type": "clip", "vision_config": [1, 2]"#, "`vision_config` is [1,2] and not an object"),
        (r#""num_attention_heads": 0"#, "`num_attention_heads` is 0"),
        (r#""num_key_value_heads": 0"#, "config.json: `num_key_value_heads` is 0"),
        (r#""vocab_size": 0"#, "config.json: `vocab_size` is 0"),
        (r#""model_type": "clip", "text_config": {"vocab_size": 0}"#, "config.json: `vocab_size` is 0"),
        (r#""intermediate_size": 0"#, "config.json: `intermediate_size` is 0"),
        (r#""num_hidden_layers": 0"#, "config.json: `num_hidden_layers` is 0"),
        (r#""hidden_size": 0"#, "config.json: `hidden_size` is 0"),
        (
            r#""num_hidden_layers": 65537"#,
            "config.json: `num_hidden_layers` is 65537; a model of at most 1024 blocks is estimated",
        ),
        (r#""model_type": "gpt2", "n_embd": 9223372036854775800"#, "too large"),
        (r#""hidden_size": 4097"#, "4097 features cannot be divided among 32 heads"),
        (r#""model_type": "bert", "hidden_size": 100"#, "100 features cannot be divided among 12 heads"),
        (r#""model_type": "gpt2", "n_embd": 100"#, "100 features cannot be divided among 12 heads"),
        // Contradictions.
        (
            r#""architectures": ["LlamaForCausalLM"], "model_type": "gpt2""#,
            r#"has the `model_type` "llama", and this is "gpt2""#,
        ),
        (
            r#""quantization_config": {"quant_method": "gptq", "bits": 4}"#,
            "are quantized (`quant_method` gptq), which is not supported; remove the field, and set `quantized` of the step, \
             or use the file of the weights",
        ),
    ] {
        let class = if fields.contains("model_type") { "" } else { r#""architectures": ["LlamaForCausalLM"], "# };
        let found = error(&format!("{{{class}{fields}}}"));
        assert!(found.ends_with(expected), "{fields}: {found}");
    }
    let llama = |field: &str| format!(r#"{{"architectures": ["LlamaForCausalLM"], {field}}}"#);
    assert!(Model::from_config(&llama(r#""model_type": "llama""#), 16).is_ok());
    assert!(Model::from_config(&llama(r#""quantization_config": null"#), 16).is_ok());
    let huge = Model::from_config(&llama(r#""hidden_size": 4611686018427387904"#), 16).unwrap();
    assert!(Step::inference(1).estimate(&huge).is_err());
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

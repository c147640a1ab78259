//! Transformer models with known sizes. `Model::from_config` creates others.

use serde_json::{Value, json};

use crate::model::{Input, Model};

/// Creates a model from a configuration in this file.
fn known(name: &str, config: &Value, length: u64) -> Model {
    let model = Model::from_fields(config, length).expect("the configuration has only what `from_fields` knows");
    Model { name: name.to_owned(), ..model }
}

/// Returns GPT-2 small with sequences of this length.
pub fn gpt2(length: u64) -> Model {
    known("gpt2", &json!({ "model_type": "gpt2" }), length)
}

/// Returns GPT-2 medium with sequences of this length.
pub fn gpt2_medium(length: u64) -> Model {
    known("gpt2-medium", &json!({ "model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16 }), length)
}

/// Returns a Llama with 1.24 B parameters (the sizes of Llama 3.2 1B), with sequences of this length.
pub fn llama_1b(length: u64) -> Model {
    let config = json!({
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "tie_word_embeddings": true,
    });
    known("llama-1b", &config, length)
}

/// Returns BERT base with sequences of this length.
pub fn bert_base(length: u64) -> Model {
    known("bert-base", &json!({ "model_type": "bert" }), length)
}

/// Returns T5 small with source and target sequences of these lengths.
pub fn t5_small([source, target]: [u64; 2]) -> Model {
    Model { input: Input::Pair { source, target }, ..known("t5-small", &json!({ "model_type": "t5" }), source) }
}

/// Returns ViT-B/16 with 1000 classes.
pub fn vit_b_16() -> Model {
    known("vit-b", &json!({ "model_type": "vit", "num_labels": 1000 }), 0)
}

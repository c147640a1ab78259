//! Known models. Their parameters are those of torchvision and transformers. `Model::from_config` creates others.

mod convolutional;

use serde_json::{Value, json};

use crate::model::Model;

/// Creates a model from a configuration in this file.
fn known(name: &str, config: &Value, length: u64) -> Model {
    let model = Model::from_fields(config, length).expect("the configuration has only what `from_fields` knows");
    Model { name: name.to_owned(), ..model }
}

/// Returns a model for images of 224 × 224 by its name in torchvision, such as `resnet50`, `vgg16_bn` or `vit_b_16`.
/// `None` if the name is not known.
pub fn torchvision(name: &str) -> Option<Model> {
    let (size, blocks, heads, patch) = match name {
        "vit_b_16" => (768, 12, 12, 16),
        "vit_b_32" => (768, 12, 12, 32),
        "vit_l_16" => (1024, 24, 16, 16),
        "vit_l_32" => (1024, 24, 16, 32),
        _ => return convolutional::named(name),
    };
    let config = json!({
        "model_type": "vit", "hidden_size": size, "num_hidden_layers": blocks, "num_attention_heads": heads,
        "patch_size": patch, "intermediate_size": 4 * size, "num_labels": 1000,
    });
    Some(known(name, &config, 0))
}

fn of_torchvision(name: &str) -> Model {
    torchvision(name).expect("a name in torchvision")
}

/// Returns VGG19 without batch norm.
pub fn vgg19() -> Model {
    of_torchvision("vgg19")
}

/// Returns ResNet-50.
pub fn resnet50() -> Model {
    of_torchvision("resnet50")
}

/// Returns GPT-2 small with sequences of this length.
pub fn gpt2(length: u64) -> Model {
    known("gpt2", &json!({ "model_type": "gpt2" }), length)
}

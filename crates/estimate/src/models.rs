//! Known models. Their parameters are those of torchvision and transformers. `Model::from_config` creates others.

use serde_json::json;

use crate::{Model, Result, files};

/// Returns a model whose description is in this crate.
fn known(model: Option<Result<Model>>) -> Model {
    model.and_then(Result::ok).expect("the description has only what the readers know")
}

/// Returns a model for images of 224 × 224 by its name in torchvision, such as `resnet50`, `vgg16_bn` or `vit_b_16`.
/// `None` if the name is not known.
pub fn torchvision(name: &str) -> Option<Model> {
    files::torchvision(name).map(|model| known(Some(model)))
}

/// Returns VGG19 without batch norm.
pub fn vgg19() -> Model {
    known(files::torchvision("vgg19"))
}

/// Returns ResNet-50.
pub fn resnet50() -> Model {
    known(files::torchvision("resnet50"))
}

/// Returns GPT-2 small with sequences of this length.
pub fn gpt2(length: u64) -> Model {
    known(Some(Model::from_fields(&json!({ "model_type": "gpt2" }), length)))
}

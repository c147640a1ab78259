//! The models and steps of the rows that `measure.py` measures. The example `rows` and the test `measured` share it.

use gpumem_estimate::{
    Dtype, Input, Model, Optimizer, Shape, Step,
    models::{self, ResNet},
};

/// The model and the step of a row, such as `gpt2/8/adamw/bf16/checkpointing` or `resnet50:160/16/sgd/fp32`. `None` if there is no such
/// row.
pub(crate) fn parse(row: &str) -> Option<(Model, Step)> {
    let parts: Vec<_> = row.split('/').collect();
    let [model, batch, mode, precision, rest @ ..] = parts.as_slice() else { return None };
    let optimizer = match *mode {
        "inference" => None,
        "sgd" => Some(Optimizer::Sgd),
        "adamw" => Some(Optimizer::Adam),
        _ => return None,
    };
    let autocast = match *precision {
        "fp32" => None,
        "bf16" => Some(Dtype::Bf16),
        _ => return None,
    };
    let checkpointing = rest == ["checkpointing"];
    let (name, shape) = model.split_once(':').unwrap_or((model, ""));
    let sizes: Vec<u64> = shape.split(',').filter_map(|size| size.parse().ok()).collect();
    let step = Step {
        batch: batch.parse().ok()?,
        optimizer,
        autocast,
        checkpointing: checkpointing.into(),
        ..Step::default()
    };
    Some((build(name, &sizes)?, step))
}

fn build(name: &str, sizes: &[u64]) -> Option<Model> {
    let length = |default: u64| sizes.first().copied().unwrap_or(default);
    let lengths = match *sizes {
        [source, target] => [source, target],
        _ => [256, 128],
    };
    let short = [3, 4, 6, 3];
    let resnet = |sizes| models::resnet(name, sizes);
    let mut model = match name {
        "gpt2" => models::gpt2(length(512)),
        "gpt2-medium" => models::gpt2_medium(length(512)),
        "gpt2-large" => {
            from_config(r#"{"model_type": "gpt2", "n_embd": 1280, "n_layer": 36, "n_head": 20}"#, length(512))?
        }
        "bert-base" => models::bert_base(length(256)),
        "bert-large" => from_config(
            r#"{"model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
                "intermediate_size": 4096}"#,
            length(256),
        )?,
        "llama-1b" => models::llama_1b(length(256)),
        "llama-160m" => from_config(
            r#"{"model_type": "llama", "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048,
                "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}"#,
            length(256),
        )?,
        "t5-small" => models::t5_small(lengths),
        "t5-base" => Model {
            input: Input::Pair { source: lengths[0], target: lengths[1] },
            ..from_config(
                r#"{"model_type": "t5", "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}"#,
                lengths[0],
            )?
        },
        "vit-b" => models::vit_b_16(),
        "vit-l" => from_config(
            r#"{"model_type": "vit", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
                "intermediate_size": 4096, "num_labels": 1000}"#,
            224,
        )?,
        "vgg16" => models::vgg(name, models::VGG16, false),
        "vgg19" => models::vgg19(),
        "resnet18" => resnet(ResNet::new([2, 2, 2, 2], false)),
        "resnet50" => models::resnet50(),
        "resnet101" => resnet(ResNet::new([3, 4, 23, 3], true)),
        "wide_resnet50_2" => resnet(ResNet { blocks: short, has_bottleneck: true, groups: 1, width: 128 }),
        "resnext50_32x4d" => resnet(ResNet { blocks: short, has_bottleneck: true, groups: 32, width: 4 }),
        "convnext_tiny" => models::convnext(name, [3, 3, 9, 3], [96, 192, 384, 768]),
        "convnext_small" => models::convnext(name, [3, 3, 27, 3], [96, 192, 384, 768]),
        "mobilenet_v2" => models::mobilenet_v2(),
        _ => return None,
    };
    if let (Input::Numbers(_), Some(image)) = (&model.input, sizes.first()) {
        model.input = Input::Numbers(Shape::from([3, *image, *image]));
    }
    Some(model)
}

fn from_config(config: &str, length: u64) -> Option<Model> {
    Model::from_config(config, length).ok()
}

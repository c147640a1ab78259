//! Models by name, and the steps of the rows that `measure.py` measures. The example `rows` and the test `measured` share it.

use gpumem_estimate::{
    Dtype, Input, Model, Optimizer, Shape, Step,
    models::{self, ResNet},
};
use serde_json::{Value, json};

/// Returns the model and the step of a row, such as `gpt2/8/adamw/bf16/checkpointing` or `resnet50:160/16/sgd/fp32`. `None` if there is
/// no such row.
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

/// The model of this name, with other sizes than those of its images or texts if there are any. `None` if there is no such model.
pub(crate) fn build(name: &str, sizes: &[u64]) -> Option<Model> {
    let length = |default: u64| sizes.first().copied().unwrap_or(default);
    let lengths = match *sizes {
        [source, target] => [source, target],
        _ => [256, 128],
    };
    let (short, long) = ([3, 4, 6, 3], [3, 4, 23, 3]);
    let resnet = |blocks, has_bottleneck| models::resnet(name, ResNet::new(blocks, has_bottleneck));
    let wide = |blocks, groups, width| models::resnet(name, ResNet { blocks, has_bottleneck: true, groups, width });
    let gpt2 = |size: u64, blocks: u64, heads: u64| {
        let sizes = json!({"model_type": "gpt2", "n_embd": size, "n_layer": blocks, "n_head": heads});
        from_config(&sizes, length(512))
    };
    let llama = |vocabulary: u64, size: u64, hidden: u64, blocks: u64, heads: u64, key_value_heads: u64| {
        let sizes = json!({
            "model_type": "llama", "vocab_size": vocabulary, "hidden_size": size, "intermediate_size": hidden,
            "num_hidden_layers": blocks, "num_attention_heads": heads, "num_key_value_heads": key_value_heads,
            "tie_word_embeddings": name == "llama-3b",
        });
        from_config(&sizes, length(256))
    };
    let vit = |size: u64, blocks: u64, heads: u64, patch: u64| {
        let sizes = json!({
            "model_type": "vit", "hidden_size": size, "num_hidden_layers": blocks, "num_attention_heads": heads,
            "patch_size": patch, "intermediate_size": 4 * size, "num_labels": 1000,
        });
        from_config(&sizes, 224)
    };
    let mut model = match name {
        "gpt2" => models::gpt2(length(512)),
        "gpt2-medium" => models::gpt2_medium(length(512)),
        "gpt2-large" => gpt2(1280, 36, 20)?,
        "gpt2-xl" => gpt2(1600, 48, 25)?,
        "bert-base" => models::bert_base(length(256)),
        "bert-large" => {
            let sizes = json!({
                "model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
                "intermediate_size": 4096,
            });
            from_config(&sizes, length(256))?
        }
        "llama-1b" => models::llama_1b(length(256)),
        "llama-160m" => llama(32_000, 768, 2048, 12, 12, 4)?,
        "llama-3b" => llama(128_256, 3072, 8192, 28, 24, 8)?,
        "llama-2-7b" => llama(32_000, 4096, 11_008, 32, 32, 32)?,
        "llama-2-13b" => llama(32_000, 5120, 13_824, 40, 40, 40)?,
        "llama-2-70b" => llama(32_000, 8192, 28_672, 80, 64, 8)?,
        "llama-3-8b" => llama(128_256, 4096, 14_336, 32, 32, 8)?,
        "llama-3-70b" => llama(128_256, 8192, 28_672, 80, 64, 8)?,
        "t5-small" => models::t5_small(lengths),
        "t5-base" => {
            let sizes = json!({"model_type": "t5", "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12});
            let input = Input::Pair { source: lengths[0], target: lengths[1] };
            Model { input, ..from_config(&sizes, lengths[0])? }
        }
        "vit-b" | "vit_b_16" => models::vit_b_16(),
        "vit_b_32" => vit(768, 12, 12, 32)?,
        "vit-l" | "vit_l_16" => vit(1024, 24, 16, 16)?,
        "vit_l_32" => vit(1024, 24, 16, 32)?,
        "alexnet" => models::alexnet(),
        "vgg11" | "vgg11_bn" => models::vgg(name, models::VGG11, name.ends_with("_bn")),
        "vgg13" | "vgg13_bn" => models::vgg(name, models::VGG13, name.ends_with("_bn")),
        "vgg16" | "vgg16_bn" => models::vgg(name, models::VGG16, name.ends_with("_bn")),
        "vgg19_bn" => models::vgg(name, models::VGG19, true),
        "vgg19" => models::vgg19(),
        "resnet18" => resnet([2, 2, 2, 2], false),
        "resnet34" => resnet(short, false),
        "resnet50" => models::resnet50(),
        "resnet101" => resnet(long, true),
        "resnet152" => resnet([3, 8, 36, 3], true),
        "wide_resnet50_2" => wide(short, 1, 128),
        "wide_resnet101_2" => wide(long, 1, 128),
        "resnext50_32x4d" => wide(short, 32, 4),
        "resnext101_32x8d" => wide(long, 32, 8),
        "resnext101_64x4d" => wide(long, 64, 4),
        "convnext_tiny" => models::convnext(name, [3, 3, 9, 3], [96, 192, 384, 768]),
        "convnext_small" => models::convnext(name, [3, 3, 27, 3], [96, 192, 384, 768]),
        "convnext_base" => models::convnext(name, [3, 3, 27, 3], [128, 256, 512, 1024]),
        "convnext_large" => models::convnext(name, [3, 3, 27, 3], [192, 384, 768, 1536]),
        "mobilenet_v2" => models::mobilenet_v2(),
        _ => return None,
    };
    if let (Input::Numbers(_), Some(image)) = (&model.input, sizes.first()) {
        model.input = Input::Numbers(Shape::from([3, *image, *image]));
    }
    Some(model)
}

fn from_config(config: &Value, length: u64) -> Option<Model> {
    Model::from_config(&config.to_string(), length).ok()
}

//! The parameters of known models. `parameters.txt` has what torchvision and transformers say; `measure/parameters.py` wrote it.

use gpumem_estimate::{
    Dtype, Model,
    models::{self, ResNet},
};

fn vgg(name: &str) -> Model {
    let (plain, has_norm) = name.strip_suffix("_bn").map_or((name, false), |plain| (plain, true));
    let convolutions = match plain {
        "vgg11" => models::VGG11,
        "vgg13" => models::VGG13,
        "vgg16" => models::VGG16,
        _ => models::VGG19,
    };
    models::vgg(name, convolutions, has_norm)
}

fn config(kind: &str, fields: &str) -> Model {
    Model::from_config(&format!(r#"{{"model_type": "{kind}"{fields}}}"#), 16).unwrap()
}

fn llama(vocabulary: u64, size: u64, hidden: u64, blocks: usize, [heads, key_value_heads]: [u64; 2]) -> Model {
    let fields = format!(
        r#", "vocab_size": {vocabulary}, "hidden_size": {size}, "intermediate_size": {hidden}, "num_hidden_layers": {blocks},
        "num_attention_heads": {heads}, "num_key_value_heads": {key_value_heads}, "tie_word_embeddings": {}"#,
        size == 3072
    );
    config("llama", &fields)
}

fn vit(size: u64, blocks: usize, heads: u64, patch: u64) -> Model {
    let fields = format!(
        r#", "hidden_size": {size}, "num_hidden_layers": {blocks}, "num_attention_heads": {heads}, "patch_size": {patch},
        "intermediate_size": {}, "num_labels": 1000"#,
        4 * size
    );
    config("vit", &fields)
}

fn model(name: &str) -> Model {
    let (short, long) = ([3, 4, 6, 3], [3, 4, 23, 3]);
    let resnet = |sizes| models::resnet(name, sizes);
    let wide = |blocks, groups, width| resnet(ResNet { blocks, has_bottleneck: true, groups, width });
    match name {
        "alexnet" => models::alexnet(),
        "resnet18" => resnet(ResNet::new([2, 2, 2, 2], false)),
        "resnet34" => resnet(ResNet::new(short, false)),
        "resnet50" => models::resnet50(),
        "resnet101" => resnet(ResNet::new(long, true)),
        "resnet152" => resnet(ResNet::new([3, 8, 36, 3], true)),
        "wide_resnet50_2" => wide(short, 1, 128),
        "wide_resnet101_2" => wide(long, 1, 128),
        "resnext50_32x4d" => wide(short, 32, 4),
        "resnext101_32x8d" => wide(long, 32, 8),
        "resnext101_64x4d" => wide(long, 64, 4),
        "mobilenet_v2" => models::mobilenet_v2(),
        "convnext_tiny" => models::convnext(name, [3, 3, 9, 3], [96, 192, 384, 768]),
        "convnext_small" => models::convnext(name, [3, 3, 27, 3], [96, 192, 384, 768]),
        "convnext_base" => models::convnext(name, [3, 3, 27, 3], [128, 256, 512, 1024]),
        "convnext_large" => models::convnext(name, [3, 3, 27, 3], [192, 384, 768, 1536]),
        "vit_b_16" | "vit-b" => models::vit_b_16(),
        "vit_b_32" => vit(768, 12, 12, 32),
        "vit_l_16" | "vit-l" => vit(1024, 24, 16, 16),
        "vit_l_32" => vit(1024, 24, 16, 32),
        "t5-small" => models::t5_small([16, 16]),
        "gpt2" => models::gpt2(16),
        "gpt2-medium" => models::gpt2_medium(16),
        "gpt2-large" => config("gpt2", r#", "n_embd": 1280, "n_layer": 36, "n_head": 20"#),
        "gpt2-xl" => config("gpt2", r#", "n_embd": 1600, "n_layer": 48, "n_head": 25"#),
        "bert-base" => models::bert_base(16),
        "bert-large" => {
            let sizes = r#", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16"#;
            config("bert", &format!(r#"{sizes}, "intermediate_size": 4096"#))
        }
        "llama-1b" => models::llama_1b(16),
        "llama-3b" => llama(128_256, 3072, 8192, 28, [24, 8]),
        "llama-2-7b" => llama(32_000, 4096, 11_008, 32, [32, 32]),
        "llama-2-13b" => llama(32_000, 5120, 13_824, 40, [40, 40]),
        "llama-2-70b" => llama(32_000, 8192, 28_672, 80, [64, 8]),
        "llama-3-8b" => llama(128_256, 4096, 14_336, 32, [32, 8]),
        "llama-3-70b" => llama(128_256, 8192, 28_672, 80, [64, 8]),
        name if name.starts_with("vgg") => vgg(name),
        name => panic!("there is no builder for {name}"),
    }
}

#[test]
fn parameters_are_those_of_torchvision_and_transformers() {
    let lines: Vec<_> = include_str!("parameters.txt").lines().filter(|line| !line.starts_with('#')).collect();
    assert!(lines.len() >= 40, "{} models", lines.len());
    for line in lines {
        let [library, name, count] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let sum = model(name).parameters(Dtype::Bf16).unwrap().sum();
        assert_eq!(sum.elements.to_string(), count, "{library} {name}");
        assert_eq!(sum.bytes.get(), 2 * sum.elements);
    }
}

//! Image models of diffusers, which predict the noise in an image.

use gpumem_core::report::counted;

use super::{
    fields::{Fields, MOST_BLOCKS, product, wrong},
    parts::{activation, inline, linear, residual},
};
use crate::{
    error::Error,
    layer::{Attention, AttentionNames, Function, Layer, Named, PositionKind, numbered},
    model::{Input, Loss, Model},
    shape::Shape,
};

const TIME: &str = "time";
const SKIPPED: &str = "skipped";
/// The joined tensor of a block, which lives until the end of the block.
const JOINED: &str = "joined";
const TEXT: &str = "text";

/// Returns a further input of the model, and the layers that it passes through before others read it.
fn provide(slot: &str, sizes: Vec<u64>, integers: bool, layers: Vec<Named>) -> Named {
    Layer::Provide { slot: slot.to_owned(), sizes, integers, is_next: false, layers }.named("")
}

fn leave(slot: &str) -> Named {
    Layer::Leave { slot: slot.to_owned() }.named("")
}

fn group_norm(name: &str, channels: u64, groups: u64) -> Named {
    Layer::GroupNorm { groups, channels }.named(name)
}

fn conv(name: &str, inputs: u64, outputs: u64, kernel: u64, stride: u64) -> Named {
    Layer::conv2d(inputs, outputs, kernel, stride, kernel / 2).named(name)
}

/// Creates attention among the pixels of an image, or from them to a text.
fn attention(size: u64, heads: u64, text: Option<u64>, has_bias: bool) -> Layer {
    let mut names = AttentionNames::new(["to_q", "to_k", "to_v", "to_out.0"]);
    names.norms = ["norm_q", "norm_k"].map(str::to_owned);
    // Only the output projection has a bias, which `no_bias` would remove.
    Layer::Attention(Attention {
        size,
        heads,
        reads: text.map(|_| TEXT.to_owned()),
        source_size: text.unwrap_or(0),
        no_input_bias: !has_bias,
        names,
        ..Attention::default()
    })
}

/// The sizes of Stable Diffusion's `UNet`.
struct UNet {
    groups: u64,
    time: u64,
    text: u64,
    layers: usize,
    is_linear: bool,
    function: Function,
}

impl UNet {
    fn resnet(&self, inputs: u64, outputs: u64) -> Layer {
        let time = vec![activation(self.function), linear("time_emb_proj", self.time, outputs, true)];
        let layers = vec![
            group_norm("norm1", inputs, self.groups),
            activation(self.function),
            conv("conv1", inputs, outputs, 3, 1),
            Layer::AddLeft { slot: TIME.to_owned(), layers: time }.named(""),
            group_norm("norm2", outputs, self.groups),
            activation(self.function),
            conv("conv2", outputs, outputs, 3, 1),
        ];
        let shortcut = if inputs == outputs { vec![] } else { vec![conv("conv_shortcut", inputs, outputs, 1, 1)] };
        let sum = Layer::Residual { layers, shortcut, in_place: false }.named("");
        // The sum is divided by a number that is 1.
        Layer::Block { layers: vec![sum, Layer::Scale.named("")] }
    }

    fn transformer(&self, size: u64, heads: u64, blocks: u64) -> Result<Layer, Error> {
        let (wide, inner) = (product(&[8, size])?, product(&[4, size])?);
        let norm = |name: &str| Layer::LayerNorm { size }.named(name);
        let mlp = vec![
            linear("ff.net.0.proj", size, wide, true),
            Layer::GatedSplit { function: Function::Gelu }.named(""),
            linear("ff.net.2", inner, size, true),
        ];
        let layers = vec![
            residual(vec![norm("norm1"), attention(size, heads, None, false).named("attn1")]),
            residual(vec![norm("norm2"), attention(size, heads, Some(self.text), false).named("attn2")]),
            residual(vec![norm("norm3"), inline(mlp)]),
        ];
        let blocks = (0..blocks).map(|_| Layer::Block { layers: layers.clone() });
        let blocks = Layer::Sequential { layers: numbered(blocks) }.named("transformer_blocks");
        let mut layers = vec![group_norm("norm", size, self.groups)];
        if self.is_linear {
            let tokens = vec![linear("proj_in", size, size, true), blocks, linear("proj_out", size, size, true)];
            layers.push(Layer::AsTokens { layers: tokens }.named(""));
        } else {
            layers.push(conv("proj_in", size, size, 1, 1));
            layers.push(Layer::AsTokens { layers: vec![blocks] }.named(""));
            layers.push(conv("proj_out", size, size, 1, 1));
        }
        Ok(Layer::Residual { layers, shortcut: vec![], in_place: false })
    }

    fn middle(&self, size: u64, heads: u64, blocks: u64) -> Result<Layer, Error> {
        let layers = vec![
            self.resnet(size, size).named("resnets.0"),
            self.transformer(size, heads, blocks)?.named("attentions.0"),
            self.resnet(size, size).named("resnets.1"),
        ];
        Ok(Layer::Sequential { layers })
    }
}

/// Reads a number for each part of the model, or one for all.
fn for_each(fields: Fields<'_>, key: &str, default: u64, count: usize) -> Result<Vec<u64>, Error> {
    let numbers = match fields.get(key) {
        Some(serde_json::Value::Array(_)) => fields.numbers(key)?.unwrap_or_default(),
        _ => vec![fields.number(key, default)?; count],
    };
    if numbers.len() == count {
        Ok(numbers)
    } else {
        Err(wrong(format!("`{key}` does not have exactly {}", counted(count as u64, "element", "elements"))))
    }
}

/// Reads the types of blocks: `true` means with attention.
fn kinds(fields: Fields<'_>, key: &str, part: &str, default: &[bool]) -> Result<Vec<bool>, Error> {
    let Some(list) = fields.list(key)? else { return Ok(default.to_vec()) };
    let known = |kind: &serde_json::Value| match kind.as_str() {
        Some(kind) if kind == format!("CrossAttn{part}Block2D") => Ok(true),
        Some(kind) if kind == format!("{part}Block2D") => Ok(false),
        _ => Err(wrong(format!("`{key}` has {kind}, which is not supported"))),
    };
    list.iter().map(known).collect()
}

/// Checks that no setting belongs to another model.
fn refuse_others(fields: Fields<'_>) -> Result<(), Error> {
    for (key, known) in [
        ("class_embed_type", None),
        ("encoder_hid_dim", None),
        ("encoder_hid_dim_type", None),
        ("time_cond_proj_dim", None),
        ("mid_block_type", Some("UNetMidBlock2DCrossAttn")),
        ("resnet_time_scale_shift", Some("default")),
        ("time_embedding_type", Some("positional")),
        ("attention_type", Some("default")),
    ] {
        fields.is(key, known.map_or(serde_json::Value::Null, serde_json::Value::from))?;
    }
    for key in ["dual_cross_attention", "resnet_skip_time_act", "only_cross_attention", "class_embeddings_concat"] {
        fields.is(key, false)?;
    }
    fields.is("dropout", 0.0)?;
    fields.is("conv_in_kernel", 3)?;
    fields.is("conv_out_kernel", 3)?;
    Ok(())
}

/// Checks the number of blocks. A stage has blocks on the way down and one more on the way up. Each may contain a
/// transformer with many blocks.
fn check_blocks(of_stage: u64, depths: &[u64]) -> Result<(), Error> {
    let both_ways = of_stage.saturating_mul(2).saturating_add(1);
    let blocks = depths.iter().map(|depth| both_ways.saturating_mul(depth.saturating_add(1)));
    let blocks = blocks.fold(0, u64::saturating_add);
    if blocks <= MOST_BLOCKS {
        return Ok(());
    }
    let what = "`layers_per_block` and `transformer_layers_per_block`";
    Err(wrong(format!("{what} make {blocks} blocks; a model of at most {MOST_BLOCKS} blocks is estimated")))
}

/// Creates Stable Diffusion's `UNet`. `length` is the length of the text that it reads.
pub(super) fn unet(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    refuse_others(fields)?;
    let channels = fields.numbers("block_out_channels")?.unwrap_or_else(|| vec![320, 640, 1280, 1280]);
    let stages = channels.len();
    let [Some(&first), Some(&last)] = [channels.first(), channels.last()] else {
        return Err(wrong("`block_out_channels` is empty"));
    };
    let down = kinds(fields, "down_block_types", "Down", &[true, true, true, false])?;
    let up = kinds(fields, "up_block_types", "Up", &[false, true, true, true])?;
    if down.len() != stages || up.len() != stages {
        let keys = "`block_out_channels`, `down_block_types` and `up_block_types`";
        return Err(wrong(format!("{keys} have {stages}, {} and {} elements", down.len(), up.len())));
    }
    // Without `num_attention_heads`, the field `attention_head_dim` contains the number of heads.
    let key = if fields.optional("num_attention_heads").is_ok_and(|heads| heads.is_none()) {
        "attention_head_dim"
    } else {
        "num_attention_heads"
    };
    let heads = for_each(fields, key, 8, stages)?;
    let depths = for_each(fields, "transformer_layers_per_block", 1, stages)?;
    if heads.contains(&0) {
        return Err(wrong("a block has 0 heads"));
    }
    let of_stage = fields.number("layers_per_block", 2)?;
    check_blocks(of_stage, &depths)?;
    let sizes = UNet {
        groups: fields.divisor("norm_num_groups", 32)?,
        time: product(&[4, first])?,
        text: fields.number("cross_attention_dim", 1280)?,
        layers: usize::try_from(of_stage).map_err(wrong)?,
        is_linear: fields.flag("use_linear_projection", false)?,
        function: fields.function("act_fn", "silu")?,
    };
    let (inputs, outputs) = (fields.number("in_channels", 4)?, fields.number("out_channels", 4)?);
    let side = fields.number("sample_size", 64)?;
    let mut layers = vec![
        provide(TEXT, vec![length, sizes.text], false, vec![]),
        provide_time(fields, first, sizes.time, sizes.function)?,
    ];
    layers.extend([conv("conv_in", inputs, first, 3, 1), leave(SKIPPED)]);
    // The channels of the tensors that were left, in order.
    let mut skipped = vec![first];
    let mut current = first;
    for stage in 0..stages {
        let mut block = Vec::new();
        for layer in 0..sizes.layers {
            block.push(sizes.resnet(current, channels[stage]).named(format!("resnets.{layer}")));
            current = channels[stage];
            if down[stage] {
                let transformer = sizes.transformer(current, heads[stage], depths[stage])?;
                block.push(transformer.named(format!("attentions.{layer}")));
            }
            block.push(leave(SKIPPED));
            skipped.push(current);
        }
        if stage + 1 < stages {
            block.extend([conv("downsamplers.0.conv", current, current, 3, 2), leave(SKIPPED)]);
            skipped.push(current);
        }
        layers.push(Layer::Sequential { layers: block }.named(format!("down_blocks.{stage}")));
    }
    let middle = sizes.middle(last, heads[stages - 1], depths[stages - 1])?;
    layers.push(middle.named("mid_block"));
    for (number, stage) in (0..stages).rev().enumerate() {
        let mut block = Vec::new();
        for layer in 0..=sizes.layers {
            let joined = skipped.pop().and_then(|skipped| current.checked_add(skipped));
            let joined = joined.ok_or_else(|| wrong("the sizes are too large"))?;
            block.push(Layer::Join { slot: SKIPPED.to_owned(), joined: JOINED.to_owned() }.named(""));
            block.push(sizes.resnet(joined, channels[stage]).named(format!("resnets.{layer}")));
            current = channels[stage];
            if up[number] {
                let transformer = sizes.transformer(current, heads[stage], depths[stage])?;
                block.push(transformer.named(format!("attentions.{layer}")));
            }
        }
        if stage > 0 {
            block.extend([Layer::Upsample { factor: 2 }.named(""), conv("upsamplers.0.conv", current, current, 3, 1)]);
        }
        block.push(Layer::Release { slot: JOINED.to_owned() }.named(""));
        layers.push(Layer::Sequential { layers: block }.named(format!("up_blocks.{number}")));
    }
    layers.extend([
        group_norm("conv_norm_out", current, sizes.groups),
        activation(sizes.function),
        conv("conv_out", current, outputs, 3, 1),
    ]);
    let input = Input::Numbers(Shape::from([inputs, side, side]));
    Ok(Model { name: "unet".to_owned(), input, layers, loss: Loss::MeanSquares })
}

/// Returns the embedding of the time, and for Stable Diffusion XL also that of the image's sizes and of the whole text.
fn provide_time(fields: Fields<'_>, inputs: u64, size: u64, function: Function) -> Result<Named, Error> {
    let embedding = |name: &str, inputs: u64| {
        let linear = |part: &str, inputs: u64| linear(&format!("{name}.{part}"), inputs, size, true);
        inline(vec![linear("linear_1", inputs), activation(function), linear("linear_2", size)])
    };
    let mut layers = vec![embedding("time_embedding", inputs)];
    match fields.text("addition_embed_type", "")? {
        "" => {}
        "text_time" => {
            let inputs = fields.number("projection_class_embeddings_input_dim", 2816)?;
            let added = provide("added", vec![inputs], false, vec![embedding("add_embedding", inputs)]);
            layers.extend([added, Layer::AddLeft { slot: "added".to_owned(), layers: vec![] }.named("")]);
        }
        other => return Err(wrong(format!("`addition_embed_type` is \"{other}\", which is not supported"))),
    }
    Ok(provide(TIME, vec![inputs], false, layers))
}

/// Creates the only supported model of a class that was used for all image transformers.
pub(super) fn old_dit(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    match fields.text("norm_type", "layer_norm")? {
        "ada_norm_zero" => dit(fields, length),
        other => Err(wrong(format!("`norm_type` is \"{other}\"; only \"ada_norm_zero\" is supported"))),
    }
}

/// Creates an image transformer that is conditioned on a class.
pub(super) fn dit(fields: Fields<'_>, _: u64) -> Result<Model, Error> {
    fields.is("norm_type", "ada_norm_zero")?;
    fields.is("norm_elementwise_affine", false)?;
    fields.is("activation_fn", "gelu-approximate")?;
    fields.is("dropout", 0.0)?;
    let heads = fields.divisor("num_attention_heads", 16)?;
    let size = product(&[heads, fields.number("attention_head_dim", 72)?])?;
    let inputs = fields.number("in_channels", 4)?;
    let outputs = fields.derived("out_channels", inputs)?;
    let (patch, image) = (fields.divisor("patch_size", 2)?, fields.number("sample_size", 32)?);
    let classes = fields.number("num_embeds_ada_norm", 1000)?;
    let rows = classes.checked_add(1).ok_or_else(|| wrong("the sizes are too large"))?;
    let has_bias = fields.flag("attention_bias", true)?;
    let (hidden, six) = (product(&[4, size])?, product(&[6, size])?);
    let patches = product(&[image / patch, image / patch])?;
    let modulate = || Layer::Modulate { slot: "modulation".to_owned(), parts: 6 }.named("");
    let scale = || Layer::ScaleByLeft { slot: "modulation".to_owned(), parts: 6 }.named("");
    let condition = vec![
        linear("norm1.emb.timestep_embedder.linear_1", 256, size, true),
        activation(Function::Silu),
        linear("norm1.emb.timestep_embedder.linear_2", size, size, true),
        Layer::AddLeft {
            slot: "classes".to_owned(),
            layers: vec![Layer::Embedding { rows, size }.named("norm1.emb.class_embedder.embedding_table")],
        }
        .named(""),
        leave("conditioning"),
        activation(Function::Silu),
        linear("norm1.linear", size, six, true),
    ];
    let attention = attention(size, heads, None, has_bias).named("attn1");
    let mlp = vec![
        linear("ff.net.0.proj", size, hidden, true),
        activation(Function::Gelu),
        linear("ff.net.2", hidden, size, true),
    ];
    let layers = vec![
        Layer::Derive { from: TIME.to_owned(), slot: "modulation".to_owned(), layers: condition }.named(""),
        residual(vec![Layer::Normalize.named(""), modulate(), attention, scale()]),
        residual(vec![Layer::Normalize.named(""), modulate(), inline(mlp), scale()]),
    ];
    let block = Layer::Block { layers };
    let last = vec![activation(Function::Silu), linear("proj_out_1", size, product(&[2, size])?, true)];
    let blocks = vec![block; fields.layers("num_layers", 28)?];
    let layers = vec![
        provide(TIME, vec![256], false, vec![]),
        provide("classes", vec![], true, vec![]),
        Layer::conv2d(inputs, size, patch, patch, 0).named("pos_embed.proj"),
        Layer::AsRows.named(""),
        Layer::Positions { rows: patches, size, kind: PositionKind::Buffer }.named("pos_embed"),
        Layer::Sequential { layers: numbered(blocks) }.named("transformer_blocks"),
        Layer::Derive { from: "conditioning".to_owned(), slot: "last".to_owned(), layers: last }.named(""),
        Layer::Normalize.named(""),
        Layer::Modulate { slot: "last".to_owned(), parts: 2 }.named(""),
        linear("proj_out_2", size, product(&[patch, patch, outputs])?, true),
        Layer::ImageFromPatches { channels: outputs, patch }.named(""),
    ];
    let input = Input::Numbers(Shape::from([inputs, image, image]));
    Ok(Model { name: "dit".to_owned(), input, layers, loss: Loss::MeanSquares })
}

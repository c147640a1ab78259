//! Models that read a whole text or image at once.

use super::{
    fields::{Fields, head_size, product, wrong},
    parts::{activation, dropped, inline, layer_norm, linear, mlp, residual},
};
use crate::{
    error::Error,
    layer::{Attention, AttentionNames, Embeddings, Layer, Linear, Named, numbered},
    model::{Input, Loss, Model},
    shape::Shape,
};

/// Creates attention with biases, without positions.
fn attention(fields: Fields<'_>, size: u64, heads: u64) -> Result<Attention, Error> {
    let heads = fields.divisor("num_attention_heads", heads)?;
    head_size(size, heads)?;
    Ok(Attention { size, heads, ..Attention::default() })
}

pub(super) fn bert(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let size = fields.number("hidden_size", 768)?;
    let hidden = fields.number("intermediate_size", 3072)?;
    fields.is("is_decoder", false)?;
    fields.is("tie_word_embeddings", true)?;
    fields.is("add_cross_attention", false)?;
    fields.is("position_embedding_type", "absolute")?;
    let function = fields.function("hidden_act", "gelu")?;
    let probability = fields.fraction("hidden_dropout_prob", 0.1)?;
    let names = AttentionNames::new(["self.query", "self.key", "self.value", "output.dense"]);
    let attention = Attention { names, ..attention(fields, size, 12)? };
    let first = dropped(vec![Layer::Attention(attention).named("attention")], probability);
    let intermediate = inline(vec![linear("intermediate.dense", size, hidden, true), activation(function)]);
    let output = dropped(vec![linear("output.dense", hidden, size, true)], probability);
    let layers = vec![
        residual(first),
        layer_norm("attention.output.LayerNorm", size),
        residual(vec![intermediate, inline(output)]),
        layer_norm("output.LayerNorm", size),
    ];
    let block = Layer::Block { layers };
    let names = ["word_embeddings", "position_embeddings", "token_type_embeddings"];
    let tokens = fields.number("vocab_size", 30_522)?;
    let embeddings = Embeddings {
        size,
        tokens,
        positions: fields.number("max_position_embeddings", 512)?,
        segments: fields.number("type_vocab_size", 2)?,
        names: names.iter().map(|name| format!("bert.embeddings.{name}")).collect(),
    };
    // The output of the last block lives until the head is done. The head shares the weight of the embedding, and has
    // its own bias.
    let tied_to = Some("bert.embeddings.word_embeddings".to_owned());
    let decoder = Linear { inputs: size, outputs: tokens, no_bias: false, tied_to };
    let transform = vec![linear("dense", size, size, true), activation(function), layer_norm("LayerNorm", size)];
    let head = vec![
        Layer::Sequential { layers: transform }.named("cls.predictions.transform"),
        Layer::Linear(decoder).named("cls.predictions"),
    ];
    let blocks = vec![block; fields.layers("num_hidden_layers", 12)?];
    let layers = vec![Layer::Embeddings(embeddings).named(""), layer_norm("bert.embeddings.LayerNorm", size)];
    let mut layers = dropped(layers, probability);
    layers.extend([Layer::Sequential { layers: numbered(blocks) }.named("bert.encoder.layer"), inline(head)]);
    Ok(Model { name: "bert".to_owned(), input: Input::Tokens(length), layers, loss: Loss::Token })
}

/// Returns the number of classes of an image model.
fn classes(fields: Fields<'_>) -> Result<u64, Error> {
    let named = fields.get("id2label").and_then(serde_json::Value::as_object).map(|labels| labels.len() as u64);
    Ok(named.or(fields.optional("num_labels")?).unwrap_or(2))
}

pub(super) fn vit(fields: Fields<'_>, _: u64) -> Result<Model, Error> {
    let size = fields.number("hidden_size", 768)?;
    let hidden = fields.number("intermediate_size", 3072)?;
    fields.is("qkv_bias", true)?;
    let function = fields.function("hidden_act", "gelu")?;
    let probability = fields.fraction("hidden_dropout_prob", 0.0)?;
    let attention = attention(fields, size, 12)?;
    let first = vec![layer_norm("layernorm_before", size), Layer::Attention(attention).named("attention")];
    let second = vec![layer_norm("layernorm_after", size), mlp(["mlp.fc1", "mlp.fc2"], size, hidden, function)];
    let layers = [first, second].map(|layers| residual(dropped(layers, probability))).to_vec();
    let block = Layer::Block { layers };
    let (channels, image) = (fields.number("num_channels", 3)?, fields.number("image_size", 224)?);
    let patch = fields.divisor("patch_size", 16)?;
    let blocks = vec![block; fields.layers("num_hidden_layers", 12)?];
    let layers = vec![Layer::PatchEmbedding { channels, image, patch, size, as_clip: false }.named("vit.embeddings")];
    let mut layers = dropped(layers, probability);
    layers.extend([
        Layer::Sequential { layers: numbered(blocks) }.named("vit.layers"),
        layer_norm("vit.layernorm", size),
        Layer::FirstToken.named(""),
        linear("classifier", size, classes(fields)?, true),
    ]);
    let input = Input::Numbers(Shape::from([channels, image, image]));
    Ok(Model { name: "vit".to_owned(), input, layers, loss: Loss::CrossEntropy })
}

/// Returns the number of patches of an image.
fn patches(image: u64, patch: u64) -> Result<u64, Error> {
    let side = image.checked_div(patch).ok_or_else(|| wrong("`patch_size` is 0"))?;
    product(&[side, side])
}

/// Creates the blocks of CLIP's and `SigLIP`'s encoders.
pub(super) fn clip_blocks(fields: Fields<'_>, defaults: [u64; 3], function: &'static str) -> Result<Vec<Layer>, Error> {
    let [size, hidden, heads] = defaults;
    let size = fields.number("hidden_size", size)?;
    let hidden = fields.number("intermediate_size", hidden)?;
    let names = AttentionNames::new(["q_proj", "k_proj", "v_proj", "out_proj"]);
    let attention = Attention { names, ..attention(fields, size, heads)? };
    let function = fields.function("hidden_act", function)?;
    let attention = Layer::Attention(attention).named("self_attn");
    let mlp = mlp(["mlp.fc1", "mlp.fc2"], size, hidden, function);
    let first = residual(vec![layer_norm("layer_norm1", size), attention]);
    let block = Layer::Block { layers: vec![first, residual(vec![layer_norm("layer_norm2", size), mlp])] };
    Ok(vec![block; fields.layers("num_hidden_layers", 12)?])
}

/// Creates `SigLIP`'s image encoder, which is part of other models.
pub(super) fn siglip(fields: Fields<'_>, name: &str) -> Result<Vec<Named>, Error> {
    let size = fields.number("hidden_size", 768)?;
    let hidden = fields.number("intermediate_size", 3072)?;
    let (channels, patch) = (fields.number("num_channels", 3)?, fields.divisor("patch_size", 16)?);
    let rows = patches(fields.number("image_size", 224)?, patch)?;
    let mut layers = vec![
        Layer::conv2d(channels, size, patch, patch, 0).named("embeddings.patch_embedding"),
        Layer::Embedding { rows, size }.named("embeddings.position_embedding"),
        Layer::Sequential { layers: numbered(clip_blocks(fields, [768, 3072, 12], "gelu_pytorch_tanh")?) }
            .named("encoder.layers"),
        layer_norm("post_layernorm", size),
    ];
    if fields.flag("vision_use_head", true)? {
        let function = fields.function("hidden_act", "gelu_pytorch_tanh")?;
        layers.extend([
            Layer::Embedding { rows: 1, size }.named("head"),
            linear("head.attention", size, product(&[3, size])?, true),
            linear("head.attention.out_proj", size, size, true),
            layer_norm("head.layernorm", size),
            mlp(["head.mlp.fc1", "head.mlp.fc2"], size, hidden, function),
        ]);
    }
    Ok(vec![Layer::Sequential { layers }.named(name)])
}

/// Creates Llama 4's image encoder.
pub(super) fn llama4_vision(fields: Fields<'_>, name: &str) -> Result<Vec<Named>, Error> {
    let size = fields.number("hidden_size", 768)?;
    let hidden = fields.number("intermediate_size", 5632)?;
    let (channels, patch) = (fields.number("num_channels", 3)?, fields.divisor("patch_size", 14)?);
    let patches = patches(fields.number("image_size", 448)?, patch)?;
    let function = fields.function("hidden_act", "gelu")?;
    let attention = attention(fields, size, 16)?;
    let layers = vec![
        layer_norm("input_layernorm", size),
        Layer::Attention(attention).named("self_attn"),
        layer_norm("post_attention_layernorm", size),
        mlp(["mlp.fc1", "mlp.fc2"], size, hidden, function),
    ];
    let block = Layer::Block { layers };
    let blocks = vec![block; fields.layers("num_hidden_layers", 34)?];
    let [inputs, outputs] = [fields.number("projector_input_dim", 4096)?, fields.number("projector_output_dim", 4096)?];
    let rows = patches.checked_add(2).ok_or_else(|| wrong("the sizes are too large"))?;
    let layers = vec![
        // The class token, and the positions of all patches and of that token.
        Layer::Embedding { rows, size }.named(""),
        linear("patch_embedding.linear", product(&[channels, patch, patch])?, size, false),
        layer_norm("layernorm_pre", size),
        layer_norm("layernorm_post", size),
        Layer::Sequential { layers: numbered(blocks) }.named("model.layers"),
        linear("vision_adapter.mlp.fc1", hidden, inputs, false),
        linear("vision_adapter.mlp.fc2", outputs, outputs, false),
    ];
    Ok(vec![Layer::Sequential { layers }.named(name)])
}

/// Creates CLIP with a batch of images and as many texts.
pub(super) fn clip(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let (text, vision) = (fields.inner("text_config"), fields.inner("vision_config"));
    let projection = fields.number("projection_dim", 512)?;
    let [text_size, size] = [text.number("hidden_size", 512)?, vision.number("hidden_size", 768)?];
    let (channels, image) = (vision.number("num_channels", 3)?, vision.number("image_size", 224)?);
    let patch = vision.divisor("patch_size", 32)?;
    let leave = |slot: &str| Layer::Leave { slot: slot.to_owned() }.named("");
    let images = vec![
        Layer::PatchEmbedding { channels, image, patch, size, as_clip: true }.named("embeddings"),
        layer_norm("pre_layrnorm", size),
        Layer::Sequential { layers: numbered(clip_blocks(vision, [768, 3072, 12], "quick_gelu")?) }
            .named("encoder.layers"),
        // The output of the encoder lives as long as the model runs.
        leave("images"),
        Layer::FirstToken.named(""),
        layer_norm("post_layernorm", size),
    ];
    let positions = text.number("max_position_embeddings", 77)?;
    if length > positions {
        return Err(wrong(format!("texts of {length} tokens are longer than the {positions} positions")));
    }
    let embeddings = Embeddings {
        size: text_size,
        tokens: text.number("vocab_size", 49_408)?,
        positions,
        segments: 0,
        names: ["token_embedding", "position_embedding", ""].map(str::to_owned).to_vec(),
    };
    let texts = vec![
        Layer::Embeddings(embeddings).named("embeddings"),
        Layer::Sequential { layers: numbered(clip_blocks(text, [512, 2048, 8], "quick_gelu")?) }
            .named("encoder.layers"),
        layer_norm("final_layer_norm", text_size),
        leave("texts"),
        Layer::FirstToken.named(""),
    ];
    let tokens = Layer::Provide {
        slot: "tokens".to_owned(),
        sizes: vec![length],
        integers: true,
        is_next: true,
        layers: vec![Layer::Sequential { layers: texts }.named("text_model")],
    };
    let layers = vec![
        Layer::Sequential { layers: images }.named("vision_model"),
        linear("visual_projection", size, projection, false),
        leave("image_embeds"),
        tokens.named(""),
        linear("text_projection", text_size, projection, false),
        Layer::Similarity { slot: "image_embeds".to_owned() }.named(""),
    ];
    let input = Input::Numbers(Shape::from([channels, image, image]));
    Ok(Model { name: "clip".to_owned(), input, layers, loss: Loss::CrossEntropy })
}

//! Models with an encoder and a decoder.

use super::{
    fields::{Fields, product, wrong},
    parts::{activation, dropout, inline, layer_norm, linear, residual},
};
use crate::{
    error::Error,
    layer::{Attention, AttentionNames, Conv, Function, Layer, Linear, Named, PositionKind, numbered},
    model::{Input, Loss, Model},
    models::T5,
    shape::Shape,
};

pub(super) fn t5(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let projection = fields.text("feed_forward_proj", "relu")?;
    let (is_gated, function) = match projection.strip_prefix("gated-") {
        Some("gelu") => (true, Function::GeluWrittenOut),
        Some(_) => return Err(wrong(format!("`feed_forward_proj` is \"{projection}\", which is not supported"))),
        None => (false, fields.function("feed_forward_proj", "relu")?),
    };
    let blocks = fields.layers("num_layers", 6)?;
    let decoder = match fields.optional("num_decoder_layers")? {
        Some(_) => fields.layers("num_decoder_layers", 6)?,
        None => blocks,
    };
    let sizes = T5 {
        vocabulary: fields.number("vocab_size", 32_128)?,
        size: fields.number("d_model", 512)?,
        blocks: [blocks, decoder],
        heads: fields.divisor("num_heads", 8)?,
        head_size: fields.number("d_kv", 64)?,
        hidden: fields.number("d_ff", 2048)?,
        buckets: fields.number("relative_attention_num_buckets", 32)?,
        dropout: fields.fraction("dropout_rate", 0.1)?,
        function,
        is_gated,
        // transformers ties the weights in any case, and takes this field for another one.
        scales_output: fields.flag("tie_word_embeddings", true)?,
    };
    Ok(sizes.model("t5", [length, length]))
}

/// A block of Whisper.
struct Whisper {
    size: u64,
    hidden: u64,
    heads: u64,
    function: Function,
    dropout: f64,
    activation_dropout: f64,
    attention_dropout: f64,
}

impl Whisper {
    fn attention(&self, reads: Option<&str>, keeps_cache: bool) -> Layer {
        Layer::Attention(Attention {
            size: self.size,
            heads: self.heads,
            no_key_bias: true,
            reads: reads.map(str::to_owned),
            copies_heads: true,
            dropout: self.attention_dropout,
            keeps_cache,
            names: AttentionNames::new(["q_proj", "k_proj", "v_proj", "out_proj"]),
            ..Attention::default()
        })
    }

    fn around(&self, norm: &str, layer: Named) -> Named {
        let mut layers = vec![layer_norm(norm, self.size), layer];
        layers.extend(dropout(self.dropout));
        residual(layers)
    }

    fn block(&self, is_decoder: bool) -> Layer {
        let own = self.attention(None, is_decoder).named("self_attn");
        let mut layers = vec![self.around("self_attn_layer_norm", own)];
        if is_decoder {
            let cross = self.attention(Some("encoder"), true).named("encoder_attn");
            layers.push(self.around("encoder_attn_layer_norm", cross));
        }
        let mut mlp = vec![linear("fc1", self.size, self.hidden, true), activation(self.function)];
        mlp.extend(dropout(self.activation_dropout));
        mlp.push(linear("fc2", self.hidden, self.size, true));
        layers.push(self.around("final_layer_norm", inline(mlp)));
        Layer::Block { layers }
    }
}

pub(super) fn whisper(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let size = fields.number("d_model", 384)?;
    fields.is("scale_embedding", false)?;
    fields.is("encoder_layerdrop", 0.0)?;
    fields.is("decoder_layerdrop", 0.0)?;
    fields.is("tie_word_embeddings", true)?;
    let read = |part: &str| {
        Ok::<_, Error>(Whisper {
            size,
            hidden: fields.number(&format!("{part}_ffn_dim"), 1536)?,
            heads: fields.divisor(&format!("{part}_attention_heads"), 6)?,
            function: fields.function("activation_function", "gelu")?,
            dropout: fields.fraction("dropout", 0.0)?,
            activation_dropout: fields.fraction("activation_dropout", 0.0)?,
            attention_dropout: fields.fraction("attention_dropout", 0.0)?,
        })
    };
    let blocks = |part: &str| {
        let (sizes, count) = (read(part)?, fields.layers(&format!("{part}_layers"), 4)?);
        let blocks = (0..count).map(|_| sizes.block(part == "decoder"));
        Ok::<_, Error>(Layer::Sequential { layers: numbered(blocks) }.named("layers"))
    };
    let conv = |inputs: u64, stride: u64| {
        let (stride, padding) = (vec![stride], vec![1]);
        Layer::Conv(Conv { inputs, outputs: size, kernel: vec![3], stride, padding, ..Conv::default() })
    };
    let (bins, frames) = (fields.number("num_mel_bins", 80)?, fields.number("max_source_positions", 1500)?);
    let probability = fields.fraction("dropout", 0.0)?;
    let mut encoder = vec![
        conv(bins, 1).named("conv1"),
        activation(Function::Gelu),
        conv(size, 2).named("conv2"),
        activation(Function::Gelu),
        Layer::ChannelsToLast.named(""),
        Layer::Positions { rows: frames, size, kind: PositionKind::Fixed }.named("embed_positions"),
    ];
    encoder.extend(dropout(probability));
    encoder.extend([blocks("encoder")?, layer_norm("layer_norm", size)]);
    let vocabulary = fields.number("vocab_size", 51_865)?;
    let rows = fields.number("max_target_positions", 448)?;
    let mut decoder = vec![
        Layer::Embedding { rows: vocabulary, size }.named("embed_tokens"),
        Layer::Positions { rows, size, kind: PositionKind::Trained }.named("embed_positions"),
    ];
    decoder.extend(dropout(probability));
    decoder.extend([blocks("decoder")?, layer_norm("layer_norm", size)]);
    let tied_to = Some("model.decoder.embed_tokens".to_owned());
    let head = Linear { inputs: size, outputs: vocabulary, no_bias: true, tied_to };
    let encoder = vec![Layer::Sequential { layers: encoder }.named("encoder")];
    let decoder = vec![Layer::Sequential { layers: decoder }.named("decoder")];
    let layers = vec![Layer::EncoderDecoder { encoder, decoder }.named("model"), Layer::Linear(head).named("proj_out")];
    let numbers = Shape::from([bins, product(&[2, frames])?]);
    let input = Input::NumbersAndTokens { numbers, target: length };
    Ok(Model { name: "whisper".to_owned(), input, layers, loss: Loss::Token })
}

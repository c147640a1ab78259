//! Models with an encoder and a decoder.

use super::{
    fields::{Fields, product, wrong},
    parts::{activation, dropout, dropped, inline, layer_norm, linear, residual},
};
use crate::{
    error::Error,
    layer::{
        Attention, AttentionNames, Conv, Function, Layer, Linear, Named, PositionKind, RelativeAttention, numbered,
    },
    model::{Input, Loss, Model},
    shape::Shape,
};

/// The sizes of a T5 model.
struct T5 {
    /// The number of tokens.
    vocabulary: u64,
    /// The size of a token.
    size: u64,
    /// The blocks of the encoder, and of the decoder.
    blocks: [usize; 2],
    /// The heads of each attention layer.
    heads: u64,
    /// The size of a head.
    head_size: u64,
    /// The size between the two linear layers of a block.
    hidden: u64,
    /// The rows of the table of position biases.
    buckets: u64,
    /// The dropout of embeddings, blocks and attention.
    dropout: f64,
    /// The activation of the MLP.
    function: Function,
    /// True if the MLP has a gate.
    is_gated: bool,
    /// True if the input of the head, which shares the weight of the embedding, is scaled. T5 1.1 does not scale it.
    scales_output: bool,
}

/// The embedding, whose weight is shared by both stacks and the head.
const TOKENS: &str = "shared";

impl T5 {
    /// Creates the model, with a head for the next token that shares the weight of the embedding.
    fn model(&self, length: u64) -> Model {
        let Self { vocabulary: rows, size, .. } = *self;
        let tied = || Layer::TiedEmbedding { tied_to: TOKENS.to_owned() }.named("embed_tokens");
        let encoder = Layer::Sequential { layers: self.stack(tied(), self.blocks[0], false) }.named("encoder");
        let decoder = Layer::Sequential { layers: self.stack(tied(), self.blocks[1], true) }.named("decoder");
        let tied_to = Some(TOKENS.to_owned());
        let head = Layer::Linear(Linear { inputs: size, outputs: rows, no_bias: true, tied_to }).named("lm_head");
        let scaled = if self.scales_output { vec![Layer::Scale.named(""), head] } else { vec![head] };
        let layers = vec![
            // Both embeddings use this table.
            Layer::Idle { layers: vec![Layer::Embedding { rows, size }.named(TOKENS)] }.named(""),
            Layer::EncoderDecoder { encoder: vec![encoder], decoder: vec![decoder] }.named(""),
            Layer::Sequential { layers: scaled }.named(""),
        ];
        let input = Input::Pair { source: length, target: length };
        Model { name: "t5".to_owned(), input, layers, loss: Loss::Token }
    }

    fn stack(&self, embedding: Named, blocks: usize, is_decoder: bool) -> Vec<Named> {
        let blocks = (0..blocks).map(|number| Layer::Block { layers: self.block(number == 0, is_decoder) });
        vec![
            embedding,
            self.dropout("dropout"),
            Layer::Sequential { layers: numbered(blocks) }.named("block"),
            Layer::RmsNorm { size: self.size }.named("final_layer_norm"),
            self.dropout("final_dropout"),
        ]
    }

    fn block(&self, is_first: bool, is_decoder: bool) -> Vec<Named> {
        let Self { size, heads, head_size, hidden, dropout, .. } = *self;
        let linear = |inputs, outputs| Layer::Linear(Linear { inputs, outputs, no_bias: true, tied_to: None });
        let residual = |layer: Named| {
            let layers = vec![Layer::RmsNorm { size }.named("layer_norm"), layer, self.dropout("dropout")];
            Layer::Residual { layers, shortcut: vec![], in_place: false }
        };
        let attention = RelativeAttention { size, heads, head_size, dropout, ..RelativeAttention::default() };
        let buckets = if is_first { self.buckets } else { 0 };
        let own = RelativeAttention { buckets, is_causal: is_decoder, ..attention.clone() };
        let mut layers = vec![residual(Layer::RelativeAttention(own).named("SelfAttention"))];
        if is_decoder {
            let cross = RelativeAttention { is_cross: true, ..attention };
            layers.push(residual(Layer::RelativeAttention(cross).named("EncDecAttention")));
        }
        let act = Layer::Activation { function: self.function, in_place: false }.named("act");
        let mut inner = if self.is_gated {
            let gate = Layer::Sequential { layers: vec![linear(size, hidden).named("wi_0"), act] }.named("");
            vec![Layer::Product { layers: vec![gate, linear(size, hidden).named("wi_1")] }.named("")]
        } else {
            vec![linear(size, hidden).named("wi"), act]
        };
        inner.extend([
            self.dropout("dropout"),
            // Autocast converts it back to a smaller type.
            Layer::ToF32.named("to"),
            linear(hidden, size).named("wo"),
        ]);
        layers.push(residual(Layer::Sequential { layers: inner }.named("DenseReluDense")));
        vec![Layer::Sequential { layers: numbered(layers) }.named("layer")]
    }

    fn dropout(&self, name: &str) -> Named {
        Layer::Dropout { probability: self.dropout }.named(name)
    }
}

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
        // transformers ties the weights in any case, and uses this field for the scaling.
        scales_output: fields.flag("tie_word_embeddings", true)?,
    };
    Ok(sizes.model(length))
}

/// The sizes of a block of Whisper.
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
        residual(dropped(vec![layer_norm(norm, self.size), layer], self.dropout))
    }

    fn block(&self, is_decoder: bool) -> Layer {
        let own = self.attention(None, is_decoder).named("self_attn");
        let mut layers = vec![self.around("self_attn_layer_norm", own)];
        if is_decoder {
            let cross = self.attention(Some("encoder"), true).named("encoder_attn");
            layers.push(self.around("encoder_attn_layer_norm", cross));
        }
        let mlp = vec![linear("fc1", self.size, self.hidden, true), activation(self.function)];
        let mut mlp = dropped(mlp, self.activation_dropout);
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

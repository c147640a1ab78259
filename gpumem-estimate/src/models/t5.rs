//! T5.

use crate::{
    layer::{Function, Layer, Linear, Named, RelativeAttention, numbered},
    model::{Input, Loss, Model},
};

/// The sizes of a T5.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct T5 {
    /// How many tokens there are.
    pub vocabulary: u64,
    /// The size of a token.
    pub size: u64,
    /// The blocks of the encoder, and of the decoder.
    pub blocks: [usize; 2],
    /// The heads of each attention layer.
    pub heads: u64,
    /// The size of a head.
    pub head_size: u64,
    /// The size between the two linear layers of a block.
    pub hidden: u64,
    /// The rows of the table of position biases.
    pub buckets: u64,
    /// The dropout of embeddings, blocks and attention.
    pub dropout: f64,
    /// What the MLP passes through.
    pub function: Function,
    /// The MLP has a gate.
    pub is_gated: bool,
    /// The input of the head, which has the weight of the embedding, is scaled. Not so in T5 1.1.
    pub scales_output: bool,
}

const TOKENS: &str = "shared";

impl T5 {
    /// The model, with a head for the next token that shares the weight of the embedding. Source and target sequences have these
    /// lengths.
    pub fn model(&self, name: &str, [source, target]: [u64; 2]) -> Model {
        let Self { vocabulary: rows, size, .. } = *self;
        let tied = || Layer::TiedEmbedding { tied_to: TOKENS.to_owned() }.named("embed_tokens");
        let encoder = Layer::Sequential { layers: self.stack(tied(), self.blocks[0], false) }.named("encoder");
        let decoder = Layer::Sequential { layers: self.stack(tied(), self.blocks[1], true) }.named("decoder");
        let tied_to = Some(TOKENS.to_owned());
        let head = Layer::Linear(Linear { inputs: size, outputs: rows, no_bias: true, tied_to }).named("lm_head");
        let scaled = if self.scales_output { vec![Layer::Scale.named(""), head] } else { vec![head] };
        let layers = vec![
            // Both embeddings use it.
            Layer::Idle { layers: vec![Layer::Embedding { rows, size }.named(TOKENS)] }.named(""),
            Layer::EncoderDecoder { encoder: vec![encoder], decoder: vec![decoder] }.named(""),
            Layer::Sequential { layers: scaled }.named(""),
        ];
        Model { name: name.to_owned(), input: Input::Pair { source, target }, layers, loss: Loss::Token }
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
            // Autocast makes a smaller type of it again.
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

/// T5 small with source and target sequences of these lengths.
pub fn t5_small(lengths: [u64; 2]) -> Model {
    let sizes = T5 {
        vocabulary: 32_128,
        size: 512,
        blocks: [6, 6],
        heads: 8,
        head_size: 64,
        hidden: 2048,
        buckets: 32,
        dropout: 0.1,
        function: Function::Relu,
        is_gated: false,
        scales_output: true,
    };
    sizes.model("t5-small", lengths)
}

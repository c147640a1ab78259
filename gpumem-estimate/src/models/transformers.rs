//! Models of transformers.

use crate::{
    layer::{Attention, Embeddings, Function, Layer, Linear, Named, numbered},
    model::{Input, Loss, Model},
    shape::Shape,
};

/// The sizes of a transformer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transformer {
    /// How many tokens there are.
    pub vocabulary: u64,
    /// The size of a token.
    pub size: u64,
    /// How many blocks it has.
    pub blocks: usize,
    /// The heads of the queries.
    pub heads: u64,
    /// The heads of keys and values.
    pub key_value_heads: u64,
    /// The size between the two linear layers of a block.
    pub hidden: u64,
    /// How many positions have an embedding; 0 if positions rotate the queries and keys.
    pub positions: u64,
    /// The dropout after embeddings and in each block, of GPT-2 and BERT.
    pub dropout: f64,
}

fn activation(function: Function) -> Layer {
    Layer::Activation { function, in_place: false }
}

/// The path of the embedding of tokens.
const TOKENS: &str = "embeddings.tokens";

impl Transformer {
    fn embeddings(&self, segments: u64) -> Layer {
        let Self { vocabulary: tokens, size, positions, .. } = *self;
        Layer::Embeddings(Embeddings { size, tokens, positions, segments, names: vec![] })
    }

    /// GPT-2 with a head for the next token.
    pub fn gpt2(&self, name: &str, length: u64) -> Model {
        let Self { size, heads, hidden, .. } = *self;
        let dropout = || Layer::Dropout { probability: self.dropout };
        let block = || {
            let attention = Attention { size, heads, is_joined: true, keeps_cache: true, ..Attention::default() };
            let attention = vec![
                Layer::LayerNorm { size }.named("ln_1"),
                Layer::Attention(attention).named("attn"),
                dropout().named("resid_dropout"),
            ];
            let inner = vec![
                Layer::linear(size, hidden).named("c_fc"),
                activation(Function::GeluWrittenOut).named("act"),
                Layer::linear(hidden, size).named("c_proj"),
                dropout().named("dropout"),
            ];
            let mlp =
                vec![Layer::LayerNorm { size }.named("ln_2"), Layer::Sequential { layers: inner }.named("layers")];
            let residual = |layers| Layer::Residual { layers, shortcut: vec![], in_place: false };
            Layer::Block { layers: vec![residual(attention).named("attention"), residual(mlp).named("mlp")] }
        };
        let tied_to = Some(TOKENS.to_owned());
        let head = Linear { inputs: size, outputs: self.vocabulary, no_bias: true, tied_to };
        let layers = vec![
            self.embeddings(0).named("embeddings"),
            dropout().named("drop"),
            Layer::Sequential { layers: numbered((0..self.blocks).map(|_| block())) }.named("h"),
            Layer::LayerNorm { size }.named("ln_f"),
            Layer::Linear(head).named("lm_head"),
        ];
        Model { name: name.to_owned(), input: Input::Tokens(length), layers, loss: Loss::NextToken }
    }

    /// Llama with a head for the next token, which may share the weight of the embedding.
    pub fn llama(&self, name: &str, length: u64, is_tied: bool) -> Model {
        let Self { size, heads, key_value_heads, hidden, .. } = *self;
        let block = || {
            let attention = Attention {
                size,
                heads,
                key_value_heads,
                no_bias: true,
                rotates: true,
                keeps_cache: true,
                ..Attention::default()
            };
            let attention =
                vec![Layer::RmsNorm { size }.named("input_layernorm"), Layer::Attention(attention).named("self_attn")];
            let mlp = vec![
                Layer::RmsNorm { size }.named("post_attention_layernorm"),
                Layer::GatedMlp { size, hidden, function: Function::Silu, is_joined: false, has_bias: false }
                    .named("mlp"),
            ];
            let residual = |layers| Layer::Residual { layers, shortcut: vec![], in_place: false };
            Layer::Block { layers: vec![residual(attention).named("attention"), residual(mlp).named("mlp")] }
        };
        let tied_to = is_tied.then(|| TOKENS.to_owned());
        let head = Linear { inputs: size, outputs: self.vocabulary, no_bias: true, tied_to };
        let layers = vec![
            self.embeddings(0).named("embeddings"),
            Layer::Sequential { layers: numbered((0..self.blocks).map(|_| block())) }.named("layers"),
            Layer::RmsNorm { size }.named("norm"),
            Layer::Linear(head).named("lm_head"),
        ];
        Model { name: name.to_owned(), input: Input::Tokens(length), layers, loss: Loss::NextToken }
    }

    /// BERT with a head for masked tokens.
    pub fn bert(&self, name: &str, length: u64) -> Model {
        let Self { size, heads, hidden, .. } = *self;
        let dropout = || Layer::Dropout { probability: self.dropout };
        let block = || {
            let attention = Layer::Attention(Attention { size, heads, ..Attention::default() });
            let attention = vec![attention.named("self"), dropout().named("dropout")];
            let intermediate =
                vec![Layer::linear(size, hidden).named("dense"), activation(Function::Gelu).named("act")];
            let output = vec![Layer::linear(hidden, size).named("dense"), dropout().named("dropout")];
            let mlp = vec![
                Layer::Sequential { layers: intermediate }.named("intermediate"),
                Layer::Sequential { layers: output }.named("output"),
            ];
            let residual = |layers| Layer::Residual { layers, shortcut: vec![], in_place: false };
            let layers = vec![
                residual(attention).named("attention"),
                Layer::LayerNorm { size }.named("attention_norm"),
                residual(mlp).named("mlp"),
                Layer::LayerNorm { size }.named("norm"),
            ];
            Layer::Block { layers }
        };
        // The output of the last block lives until the head is done. The head has the weight of the embedding and a bias of its own.
        let decoder =
            Linear { inputs: size, outputs: self.vocabulary, no_bias: false, tied_to: Some(TOKENS.to_owned()) };
        let transform = vec![
            Layer::linear(size, size).named("dense"),
            activation(Function::Gelu).named("act"),
            Layer::LayerNorm { size }.named("norm"),
        ];
        let head =
            vec![Layer::Sequential { layers: transform }.named("transform"), Layer::Linear(decoder).named("decoder")];
        let layers = vec![
            self.embeddings(2).named("embeddings"),
            Layer::LayerNorm { size }.named("norm"),
            dropout().named("dropout"),
            Layer::Sequential { layers: numbered((0..self.blocks).map(|_| block())) }.named("layer"),
            Layer::Sequential { layers: head }.named("predictions"),
        ];
        Model { name: name.to_owned(), input: Input::Tokens(length), layers, loss: Loss::Token }
    }

    /// A vision transformer for images of 224 × 224, with square patches of this size and 1000 classes.
    pub fn vit(&self, name: &str, patch: u64) -> Model {
        let Self { size, heads, hidden, .. } = *self;
        let block = || {
            let attention = vec![
                Layer::LayerNorm { size }.named("layernorm_before"),
                Layer::Attention(Attention { size, heads, ..Attention::default() }).named("attention"),
            ];
            let inner = vec![
                Layer::linear(size, hidden).named("fc1"),
                activation(Function::Gelu).named("act"),
                Layer::linear(hidden, size).named("fc2"),
            ];
            let mlp = vec![
                Layer::LayerNorm { size }.named("layernorm_after"),
                Layer::Sequential { layers: inner }.named("layers"),
            ];
            let residual = |layers: Vec<Named>| Layer::Residual { layers, shortcut: vec![], in_place: false };
            Layer::Block { layers: vec![residual(attention).named("attention"), residual(mlp).named("mlp")] }
        };
        let layers = vec![
            Layer::PatchEmbedding { channels: 3, image: 224, patch, size }.named("embeddings"),
            Layer::Sequential { layers: numbered((0..self.blocks).map(|_| block())) }.named("layer"),
            Layer::LayerNorm { size }.named("layernorm"),
            Layer::FirstToken.named("first"),
            Layer::linear(size, 1000).named("classifier"),
        ];
        let input = Input::Numbers(Shape::from([3, 224, 224]));
        Model { name: name.to_owned(), input, layers, loss: Loss::CrossEntropy }
    }
}

/// The sizes of a GPT-2.
pub const fn gpt2_sizes(size: u64, blocks: usize, heads: u64) -> Transformer {
    let (vocabulary, positions, hidden) = (50_257, 1024, 4 * size);
    Transformer { vocabulary, size, blocks, heads, key_value_heads: heads, hidden, positions, dropout: 0.1 }
}

/// The sizes of a BERT.
pub const fn bert_sizes(size: u64, blocks: usize, heads: u64) -> Transformer {
    let (vocabulary, positions, hidden) = (30_522, 512, 4 * size);
    Transformer { vocabulary, size, blocks, heads, key_value_heads: heads, hidden, positions, dropout: 0.1 }
}

/// The sizes of a vision transformer.
pub const fn vit_sizes(size: u64, blocks: usize, heads: u64) -> Transformer {
    let (vocabulary, positions, hidden) = (0, 0, 4 * size);
    Transformer { vocabulary, size, blocks, heads, key_value_heads: heads, hidden, positions, dropout: 0.1 }
}

/// GPT-2 small with sequences of this length.
pub fn gpt2(length: u64) -> Model {
    gpt2_sizes(768, 12, 12).gpt2("gpt2", length)
}

/// GPT-2 medium with sequences of this length.
pub fn gpt2_medium(length: u64) -> Model {
    gpt2_sizes(1024, 24, 16).gpt2("gpt2-medium", length)
}

/// A Llama with 1.24 B parameters (the sizes of Llama 3.2 1B), with sequences of this length.
pub fn llama_1b(length: u64) -> Model {
    let sizes = Transformer {
        vocabulary: 128_256,
        size: 2048,
        blocks: 16,
        heads: 32,
        key_value_heads: 8,
        hidden: 8192,
        positions: 0,
        dropout: 0.0,
    };
    sizes.llama("llama-1b", length, true)
}

/// BERT base with sequences of this length.
pub fn bert_base(length: u64) -> Model {
    bert_sizes(768, 12, 12).bert("bert-base", length)
}

/// ViT-B/16.
pub fn vit_b_16() -> Model {
    vit_sizes(768, 12, 12).vit("vit-b", 16)
}

//! Layers as data, which can be built in Rust or read from JSON.

mod attention;
mod build;
mod encoder_decoder;
mod experts;
mod forward;

use serde::{Deserialize, Serialize};

pub use self::{
    attention::{Attention, AttentionNames, HeadNorm},
    experts::{Experts, RunExperts},
};
pub(crate) use self::{
    build::build,
    forward::{Built, run_all, run_model},
};
use crate::{Conv, Window};

/// A layer with its name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Named {
    /// The name inside the enclosing layer, such as `0` or `conv1`. A layer without a name belongs to the enclosing
    /// layer. Names may contain dots.
    pub name: String,
    /// The layer.
    #[serde(flatten)]
    pub layer: Layer,
}

/// A layer of a model. The description of each layer explains its fields.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are described with their layer")]
pub enum Layer {
    /// Layers that run one after the other.
    Sequential { layers: Vec<Named> },
    /// Layers that run one after the other, as a block that checkpointing may recompute.
    Block { layers: Vec<Named> },
    /// The sum of the outputs of all layers for the same input, such as attention and MLP in parallel.
    Branches { layers: Vec<Named> },
    /// The product of the outputs of all layers for the same input.
    Product { layers: Vec<Named> },
    /// Layers that have parameters but do not run, such as the image part if there are no images.
    Idle { layers: Vec<Named> },
    /// The sum of the layers' output and the input, or the output of `shortcut`: layers that the input passes through before it is
    /// added. With `in_place`, the sum overwrites the output of the layers.
    Residual {
        layers: Vec<Named>,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        shortcut: Vec<Named>,
        #[serde(default)]
        in_place: bool,
    },
    /// Layers that read the input (`encoder`), and layers that read the target tokens of the model and the output of the first ones
    /// (`decoder`).
    EncoderDecoder { encoder: Vec<Named>, decoder: Vec<Named> },
    /// A convolution.
    Conv(Conv),
    /// A matrix product with a weight.
    Linear(Linear),
    /// Selects rows of a table. The table has `rows` rows, and each row has `size` elements.
    Embedding { rows: u64, size: u64 },
    /// An embedding that uses the table of an earlier layer, which has the path `tied_to`.
    TiedEmbedding { tied_to: String },
    /// The sum of the rows of tables for tokens, positions and segments.
    Embeddings(Embeddings),
    /// A convolution that cuts an image into patches, a class token, and positions. The image has `channels` channels. `image` is the
    /// height and width of the image, `patch` those of a patch, and `size` is the size of a token. With `as_clip`, the convolution has no
    /// bias, and the positions are rows of a table.
    PatchEmbedding {
        channels: u64,
        image: u64,
        patch: u64,
        size: u64,
        #[serde(default)]
        as_clip: bool,
    },
    /// The first token of each sequence.
    FirstToken,
    /// Batch norm over `channels` channels.
    BatchNorm { channels: u64 },
    /// Layer norm over the last dimension, which has this `size`.
    LayerNorm { size: u64 },
    /// RMS norm over the last dimension, which has this `size`, as transformers writes it out.
    RmsNorm { size: u64 },
    /// RMS norm over the last dimension, which has this `size`, as in Gemma: in `f32`, with `1 + weight`.
    GemmaNorm { size: u64 },
    /// An operation on each element. With `in_place`, it overwrites its input; only `relu` and `relu6` can.
    Activation {
        function: Function,
        #[serde(default)]
        in_place: bool,
    },
    /// Multiplies each channel of an image by a weight, as in `ConvNeXt`: a parameter of shape (size, 1, 1).
    ChannelScale { size: u64 },
    /// Dropout with this `probability`.
    Dropout { probability: f64 },
    /// The largest element of each window.
    MaxPool(Window),
    /// The means of windows that are chosen to give a result of this `size`.
    AdaptiveAveragePool { size: Vec<u64> },
    /// Joins all dimensions after the first.
    Flatten,
    /// Reorders the dimensions: from (n, c, h, w) to (n, h, w, c).
    ChannelsToLast,
    /// Reorders the dimensions: from (n, h, w, c) to (n, c, h, w).
    ChannelsToFirst,
    /// Multiplies all elements with a number.
    Scale,
    /// A copy in `f32` if the input has a smaller type.
    ToF32,
    /// Self-attention.
    Attention(Attention),
    /// Splits the last dimension in halves, and multiplies the activation (`function`) of the first with the second.
    Gate { function: Function },
    /// A mixture of experts.
    Experts(Experts),
    /// Adds a row of a table to each token, by its position. The table has `rows` rows of `size` elements. With `is_fixed`, it has no
    /// gradient.
    Positions {
        rows: u64,
        size: u64,
        #[serde(default)]
        is_fixed: bool,
    },
    /// Keeps the input under the name `slot` for a later layer, and passes it on.
    Leave { slot: String },
    /// A second input of the model. Passes the layer's own input on, runs layers on the new tensor, and leaves their output with the
    /// name `slot`. The new tensor has these `sizes` without the batch, and numbers or `integers`. If `is_next`, the next layer reads the
    /// output of these layers instead.
    Provide {
        slot: String,
        sizes: Vec<u64>,
        #[serde(default)]
        integers: bool,
        #[serde(default)]
        is_next: bool,
        #[serde(default)]
        layers: Vec<Named>,
    },
    /// Drops all tensors that were left with the name `slot`.
    Release { slot: String },
    /// Multiplies normalized vectors with those that were left with the name `slot`, and with a parameter.
    Similarity { slot: String },
}

/// An operation on each element. Aliases are names in `ACT2FN` of transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names are those of the functions")]
pub enum Function {
    Relu,
    Relu6,
    /// GELU in a single kernel, with `tanh` or without.
    #[serde(alias = "gelu_pytorch_tanh")]
    Gelu,
    /// GELU with `tanh`, written out in Python with a separate operation for each step.
    #[serde(alias = "gelu_new")]
    GeluWrittenOut,
    /// `x * sigmoid(1.702 * x)`, with a separate operation for each step.
    QuickGelu,
    #[serde(alias = "swish")]
    Silu,
    Tanh,
}

/// The sizes of a linear layer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Linear {
    /// The size of the last dimension of the input.
    pub inputs: u64,
    /// The size of the last dimension of the output.
    pub outputs: u64,
    /// True if there is no bias.
    #[serde(default)]
    pub no_bias: bool,
    /// The path of the layer whose weight is shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tied_to: Option<String>,
}

/// Tables for tokens, positions and segments.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Embeddings {
    /// The size of a row.
    pub size: u64,
    /// The number of tokens.
    pub tokens: u64,
    /// The number of positions; 0 if there is no table.
    #[serde(default)]
    pub positions: u64,
    /// The number of kinds of segments; 0 if there is no table.
    #[serde(default)]
    pub segments: u64,
    /// The names of the tables for tokens, positions and segments; `tokens`, `positions` and `segments` if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
}

impl Embeddings {
    /// Returns the names of the tables for tokens, positions and segments.
    pub(crate) fn table_names(&self) -> [&str; 3] {
        let name = |at: usize, default| self.names.get(at).map_or(default, String::as_str);
        [name(0, "tokens"), name(1, "positions"), name(2, "segments")]
    }
}

impl Layer {
    /// Returns this layer with a name.
    pub fn named(self, name: impl Into<String>) -> Named {
        Named { name: name.into(), layer: self }
    }

    /// Creates layers that run one after the other, with the names `0`, `1`, and so on.
    pub fn sequence(layers: impl IntoIterator<Item = Self>) -> Self {
        Self::Sequential { layers: numbered(layers) }
    }

    /// Creates a convolution over a two-dimensional image, with a square window.
    pub fn conv2d(inputs: u64, outputs: u64, kernel: u64, stride: u64, padding: u64) -> Self {
        let window = Window::square(kernel, stride, padding);
        Self::Conv(Conv { inputs, outputs, window, ..Conv::default() })
    }

    /// Creates a linear layer with a bias.
    pub fn linear(inputs: u64, outputs: u64) -> Self {
        Self::Linear(Linear { inputs, outputs, ..Linear::default() })
    }

    /// Creates a gated MLP without biases: `down(function(gate(x)) * up(x))`.
    pub(crate) fn gated_mlp(size: u64, hidden: u64, function: Function) -> Self {
        let activation = Self::Activation { function, in_place: false }.named("");
        let gate = Self::Sequential { layers: vec![linear("gate_proj", size, hidden, true), activation] }.named("");
        let product = Self::Product { layers: vec![gate, linear("up_proj", size, hidden, true)] }.named("");
        Self::Sequential { layers: vec![product, linear("down_proj", hidden, size, true)] }
    }

    /// Creates the activation `max(x, 0)`.
    pub fn relu(in_place: bool) -> Self {
        Self::Activation { function: Function::Relu, in_place }
    }
}

/// Names layers `0`, `1`, and so on.
pub fn numbered(layers: impl IntoIterator<Item = Layer>) -> Vec<Named> {
    layers.into_iter().enumerate().map(|(number, layer)| layer.named(number.to_string())).collect()
}

/// Returns a linear layer with a name.
pub(crate) fn linear(name: &str, inputs: u64, outputs: u64, no_bias: bool) -> Named {
    Layer::Linear(Linear { inputs, outputs, no_bias, tied_to: None }).named(name)
}

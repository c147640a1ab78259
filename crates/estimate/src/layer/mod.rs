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
use crate::eager::{Conv, Pool};

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

/// A layer of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Layer {
    /// Layers that run one after the other.
    Sequential {
        /// The layers.
        layers: Vec<Named>,
    },
    /// Layers that run one after the other, as a block that checkpointing may recompute.
    Block {
        /// The layers.
        layers: Vec<Named>,
    },
    /// The sum of the outputs of all layers for the same input, such as attention and MLP in parallel.
    Branches {
        /// The layers.
        layers: Vec<Named>,
    },
    /// The product of the outputs of all layers for the same input.
    Product {
        /// The layers.
        layers: Vec<Named>,
    },
    /// Layers that have parameters but do not run, such as the image part if there are no images.
    Idle {
        /// The layers.
        layers: Vec<Named>,
    },
    /// The sum of the layers' output and the input, or the output of `shortcut`.
    Residual {
        /// The layers.
        layers: Vec<Named>,
        /// The layers that the input passes through before it is added.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        shortcut: Vec<Named>,
        /// True if the sum overwrites the output of the layers.
        #[serde(default)]
        in_place: bool,
    },
    /// Layers that read the input, and layers that read the target tokens of the model and the output of the first
    /// ones.
    EncoderDecoder {
        /// The layers that read the input.
        encoder: Vec<Named>,
        /// The layers that read the target tokens.
        decoder: Vec<Named>,
    },
    /// A convolution.
    Conv(Conv),
    /// A matrix product with a weight.
    Linear(Linear),
    /// Rows of a table.
    Embedding {
        /// The number of rows of the table.
        rows: u64,
        /// The size of a row.
        size: u64,
    },
    /// An embedding that uses the table of an earlier layer.
    TiedEmbedding {
        /// The path of that layer.
        tied_to: String,
    },
    /// The sum of the rows of tables for tokens, positions and segments.
    Embeddings(Embeddings),
    /// A convolution that cuts an image into patches, a class token, and positions.
    PatchEmbedding {
        /// The channels of the image.
        channels: u64,
        /// The height and width of the image.
        image: u64,
        /// The height and width of a patch.
        patch: u64,
        /// The size of a token.
        size: u64,
        /// True for CLIP: the convolution has no bias, and the positions are rows of a table.
        #[serde(default)]
        as_clip: bool,
    },
    /// The first token of each sequence.
    FirstToken,
    /// Batch norm.
    BatchNorm {
        /// The channels.
        channels: u64,
    },
    /// Layer norm over the last dimension.
    LayerNorm {
        /// The size of that dimension.
        size: u64,
    },
    /// RMS norm over the last dimension, as transformers writes it out.
    RmsNorm {
        /// The size of that dimension.
        size: u64,
    },
    /// RMS norm as in Gemma: in `f32`, with `1 + weight`.
    GemmaNorm {
        /// The size of the last dimension.
        size: u64,
    },
    /// An operation on each element.
    Activation {
        /// The operation.
        function: Function,
        /// True if the operation overwrites its input. Only `relu` and `relu6` can.
        #[serde(default)]
        in_place: bool,
    },
    /// Multiplies each channel of an image by a weight, as in `ConvNeXt`: a parameter of shape (size, 1, 1).
    ChannelScale {
        /// The channels.
        size: u64,
    },
    /// Dropout.
    Dropout {
        /// The probability.
        probability: f64,
    },
    /// The largest element of each window.
    MaxPool(Pool),
    /// The means of windows that are chosen to give a result of this size.
    AdaptiveAveragePool {
        /// The sizes of the result.
        size: Vec<u64>,
    },
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
    /// Splits the last dimension in halves, and multiplies the activation of the first with the second.
    Gate {
        /// The activation.
        function: Function,
    },
    /// A mixture of experts.
    Experts(Experts),
    /// Adds a row of a table to each token, by its position.
    Positions {
        /// The rows of the table.
        rows: u64,
        /// The size of a row.
        size: u64,
        /// True if the table has no gradient.
        #[serde(default)]
        is_fixed: bool,
    },
    /// Leaves the input for a later layer, and passes it on.
    Leave {
        /// The name with which it is left.
        slot: String,
    },
    /// A second input of the model. Passes the layer's own input on, runs layers on the new tensor, and leaves their
    /// output.
    Provide {
        /// The name with which the output is left.
        slot: String,
        /// The sizes of the new tensor, without the batch.
        sizes: Vec<u64>,
        /// True if the tensor contains integers.
        #[serde(default)]
        integers: bool,
        /// True if the next layer reads the output of these layers.
        #[serde(default)]
        is_next: bool,
        /// The layers.
        #[serde(default)]
        layers: Vec<Named>,
    },
    /// Drops all tensors that were left with a name.
    Release {
        /// The name.
        slot: String,
    },
    /// Multiplies normalized vectors with those that were left, and with a parameter.
    Similarity {
        /// Their name.
        slot: String,
    },
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
        let (stride, padding) = (vec![stride], vec![padding]);
        Self::Conv(Conv { inputs, outputs, kernel: vec![kernel; 2], stride, padding, ..Conv::default() })
    }

    /// Creates a linear layer with a bias.
    pub fn linear(inputs: u64, outputs: u64) -> Self {
        Self::Linear(Linear { inputs, outputs, ..Linear::default() })
    }

    /// Creates a gated MLP: `down(function(gate(x)) * up(x))`.
    pub(crate) fn gated_mlp(size: u64, hidden: u64, function: Function, no_bias: bool) -> Self {
        let linear =
            |name, inputs, outputs| Self::Linear(Linear { inputs, outputs, no_bias, tied_to: None }).named(name);
        let activation = Self::Activation { function, in_place: false }.named("");
        let gate = Self::Sequential { layers: vec![linear("gate_proj", size, hidden), activation] }.named("");
        let product = Self::Product { layers: vec![gate, linear("up_proj", size, hidden)] }.named("");
        Self::Sequential { layers: vec![product, linear("down_proj", hidden, size)] }
    }

    /// Creates max pooling with a square window.
    pub fn max_pool2d(kernel: u64, stride: u64, padding: u64) -> Self {
        Self::MaxPool(Pool { kernel: vec![kernel; 2], stride: vec![stride], padding: vec![padding] })
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

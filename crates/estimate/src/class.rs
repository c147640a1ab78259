//! The uses of memory, such as weights and activations.

use std::fmt;

use serde::Serialize;

/// A use of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Class {
    /// Parameters and buffers of the model.
    Weights,
    /// Gradients of parameters.
    Gradients,
    /// The state of the optimizer.
    Optimizer,
    /// The inputs of the model and its labels.
    Inputs,
    /// Outputs of layers, tensors that are kept for the backward pass, and temporary tensors.
    Activations,
    /// Keys and values of attention, and the copies of weights that autocast keeps.
    Cache,
    /// Memory that the libraries for matrix products and convolutions work in.
    Workspace,
    /// Tensors that ranks exchange: gathered shards, gradients that are being added up, and buckets.
    Communication,
    /// The CUDA context, kernels and modules.
    Context,
    /// The bytes that the allocator adds to requests.
    Rounding,
}

impl Class {
    /// All classes, in the order of reports.
    pub const ALL: [Self; 10] = [
        Self::Weights,
        Self::Gradients,
        Self::Optimizer,
        Self::Inputs,
        Self::Activations,
        Self::Cache,
        Self::Workspace,
        Self::Communication,
        Self::Context,
        Self::Rounding,
    ];

    /// Returns the name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Inputs => "inputs",
            Self::Activations => "activations",
            Self::Cache => "cache",
            Self::Workspace => "workspace",
            Self::Communication => "communication",
            Self::Context => "context",
            Self::Rounding => "rounding",
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

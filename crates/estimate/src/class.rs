//! The uses of memory, such as weights and activations.

use std::fmt;

use serde::Serialize;

/// Defines the classes with their names, in the order of reports.
macro_rules! classes {
    ($($(#[$doc:meta])* $class:ident $name:literal)*) => {
        /// A use of memory.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        #[serde(rename_all = "snake_case")]
        #[non_exhaustive]
        pub enum Class {
            $($(#[$doc])* $class,)*
        }

        impl Class {
            /// All classes, in the order of reports.
            pub const ALL: &[Self] = &[$(Self::$class,)*];

            /// Returns the name in reports.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$class => $name,)*
                }
            }
        }
    };
}

classes! {
    /// Parameters and buffers of the model.
    Weights "weights"
    /// Gradients of parameters.
    Gradients "gradients"
    /// The state of the optimizer.
    Optimizer "optimizer"
    /// The inputs of the model and its labels.
    Inputs "inputs"
    /// Outputs of layers, tensors that are kept for the backward pass, and temporary tensors.
    Activations "activations"
    /// Keys and values of attention, and the copies of weights that autocast keeps.
    Cache "cache"
    /// Memory that the libraries for matrix products and convolutions work in.
    Workspace "workspace"
    /// Tensors that ranks exchange: gathered shards, gradients that are being added up, and buckets.
    Communication "communication"
    /// The bytes that the allocator adds to requests.
    Rounding "rounding"
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

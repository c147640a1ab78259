//! The error of an estimate, which names the layer.

use std::fmt;

use crate::Bytes;
use gpumem_core::report::counted;

/// The reason why there is no estimate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    layer: String,
    /// The reason, in a box so that results of functions stay small.
    kind: Box<Kind>,
}

/// A result that has this error, unless another one is given.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns an error unless a condition holds.
pub(crate) fn ensure<E>(holds: bool, error: impl FnOnce() -> E) -> Result<(), E> {
    if holds { Ok(()) } else { Err(error()) }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A layer, a setting or a file is not valid, or tensors do not fit together.
    Invalid(String),
    /// A sequence is longer than the table of positions.
    TooLong { positions: u64, length: u64 },
    /// The allocator has run out of memory.
    OutOfMemory { requested: u64, in_use: u64 },
    /// A size does not fit into 64 bits, or the sum of all blocks does not fit into 62 bits.
    TooLarge,
    /// A checkpointed block has recomputed everything that it saved. This ends the second run of the block. The user
    /// never sees it.
    RecomputedAll,
}

impl Error {
    /// Creates an error outside of all layers.
    pub(crate) fn invalid(what: impl Into<String>) -> Self {
        Kind::Invalid(what.into()).into()
    }

    /// Creates an error in a layer. The path is empty for errors outside all layers.
    pub(crate) fn in_layer(layer: String, kind: Kind) -> Self {
        Self { layer, kind: Box::new(kind) }
    }

    /// Returns the path of the layer, such as `features.3`; empty if the error belongs to no layer.
    pub fn layer(&self) -> &str {
        &self.layer
    }

    /// Returns whether the step needs more memory than its limit, or than can be counted.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(*self.kind, Kind::OutOfMemory { .. } | Kind::TooLarge)
    }

    pub(crate) fn kind(&self) -> &Kind {
        &self.kind
    }
}

impl From<Kind> for Error {
    fn from(kind: Kind) -> Self {
        Self::in_layer(String::new(), kind)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.layer.is_empty() {
            write!(f, "layer `{}`: ", self.layer)?;
        }
        match &*self.kind {
            Kind::Invalid(what) => f.write_str(what),
            Kind::OutOfMemory { requested, in_use } => {
                let (requested, in_use) = (Bytes::new(*requested), Bytes::new(*in_use));
                write!(f, "out of memory: {requested} are requested and {in_use} in use")
            }
            Kind::TooLong { positions, length } => {
                let positions = counted(*positions, "position", "positions");
                write!(f, "the table has {positions}, and the sequences have {}", counted(*length, "token", "tokens"))
            }
            Kind::TooLarge => f.write_str("the sizes are too large: the sum does not fit into 62 bits"),
            Kind::RecomputedAll => f.write_str("a checkpointed block has recomputed all that it saved"),
        }
    }
}

impl std::error::Error for Error {}

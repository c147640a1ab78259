//! The layers that the backward pass runs again.

use serde::{Deserialize, Serialize};

/// The layers that the backward pass runs again, so that their tensors need not stay in memory.
///
/// This is `torch.utils.checkpoint` with `use_reentrant=False`: the input of the layers that run again stays in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Checkpointing {
    /// No layer runs again.
    #[default]
    Off,
    /// Each block by itself, as `gradient_checkpointing_enable` of transformers does.
    Blocks,
}

/// `true` means each block.
impl From<bool> for Checkpointing {
    fn from(is_on: bool) -> Self {
        if is_on { Self::Blocks } else { Self::Off }
    }
}

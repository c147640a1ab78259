//! The modes of dry runs and limits.

use std::fmt;

use once_cell::sync::OnceCell;

use crate::model::Bytes;

/// How the process's cards differ from the real ones. Each card has `card` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A card of any size, on which only work on small blocks is executed.
    Dry {
        /// The total memory of each card, as `cuMemGetInfo` returns it. `None` for the first real card's.
        card: Option<Bytes>,
        /// The number of such cards that the program sees. 0 for the number of the machine's cards.
        cards: u32,
        /// The byte that is copied to the host from memory that does not exist.
        fill: u8,
    },
    /// A smaller card.
    Limit {
        /// The total memory of each card.
        card: Bytes,
    },
}

impl Mode {
    /// Returns the total memory of each card; `None` if it is the real card's.
    pub fn card(self) -> Option<Bytes> {
        match self {
            Self::Dry { card, .. } => card,
            Self::Limit { card } => Some(card),
        }
    }
}

impl fmt::Display for Mode {
    /// Writes a text such as `dry run, GPU of 24 GiB` or `dry run, 8 GPUs of 24 GiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dry { card: None, cards: 0 | 1, .. } => f.write_str("dry run"),
            Self::Dry { card: None, cards, .. } => write!(f, "dry run, {cards} GPUs"),
            Self::Dry { card: Some(card), cards: 0 | 1, .. } => write!(f, "dry run, GPU of {card}"),
            Self::Dry { card: Some(card), cards, .. } => write!(f, "dry run, {cards} GPUs of {card}"),
            Self::Limit { card } => write!(f, "GPU limited to {card}"),
        }
    }
}

/// Blocks of up to this size are real in a dry run. PyTorch's segments for small tensors have this size.
pub(super) const LARGEST_REAL: u64 = 2 << 20;

pub(super) static MODE: OnceCell<Mode> = OnceCell::new();

//! The modes of dry runs and limits.

use std::fmt;

use once_cell::sync::OnceCell;

use crate::model::Bytes;

/// The difference between the memory of the process and that of the real cards. Each card has `card` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A card of another size, on which nothing is executed that needs more than small blocks.
    Dry {
        /// All bytes of each card, as `cuMemGetInfo` returns them. `None` for those of the first real card.
        card: Option<Bytes>,
        /// The number of such cards that the program sees. 0 for as many as the machine has.
        cards: u32,
        /// The byte that is copied to the host from memory that does not exist.
        fill: u8,
    },
    /// A smaller card.
    Limit {
        /// All bytes of each card.
        card: Bytes,
    },
}

impl Mode {
    /// Returns all bytes of each card; `None` if they are those of the real one.
    pub fn card(self) -> Option<Bytes> {
        match self {
            Self::Dry { card, .. } => card,
            Self::Limit { card } => Some(card),
        }
    }
}

impl fmt::Display for Mode {
    /// Writes a text such as `dry run, card of 24 GiB` or `dry run, 8 cards of 24 GiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dry { card: None, cards: 0 | 1, .. } => f.write_str("dry run"),
            Self::Dry { card: None, cards, .. } => write!(f, "dry run, {cards} cards"),
            Self::Dry { card: Some(card), cards: 0 | 1, .. } => write!(f, "dry run, card of {card}"),
            Self::Dry { card: Some(card), cards, .. } => write!(f, "dry run, {cards} cards of {card}"),
            Self::Limit { card } => write!(f, "card limited to {card}"),
        }
    }
}

/// Blocks of up to this size are real in a dry run. It is that of the segments in PyTorch's pool for small tensors.
pub(super) const LARGEST_REAL: u64 = 2 << 20;

pub(super) static MODE: OnceCell<Mode> = OnceCell::new();

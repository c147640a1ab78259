//! What is asked for.

use std::fmt;

use once_cell::sync::OnceCell;

use crate::model::Bytes;

/// How the memory of the process differs from that of the real cards. Each card has `card` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A card of another size, on which nothing is executed that needs more than small blocks.
    Dry {
        /// All bytes of each card, as `cuMemGetInfo` returns them. `None`: what the first real card has.
        card: Option<Bytes>,
        /// How many such cards the program sees. 0: as many as the machine has.
        cards: u32,
        /// What is copied to the host from memory that does not exist, byte by byte.
        fill: u8,
    },
    /// A smaller card.
    Limit {
        /// All bytes of each card.
        card: Bytes,
    },
}

impl Mode {
    /// All bytes of each card; `None` if they are those of the real one.
    pub fn card(self) -> Option<Bytes> {
        match self {
            Self::Dry { card, .. } => card,
            Self::Limit { card } => Some(card),
        }
    }
}

impl fmt::Display for Mode {
    /// `dry run, card of 24 GiB`; `dry run, 8 cards of 24 GiB`
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

/// Blocks of up to so many bytes are real in a dry run: the segments of PyTorch's pool for small tensors have as many.
pub(super) const LARGEST_REAL: u64 = 2 << 20;

pub(super) static MODE: OnceCell<Mode> = OnceCell::new();

//! The modes of dry runs and limits.

use std::{fmt, sync::atomic::AtomicBool};

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
        /// The size up to which blocks are real. `None` to choose it by the free memory of the GPU.
        real: Option<Bytes>,
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

pub(super) static MODE: OnceCell<Mode> = OnceCell::new();

/// What a dry run reports.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Observe {
    /// Called once, with the size of the largest block that is real.
    pub(crate) real_part: fn(Bytes),
    /// Called with the bytes of each copy to the host whose values are not known.
    pub(crate) value_read: fn(Bytes),
}

pub(super) static OBSERVER: OnceCell<Observe> = OnceCell::new();

/// True if the program asked for the GPUs itself: no summary of `gpumem run` follows.
pub(super) static IS_ALONE: AtomicBool = AtomicBool::new(false);

pub(super) fn is_dry_run() -> bool {
    matches!(MODE.get(), Some(Mode::Dry { .. }))
}

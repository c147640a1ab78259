//! Dry runs, and smaller cards: a program runs as on a card that is not there.
//!
//! On a smaller card ([`Mode::Limit`]) all memory is real. The driver's functions that allocate keep an account, and refuse what the card
//! would not have.
//!
//! In a dry run ([`Mode::Dry`]) large blocks are ranges of addresses without memory. Small ones are real and begin as zeros, so that
//! counters, lengths and masks are computed. A kernel or a copy is executed if none of its addresses is dry; otherwise it does nothing. What is
//! copied to the host from dry memory is one byte, again and again.
//!
//! The functions lie between the hooks and the driver: a hook records what they answer. They are put into the slots before the program
//! uses CUDA, and stay there until the process ends.

mod blocks;
mod functions;
mod memory;
mod physical;
mod questions;
mod state;
mod table;
mod work;

use std::{
    fmt,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use once_cell::sync::OnceCell;

use self::{
    functions::{DRIVERS, replacements},
    table::FUNCTIONS,
};
use super::slots::{DispatchTable, Slot, unusable};
use crate::{
    error::Error,
    model::Bytes,
    sys::{cuda, loader},
};

/// How the memory of the process differs from that of the real cards. Each card has `card` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A card of another size, on which nothing is executed that needs more than small blocks.
    Dry {
        /// All bytes of each card, as `cuMemGetInfo` returns them. `None`: what the first real card has.
        card: Option<Bytes>,
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
    /// `dry run, card of 24 GiB`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dry { card: None, .. } => f.write_str("dry run"),
            Self::Dry { card: Some(card), .. } => write!(f, "dry run, card of {card}"),
            Self::Limit { card } => write!(f, "card limited to {card}"),
        }
    }
}

/// Blocks of up to so many bytes are real in a dry run: the segments of PyTorch's pool for small tensors have as many.
const LARGEST_REAL: u64 = 2 << 20;

static MODE: OnceCell<Mode> = OnceCell::new();

/// The functions in the slots, by row of [`FUNCTIONS`]. 0 where the driver's own is there.
static REPLACED: [AtomicUsize; FUNCTIONS.len()] = [const { AtomicUsize::new(0) }; FUNCTIONS.len()];

/// From now on the process has other cards. To be called before the program has a context, at most once.
///
/// # Errors
/// If the driver's dispatch table cannot be used, or another tool uses it: then nothing is changed.
pub fn begin(mode: Mode) -> Result<(), Error> {
    let names = FUNCTIONS.iter().map(|(name, _)| *name);
    let table = DispatchTable::find(names)?;
    cuda::load()?;
    work::load();
    loader::pin().map_err(unusable)?;
    if MODE.set(mode).is_err() {
        return Err(unusable("the cards of this process were replaced before"));
    }
    let replacements = replacements();
    let is_replaced = |row: usize| matches!(mode, Mode::Dry { .. }) || FUNCTIONS[row].1.is_of_limit();
    for (at, slot) in table.slots.iter().enumerate().filter(|(_, slot)| is_replaced(slot.row)) {
        DRIVERS[slot.row].store(slot.driver, Relaxed);
        slot.set_hook(replacements[slot.row]);
        if !slot.install() {
            table.slots[..at].iter().filter(|slot| is_replaced(slot.row)).for_each(Slot::restore);
            return Err(unusable(format!("another tool has replaced the pointer of {}", FUNCTIONS[slot.row].0)));
        }
        REPLACED[slot.row].store(replacements[slot.row], Relaxed);
    }
    Ok(())
}

/// How the memory of this process differs from that of the real cards.
pub fn mode() -> Option<Mode> {
    MODE.get().copied()
}

/// The driver's own implementation, if this is a function that is in its place.
pub(super) fn driver_below(function: usize) -> usize {
    if MODE.get().is_none() {
        return function;
    }
    let row = REPLACED.iter().position(|replaced| replaced.load(Relaxed) == function);
    row.map_or(function, |row| DRIVERS[row].load(Relaxed))
}

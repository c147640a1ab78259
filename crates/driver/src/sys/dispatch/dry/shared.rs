//! The memory of each process of one `gpumem run` on the GPUs, in words that the processes share. A process cannot allocate memory that
//! another one uses.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use once_cell::sync::OnceCell;

/// The maximum number of shared GPUs. Further ones are not shared.
const CARDS: usize = 64;
/// The words of a slot: its process, and the bytes of the process on each GPU.
const WORDS: usize = 1 + CARDS;
/// The maximum number of processes that use the GPUs at the same time.
const SLOTS: usize = 256;

/// The number of shared words. They are initially 0.
pub const SHARED_WORDS: usize = SLOTS * WORDS;

/// States of a slot: it is free, or a process is emptying it.
const FREE: u64 = 0;
const BUSY: u64 = 1;

/// The number that all processes use for each device of this process.
static NUMBERS: OnceCell<Vec<u32>> = OnceCell::new();

/// Sets the numbers of the devices of this process.
pub(super) fn number(devices: Vec<u32>) {
    _ = NUMBERS.set(devices);
}

pub(super) fn are_numbered() -> bool {
    NUMBERS.get().is_some()
}

/// Returns the number that all processes use for a device of this process.
pub(super) fn number_of(device: u32) -> u32 {
    NUMBERS.get().and_then(|numbers| numbers.get(usize::try_from(device).ok()?).copied()).unwrap_or(device)
}

/// This process's slot, and the other processes' slots.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shared {
    words: &'static [AtomicU64],
    own: usize,
    is_running: fn(u64) -> bool,
}

impl Shared {
    /// Takes a slot. `owner` identifies the process for `is_running`. Returns `None` if all slots are taken, or if there are too few words.
    pub(super) fn join(words: &'static [AtomicU64], owner: u64, is_running: fn(u64) -> bool) -> Option<Self> {
        let mut joined = Self { words: words.get(..SHARED_WORDS)?, own: 0, is_running };
        joined.forget_ended();
        // A program that was started by `exec` is the same process as before.
        let take =
            |from| (0..SLOTS).find(|slot| joined.owner(*slot).compare_exchange(from, owner, SeqCst, SeqCst).is_ok());
        joined.own = take(owner).or_else(|| take(FREE))?;
        joined.empty(joined.own);
        Some(joined)
    }

    /// Opens the words without taking a slot, so that all processes count as others.
    pub(super) fn watch(words: &'static [AtomicU64], is_running: fn(u64) -> bool) -> Self {
        Self { words, own: SLOTS, is_running }
    }

    fn owner(&self, slot: usize) -> &AtomicU64 {
        &self.words[slot * WORDS]
    }

    fn used(&self, slot: usize, card: u32) -> Option<&AtomicU64> {
        let card = usize::try_from(card).ok().filter(|card| *card < CARDS)?;
        Some(&self.words[slot * WORDS + 1 + card])
    }

    fn empty(&self, slot: usize) {
        (0..CARDS).for_each(|card| self.words[slot * WORDS + 1 + card].store(0, SeqCst));
    }

    /// Sets the bytes of this process on a card.
    pub(super) fn publish(&self, card: u32, bytes: u64) {
        if let Some(used) = self.used(self.own, card) {
            used.store(bytes, SeqCst);
        }
    }

    /// Returns the bytes of the other processes on a card.
    pub(super) fn others(&self, card: u32) -> u64 {
        let others = (0..SLOTS).filter(|slot| *slot != self.own && self.owner(*slot).load(SeqCst) > BUSY);
        // A process may write any value to these words.
        others.fold(0, |sum: u64, slot| sum.saturating_add(self.used(slot, card).map_or(0, |used| used.load(SeqCst))))
    }

    /// Frees the slots of processes that have ended or were killed. Returns whether there were any.
    pub(super) fn forget_ended(&self) -> bool {
        let mut has_any = false;
        for slot in 0..SLOTS {
            let owner = self.owner(slot).load(SeqCst);
            if owner > BUSY
                && !(self.is_running)(owner)
                && self.owner(slot).compare_exchange(owner, BUSY, SeqCst, SeqCst).is_ok()
            {
                self.empty(slot);
                self.owner(slot).store(FREE, SeqCst);
                has_any = true;
            }
        }
        has_any
    }
}

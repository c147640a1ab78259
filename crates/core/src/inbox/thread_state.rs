//! The state of a thread: whether it is inside an inbox, and its number.

use std::cell::Cell;

use crate::ledger::Noticed;

/// This bit of `ThreadState::lost` is set if `noticed` contains an event. One comparison then checks for both.
const NOTICED: u32 = 1 << 31;

/// The state of one thread.
#[derive(Debug, Default)]
pub struct ThreadState {
    /// True while the thread is inside an inbox. A global allocator or a signal handler that allocates GPU memory may
    /// call the inbox again while the ledger is being changed; without this flag the thread would wait for itself for
    /// ever.
    inside: Cell<bool>,
    /// The number of lost events of this thread: they came while it was inside, or the ledger panicked. The thread records the
    /// loss when it leaves.
    lost: Cell<u32>,
    /// The last event of the thread, if a budget watches for it.
    noticed: Cell<Option<Noticed>>,
    /// The number of the thread; 0 until it has one.
    number: Cell<u32>,
}

impl ThreadState {
    pub const fn new() -> Self {
        Self { inside: Cell::new(false), lost: Cell::new(0), noticed: Cell::new(None), number: Cell::new(0) }
    }

    /// Enters the inbox. Returns `false` if the thread is already inside.
    #[inline]
    pub(super) fn enter(&self) -> bool {
        !self.inside.replace(true)
    }

    /// Leaves the inbox. Returns whether events were lost, or one was noticed, since the thread entered.
    #[inline]
    pub(super) fn leave(&self) -> bool {
        self.inside.set(false);
        self.lost.get() > 0
    }

    #[cold]
    pub(super) fn lose(&self, events: u32) {
        let lost = self.lost.get();
        self.lost.set(lost & NOTICED | (lost & !NOTICED).saturating_add(events).min(!NOTICED));
    }

    /// Returns the number of lost events and sets it to 0.
    pub(super) fn reset_lost(&self) -> u32 {
        self.lost.take() & !NOTICED
    }

    #[cold]
    pub(super) fn keep_noticed(&self, noticed: Noticed) {
        self.noticed.set(Some(noticed));
        self.lost.set(self.lost.get() | NOTICED);
    }

    pub(super) fn take_noticed(&self) -> Option<Noticed> {
        self.noticed.take()
    }

    /// The thread's number; 0 if it has none yet.
    #[inline]
    pub(super) fn number(&self) -> u32 {
        self.number.get()
    }

    pub(super) fn set_number(&self, number: u32) {
        self.number.set(number);
    }

    pub(super) fn set_inside(&self, inside: bool) {
        self.inside.set(inside);
    }
}

//! The state of a thread: whether it is inside an inbox, and its number.

use std::{cell::Cell, marker::PhantomData};

use super::Primitives;

/// The state of one thread.
#[derive(Debug, Default)]
pub struct ThreadState {
    /// The thread is inside an inbox. A global allocator or a signal handler that allocates GPU memory may call the inbox again while the
    /// ledger is being changed; without this flag the thread would wait for itself for ever.
    inside: Cell<bool>,
    /// How many events of this thread were lost: they came while it was inside, or the ledger panicked. It records the loss when it leaves.
    lost: Cell<u32>,
    /// Its number; 0 until it has one.
    number: Cell<u32>,
}

impl ThreadState {
    pub const fn new() -> Self {
        Self { inside: Cell::new(false), lost: Cell::new(0), number: Cell::new(0) }
    }

    /// Enters the inbox; `false` if the thread is inside already.
    #[inline]
    pub(super) fn enter(&self) -> bool {
        !self.inside.replace(true)
    }

    /// Leaves the inbox. Returns whether events were lost meanwhile.
    #[inline]
    pub(super) fn leave(&self) -> bool {
        self.inside.set(false);
        self.lost.get() > 0
    }

    #[cold]
    pub(super) fn lose(&self, events: u32) {
        self.lost.set(self.lost.get().saturating_add(events));
    }

    /// Returns the number of lost events and sets it to 0.
    pub(super) fn reset_lost(&self) -> u32 {
        self.lost.take()
    }

    /// The thread's number; 0 if it has none yet.
    #[inline]
    pub(super) fn number(&self) -> u32 {
        self.number.get()
    }

    pub(super) fn set_number(&self, number: u32) {
        self.number.set(number);
    }

    fn set_inside(&self, inside: bool) {
        self.inside.set(inside);
    }
}

/// Holds the number that a thread was lent, and returns it when the thread ends.
#[derive(Debug)]
pub struct LentNumber<P: Primitives> {
    /// 0 if no number is lent.
    number: Cell<u32>,
    primitives: PhantomData<P>,
}

impl<P: Primitives> LentNumber<P> {
    pub const fn none() -> Self {
        Self { number: Cell::new(0), primitives: PhantomData }
    }

    pub fn keep(&self, number: u32) {
        self.number.set(number);
    }
}

impl<P: Primitives> Drop for LentNumber<P> {
    fn drop(&mut self) {
        let number = self.number.take();
        if number == 0 || P::is_forked() {
            return;
        }
        // Returning the number may allocate, and an allocator that allocates GPU memory must not enter the inbox then.
        let is_inside = |inside| P::try_with_thread(|thread| (thread.set_number(0), thread.set_inside(inside)));
        is_inside(true);
        P::return_number(number);
        is_inside(false);
    }
}

/// Implements the functions of [`Primitives`] that access the state of a thread. It uses the variables of
/// [`thread_variables`](crate::thread_variables).
#[macro_export]
macro_rules! thread_state {
    ($primitives:ty) => {
        #[inline]
        fn with_thread<R>(use_it: impl FnOnce(&$crate::inbox::ThreadState) -> R) -> R {
            STATE.with(use_it)
        }

        #[inline]
        fn try_with_thread<R>(use_it: impl FnOnce(&$crate::inbox::ThreadState) -> R) -> Option<R> {
            STATE.try_with(use_it).ok()
        }

        fn return_at_thread_end(number: u32) {
            let keep = |lent: &$crate::inbox::LentNumber<$primitives>| lent.keep(number);
            // If both variables are gone, the number stays lent.
            let _ = LENT.try_with(keep).or_else(|_| LENT_AT_END.try_with(keep));
        }
    };
}

/// Declares the variables that [`thread_state`](crate::thread_state) uses, with the given `thread_local!`.
#[macro_export]
macro_rules! thread_variables {
    ($($thread_local:ident)::+, $primitives:ty) => {
        $($thread_local)::+! {
            // It has no destructor, so it exists as long as the thread.
            static STATE: $crate::inbox::ThreadState = const { $crate::inbox::ThreadState::new() };
            static LENT: $crate::inbox::LentNumber<$primitives> = const { $crate::inbox::LentNumber::none() };
            // For a thread whose other variables free GPU memory when they are dropped, after `LENT` is gone.
            static LENT_AT_END: $crate::inbox::LentNumber<$primitives> = const { $crate::inbox::LentNumber::none() };
        }
    };
}

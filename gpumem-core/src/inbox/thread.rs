//! What a thread knows about itself.

use std::{cell::Cell, marker::PhantomData};

use super::Primitives;

/// The state of one thread.
#[derive(Debug, Default)]
pub struct ThreadState {
    /// The thread is inside an inbox. A global allocator or a signal handler that allocates GPU memory would come back while the
    /// ledger is changed, and would wait for its own thread for ever.
    inside: Cell<bool>,
    /// How many events of this thread came while it was inside, or made the ledger panic. It posts them as lost when it leaves.
    lost: Cell<u32>,
    /// Its number; 0 until it has one.
    number: Cell<u32>,
}

impl ThreadState {
    pub const fn new() -> Self {
        Self { inside: Cell::new(false), lost: Cell::new(0), number: Cell::new(0) }
    }

    /// Enters; false if the thread is inside already.
    #[inline]
    pub(super) fn enter(&self) -> bool {
        !self.inside.replace(true)
    }

    /// Leaves; says whether events were lost while the thread was inside.
    #[inline]
    pub(super) fn leave(&self) -> bool {
        self.inside.set(false);
        self.lost.get() > 0
    }

    #[cold]
    pub(super) fn lose(&self, events: u32) {
        self.lost.set(self.lost.get().saturating_add(events));
    }

    pub(super) fn take_lost(&self) -> u32 {
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

/// Returns the number that a thread was lent when the thread ends.
#[derive(Debug)]
pub struct LentNumber<P: Primitives> {
    /// 0 if it has none.
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
        // While the number is returned, an allocator that allocates GPU memory must not enter the inbox.
        let is_inside = |inside| P::try_with_thread(|thread| (thread.set_number(0), thread.set_inside(inside)));
        is_inside(true);
        P::return_number(number);
        is_inside(false);
    }
}

/// The functions of [`Primitives`] about the thread's state; the variables are those of [`thread_variables`](crate::thread_variables).
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
            // Where neither is there any more, the number stays lent.
            let _ = LENT.try_with(keep).or_else(|_| LENT_AT_END.try_with(keep));
        }
    };
}

/// The variables that [`thread_state`](crate::thread_state) uses, made by the given `thread_local!`.
#[macro_export]
macro_rules! thread_variables {
    ($($thread_local:ident)::+, $primitives:ty) => {
        $($thread_local)::+! {
            // It has nothing to drop, so it is there as long as the thread.
            static STATE: $crate::inbox::ThreadState = const { $crate::inbox::ThreadState::new() };
            static LENT: $crate::inbox::LentNumber<$primitives> = const { $crate::inbox::LentNumber::none() };
            // For a thread that frees memory of its other variables after the first is gone.
            static LENT_AT_END: $crate::inbox::LentNumber<$primitives> = const { $crate::inbox::LentNumber::none() };
        }
    };
}

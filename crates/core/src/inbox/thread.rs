//! The number that is lent to a thread, and the thread-local variables of an inbox.

use std::{cell::Cell, marker::PhantomData};

use super::Primitives;

/// Holds the number that a thread was lent, and returns it when the thread ends.
#[derive(Debug)]
pub struct LentNumber<P: Primitives> {
    /// 0 if no number is lent.
    number: Cell<u32>,
    primitives: PhantomData<P>,
}

impl<P: Primitives> LentNumber<P> {
    /// Creates the state in which the thread has no number yet.
    pub const fn none() -> Self {
        Self { number: Cell::new(0), primitives: PhantomData }
    }

    /// Stores the number that the thread was lent. It is returned when the thread ends.
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

/// Declares the variables that [`thread_state`] uses, with the given `thread_local!`.
#[macro_export]
macro_rules! thread_variables {
    ($($thread_local:ident)::+, $primitives:ty) => {
        $($thread_local)::+! {
            // This variable has no destructor, so it exists as long as the thread.
            static STATE: $crate::inbox::ThreadState = const { $crate::inbox::ThreadState::new() };
            static LENT: $crate::inbox::LentNumber<$primitives> = const { $crate::inbox::LentNumber::none() };
            // This is for a thread whose other variables free GPU memory when they are dropped, after `LENT` is gone.
            static LENT_AT_END: $crate::inbox::LentNumber<$primitives> = const { $crate::inbox::LentNumber::none() };
        }
    };
}

//! Records on whose behalf a thread currently calls the driver. That decides whether an intercepted call is recorded.

use std::{
    cell::Cell,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
};

use crate::sys::process::without_cancellation;

/// On whose behalf a thread calls the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sys) enum ThreadState {
    Program,
    /// The thread is inside a driver function whose call is recorded. Calls made by that function are part of the same call.
    Driver,
    /// This library calls the driver for itself.
    Library,
    /// The thread is inside the observer, which may hold its lock. Recording another call would deadlock.
    Observer,
}

thread_local! {
    pub(in crate::sys) static STATE: Cell<ThreadState> = const { Cell::new(ThreadState::Program) };
}

/// Runs code of the observer, which may hold the observer's lock. Driver calls of this code are not passed to the observer; they are
/// recorded as [`Call::Uncounted`](super::Call::Uncounted).
#[inline]
pub(crate) fn as_observer<T>(code: impl FnOnce() -> T) -> T {
    in_state(ThreadState::Observer, code)
}

/// Like [`as_observer`], but for the rare paths of [`Observe::pooled`](super::Observe::pooled) and
/// [`Observe::freeing`](super::Observe::freeing): keeps them out of the hook's code. The thread cannot be cancelled while the code runs.
/// Returns `None` if the code panicked.
#[cold]
#[inline(never)]
pub(crate) fn as_observer_cold<T>(code: impl FnOnce() -> T) -> Option<T> {
    without_cancellation(|| catch_unwind(AssertUnwindSafe(|| as_observer(code))).map_err(mem::forget).ok())
}

/// Runs code outside of the re-entrancy guard: its driver calls are recorded as calls of the program. The caller must not hold a lock of
/// the observer.
pub(crate) fn as_program<T>(code: impl FnOnce() -> T) -> T {
    in_state(ThreadState::Program, code)
}

/// Runs driver calls that this library makes for itself, which are not recorded.
pub(in crate::sys) fn as_library<T>(code: impl FnOnce() -> T) -> T {
    in_state(ThreadState::Library, code)
}

/// Runs code in this state, and restores the previous state afterwards.
#[inline]
pub(in crate::sys) fn in_state<T>(state: ThreadState, code: impl FnOnce() -> T) -> T {
    struct RestoreState(ThreadState);

    impl Drop for RestoreState {
        fn drop(&mut self) {
            STATE.set(self.0);
        }
    }

    let _restore = RestoreState(STATE.replace(state));
    code()
}

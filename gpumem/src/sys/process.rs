//! The process itself: its end, and its copies.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use crate::inbox::{Primitives, Std};
use once_cell::sync::OnceCell;

unsafe extern "C" {
    fn atexit(callback: extern "C" fn()) -> c_int;

    #[cfg(unix)]
    fn pthread_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> c_int;
}

/// Has `callback` called when the process exits, before libraries are torn down that have begun by now: handlers run in reverse
/// order. It must not unwind.
pub(crate) fn at_exit(callback: extern "C" fn()) {
    // SAFETY: `atexit` is in the C library that every target of `std` with NVIDIA drivers links; it keeps the function
    // pointer, which is `'static`, and calls it once with no argument. A refusal (no memory) is harmless: the handler is
    // then not called.
    unsafe { atexit(callback) };
}

/// What is done in the child of a fork besides noticing it.
static IN_CHILD: OnceCell<fn()> = OnceCell::new();

/// Has `code` run in the child of a fork, where it may do no more than store to atomics.
#[cfg(feature = "dispatch")]
pub(super) fn at_fork(code: fn()) {
    let _ = IN_CHILD.set(code);
    notice_forks();
}

/// Has forks of this process noticed from now on.
pub(crate) fn notice_forks() {
    // Not a cell that is filled once: a child that is forked meanwhile would wait for the thread that fills it.
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.load(Relaxed) && !DONE.swap(true, Relaxed) {
        #[cfg(unix)]
        // SAFETY: `pthread_atfork` is in the C library of every unix; it keeps the function pointer, which is `'static`,
        // and calls it in the child of a fork. What is called there stores to an atomic, which is allowed.
        unsafe {
            pthread_atfork(None, None, Some(forked))
        };
    }
}

#[cfg(unix)]
unsafe extern "C" fn forked() {
    crate::inbox::set_forked();
    if let Some(code) = IN_CHILD.get() {
        code();
    }
}

/// This process is the copy of one that used this crate: see [`notice_forks`]. Its other threads are gone, locks that they
/// held stay locked for ever, and the CUDA driver does not work in it either. So it takes no lock, of this crate or of the
/// standard library, and prints nothing: whoever asks for something gets an error.
pub(crate) fn is_forked() -> bool {
    <Std as Primitives>::is_forked()
}

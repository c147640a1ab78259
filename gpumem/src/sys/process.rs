//! The process itself: its exit, and its forks.

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

/// Calls `callback` when the process exits. Handlers run in reverse order, so libraries that have registered their handlers by now
/// still work at that moment. `callback` must not unwind.
pub(crate) fn at_exit(callback: extern "C" fn()) {
    // SAFETY: `atexit` is in the C library that every target of `std` with NVIDIA drivers links; it keeps the function
    // pointer, which is `'static`, and calls it once with no argument. If `atexit` fails for want of memory, the handler is not
    // called, which is harmless.
    unsafe { atexit(callback) };
}

/// The number that the operating system gives the calling thread; 0 where that is not known.
#[cfg(feature = "capture")]
pub(crate) fn thread_id() -> u64 {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: `gettid` has no arguments and cannot fail.
        let id = unsafe { libc::gettid() };
        u64::try_from(id).unwrap_or(0)
    }
    #[cfg(not(target_os = "linux"))]
    0
}

/// The code that runs in the child of a fork.
static IN_CHILD: OnceCell<fn()> = OnceCell::new();

/// Runs `code` in the child of a fork. `code` may only store to atomics.
#[cfg(feature = "dispatch")]
pub(super) fn at_fork(code: fn()) {
    let _ = IN_CHILD.set(code);
    notice_forks();
}

/// From now on forks of this process are noticed.
pub(crate) fn notice_forks() {
    // Not a `OnceCell`: a child that is forked while another thread initialises it would wait for that thread for ever.
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.load(Relaxed) && !DONE.swap(true, Relaxed) {
        #[cfg(unix)]
        // SAFETY: `pthread_atfork` is in the C library of every unix; it keeps the function pointer, which is `'static`,
        // and calls it in the child of a fork. The function only stores to atomics, which is allowed there.
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

/// Whether this process is the child of a fork of a process that used this crate, if [`notice_forks`] was called before the fork. The
/// other threads do not exist in the child, so locks that they held stay locked for ever, and the CUDA driver does not work there.
/// So this crate takes no lock in the child, neither its own nor one of the standard library, and prints nothing. Every request
/// returns an error.
pub(crate) fn is_forked() -> bool {
    <Std as Primitives>::is_forked()
}

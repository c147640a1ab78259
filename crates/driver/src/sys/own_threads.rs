//! gpumem's threads in the program.

use std::{
    io,
    thread::{Builder, JoinHandle},
};

use super::descriptor;

/// The prefix of the names of all gpumem threads.
pub const PREFIX: &str = "gpumem-";

/// Runs `body` on a thread that is called `gpumem-` and `name`. The thread receives none of the program's signals: Python handles them on
/// its main thread, which would not wake up if another thread received one.
///
/// # Errors
/// Returns an error if no thread can be started.
pub fn spawn<T: Send + 'static>(name: &str, body: impl FnOnce() -> T + Send + 'static) -> io::Result<JoinHandle<T>> {
    let thread = Builder::new().name(format!("{PREFIX}{name}"));
    with_signals_blocked(|| thread.spawn(body))
}

/// Like [`spawn`], but gives the thread its own descriptor table, if that is possible. The argument of `body` is true if it has one.
///
/// # Errors
/// Returns an error if no thread can be started.
///
/// # Safety
/// `body` must not use a descriptor that it did not open, and no other thread may use one that `body` opens, because each number
/// refers to a different file there.
pub unsafe fn spawn_with_own_descriptors(name: &str, body: impl FnOnce(bool) + Send + 'static) -> io::Result<()> {
    // SAFETY: the thread has not used a descriptor yet. The rest is required by this function's contract.
    spawn(name, || body(unsafe { descriptor::leave_table_of_program() })).map(drop)
}

/// Runs `start`. All signals are blocked in the threads that it starts.
fn with_signals_blocked<R>(start: impl FnOnce() -> R) -> R {
    #[cfg(target_os = "linux")]
    {
        use std::{mem::MaybeUninit, ptr};
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: the first call fills `all`. The second one reads it and, if it succeeds, fills `before`. Both are valid for these
        // calls, which concern the calling thread alone.
        let is_blocked = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), before.as_mut_ptr()) == 0
        };
        let result = start();
        if is_blocked {
            // SAFETY: `before` was filled, because the call succeeded.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
        }
        result
    }
    #[cfg(not(target_os = "linux"))]
    start()
}

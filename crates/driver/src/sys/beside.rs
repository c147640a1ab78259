//! Threads of gpumem in a program that does not know about them.

use std::{io, thread};

use super::{descriptor, process};

/// Runs `code` on a thread of its own, which gets no signals of the program. Its name must begin with
/// [`process::OWN_THREADS`].
///
/// # Errors
/// Returns an error if no thread can be started.
pub fn run(name: &str, code: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = thread::Builder::new().name(name.to_owned());
    process::with_signals_blocked(|| thread.spawn(code)).map(drop)
}

/// Runs like [`run`], on a thread that has descriptors of its own, if that is possible. `code` is told whether it is.
///
/// # Errors
/// Returns an error if no thread can be started.
///
/// # Safety
/// `code` uses no descriptor that it has not opened, and no other thread uses one that it opens: each number means another file there.
pub unsafe fn run_with_own_descriptors(name: &str, code: impl FnOnce(bool) + Send + 'static) -> io::Result<()> {
    // SAFETY: the thread has used no descriptor yet, and `code` keeps to the rest, by the contract of this function.
    run(name, || code(unsafe { descriptor::leave_table_of_program() }))
}

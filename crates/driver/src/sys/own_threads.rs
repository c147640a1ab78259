//! gpumem's threads in a program that was not built for it.

use std::{io, thread};

use super::{descriptor, process};

/// Runs `code` on a separate thread that receives none of the program's signals. The thread's name must start with
/// [`process::OWN_THREADS`].
///
/// # Errors
/// Returns an error if no thread can be started.
pub fn run(name: &str, code: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = thread::Builder::new().name(name.to_owned());
    process::with_signals_blocked(|| thread.spawn(code)).map(drop)
}

/// Like [`run`], but gives the thread its own descriptor table, if that is possible. The argument of `code` is true if it has one.
///
/// # Errors
/// Returns an error if no thread can be started.
///
/// # Safety
/// `code` must not use a descriptor that it did not open, and no other thread may use one that `code` opens, because each number
/// refers to a different file there.
pub unsafe fn run_with_own_descriptors(name: &str, code: impl FnOnce(bool) + Send + 'static) -> io::Result<()> {
    // SAFETY: the thread has not used a descriptor yet. The rest is required by this function's contract.
    run(name, || code(unsafe { descriptor::leave_table_of_program() }))
}

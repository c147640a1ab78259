//! Walks stacks, and finds the functions and lines at addresses.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::{python, recorder, stack as resolved};
use crate::{
    model::{Frame, StackId, is_driver},
    sys::stack,
};

/// True if stacks have Python's functions as well.
static IS_PYTHON_RECORDED: AtomicBool = AtomicBool::new(false);

/// Sets whether stacks have Python's functions from now on.
pub(super) fn begin(is_python_recorded: bool) {
    if is_python_recorded {
        python::begin();
    }
    IS_PYTHON_RECORDED.store(is_python_recorded, Relaxed);
}

/// The number of the calling thread's stack, by the recorder of the process. The stacks that a thread has had before are in its cache.
#[inline]
pub fn current_stack() -> StackId {
    // The driver's functions are left out, since they are the same on each stack, and so are the hook or callback inside them.
    let native = StackId(stack::number(is_driver_file, |addresses| recorder::number_stack(addresses).0));
    if IS_PYTHON_RECORDED.load(Relaxed) {
        return python::with_python(native);
    }
    native
}

/// Returns the number of the file of the function that called the driver, in the place of a stack. It costs less than a stack at any depth
/// of the stack. gpumem must be in a file of its own: the caller is outside of that file.
#[inline]
pub fn current_file() -> StackId {
    StackId(stack::caller(is_driver_file, |address| recorder::number_file(address).0))
}

/// Returns whether functions of this file, and what they call, are left out of stacks: those of the driver, and of our library in a foreign
/// program, which is called in their place if the stub of the driver only jumps (up to 555).
fn is_driver_file(file: &[u8]) -> bool {
    let is_ours = |file: &str| file.rsplit('/').next().is_some_and(|name| name.starts_with("libgpumem_inject"));
    std::str::from_utf8(file).is_ok_and(|file| is_driver(file) || is_ours(file))
}

/// Empties the calling thread's cache of stacks.
pub fn forget_stacks() {
    stack::forget();
}

/// The number of the calling thread's stack, by the unwinder of the system and without the thread's cache: the numbers in the cache are
/// those of the process's recorder. It has at most 32 functions.
pub fn uncached_stack(number: impl Fn(&[usize]) -> StackId) -> StackId {
    StackId(stack::unwound(|addresses| number(addresses).0))
}

/// Returns the return addresses of the calling thread's stack, innermost first: at most 256. Empty without the feature
/// `backtrace`.
pub fn addresses_here() -> Vec<usize> {
    let mut addresses = [0; 256];
    let count = stack::unwind(&mut addresses, 1);
    addresses[..count].to_vec()
}

/// Returns the functions at these return addresses, innermost first. It is slow, so it is only for printing. Empty without the
/// feature `backtrace`.
pub fn frames(addresses: &[usize]) -> Vec<Frame> {
    resolved::frames(addresses)
}

/// The frame of a line of Python, whose number is on a stack in the place of an address.
pub fn python_frame(number: usize) -> Option<Frame> {
    python::frame(number)
}

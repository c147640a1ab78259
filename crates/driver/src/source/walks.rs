//! Walks stacks, and finds the functions and lines at addresses.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

pub use super::python::frame as python_frame;
use super::{python, recorder};
pub use crate::sys::stack::forget as forget_stacks;
use crate::{
    model::{Frame, StackId, is_driver},
    sys::stack,
};

/// True if stacks include Python's functions.
static IS_PYTHON_RECORDED: AtomicBool = AtomicBool::new(false);

/// Sets whether stacks include Python's functions.
pub(super) fn start(is_python_recorded: bool) {
    if is_python_recorded {
        python::start();
    }
    IS_PYTHON_RECORDED.store(is_python_recorded, Relaxed);
}

/// Returns the id of the calling thread's stack, assigned by the recorder of the process. Stacks that the thread has had before are in its
/// cache.
#[inline]
pub fn current_stack() -> StackId {
    // The driver's functions are left out because they are the same on each stack. The hook or callback inside them is left out for the
    // same reason.
    let native = StackId(stack::number(is_driver_file, |addresses| recorder::number_stack(addresses).0));
    if IS_PYTHON_RECORDED.load(Relaxed) {
        return python::with_python(native);
    }
    native
}

/// Returns the id of the file with the function that called the driver, to be recorded instead of a stack. That costs less than walking the
/// stack, however deep it is. gpumem must be in its own file, because the caller is found outside of that file.
#[inline]
pub fn current_file() -> StackId {
    StackId(stack::caller(is_driver_file, |address| recorder::number_file(address).0))
}

/// Returns whether stacks leave out the functions of this file and everything that they call. That is true for the driver, and for our
/// library in another program: the library is called in place of the driver if the driver's stub only jumps (drivers up to 555).
fn is_driver_file(file: &[u8]) -> bool {
    let is_ours = |file: &str| file.rsplit('/').next().is_some_and(|name| name.starts_with("libgpumem_inject"));
    std::str::from_utf8(file).is_ok_and(|file| is_driver(file) || is_ours(file))
}

/// Returns the id of the calling thread's stack, found by the system's unwinder, with at most 32 functions. The thread's cache is not used,
/// because its ids come from the process's recorder.
pub fn uncached_stack(number: impl Fn(&[usize]) -> StackId) -> StackId {
    StackId(stack::unwound(|addresses| number(addresses).0))
}

/// Returns the return addresses of the calling thread's stack, innermost first, at most 256. Empty without the feature `backtrace`.
pub fn addresses_here() -> Vec<usize> {
    let mut addresses = [0; 256];
    let count = stack::unwind(&mut addresses, 1);
    addresses[..count].to_vec()
}

/// Returns the frames at these addresses, innermost first, including inlined functions. This is slow, so it is used only for printing.
/// Empty without the feature `backtrace`.
pub fn frames(addresses: &[usize]) -> Vec<Frame> {
    addresses.iter().flat_map(|address| at(*address)).collect()
}

/// Returns what is known about these addresses without reading files: the module of each, and Python lines.
pub fn modules(addresses: &[usize]) -> Vec<Frame> {
    let module = |address: &usize| {
        python::frame(*address).unwrap_or_else(|| Frame { module: module_of(*address), ..Frame::default() })
    };
    addresses.iter().map(module).collect()
}

fn module_of(address: usize) -> Option<String> {
    stack::module_of(address).map(|file| file.to_string_lossy().into_owned())
}

/// Returns the frames at one address, or for the id of a Python line. If only the module is known, the frame contains nothing else.
fn at(address: usize) -> Vec<Frame> {
    if let Some(frame) = python::frame(address) {
        return vec![frame];
    }
    let module = module_of(address);
    let mut frames = stack::resolve(address);
    if frames.is_empty() {
        frames.push(Frame::default());
    }
    for frame in &mut frames {
        frame.module.clone_from(&module);
    }
    frames
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{library, user_line};

    #[test]
    fn the_line_of_this_test_is_not_a_line_of_the_user() {
        let mut addresses = [0; 64];
        let count = stack::unwind(&mut addresses, 0);
        let frames = frames(&addresses[..count]);
        assert!(frames[0].file.as_ref().unwrap().ends_with("source/walks.rs"), "{frames:#?}");
        assert!(frames.iter().all(|frame| frame.module.is_some()), "{frames:#?}");
        // The library's tests belong to its own code.
        let line = user_line(&frames).map(|(line, _)| line);
        assert!(line.is_none_or(|frame| frame.function.as_ref().unwrap().starts_with("test::")), "{line:#?}");
        let program = std::env::current_exe().unwrap();
        let program = program.file_name().unwrap().to_string_lossy();
        assert!(
            library(&frames).is_none_or(|library| library == program || library.starts_with("libc")),
            "{frames:#?}"
        );
    }

    #[test]
    fn an_unknown_address_is_an_empty_frame() {
        assert_eq!(frames(&[1]), [Frame::default()]);
    }
}

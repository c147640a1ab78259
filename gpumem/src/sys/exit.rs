//! The end of the process.

use std::ffi::c_int;

unsafe extern "C" {
    fn atexit(callback: extern "C" fn()) -> c_int;
}

/// Has `callback` called when the process exits, before the driver libraries are torn down: handlers run in reverse
/// order and libraries are finished after the last one. It must not unwind.
pub(crate) fn at_exit(callback: extern "C" fn()) {
    // SAFETY: `atexit` is in the C standard that every target of `std` with NVIDIA drivers links; it keeps the function
    // pointer, which is `'static`, and calls it once with no argument. A refusal (no memory) is harmless: the handler
    // is then not called.
    unsafe { atexit(callback) };
}

//! The call of the driver that the program is in, if the program says so. All other calls on that thread until it returns are made by the
//! tool that intercepts it.

use std::cell::Cell;
use std::ffi::{CStr, c_char};

thread_local! {
    static CALL: Cell<*const c_char> = const { Cell::new(std::ptr::null()) };
}

/// Notes the function that the calling thread calls from now on, or none. Returns the earlier one.
#[unsafe(no_mangle)]
extern "C" fn standin_program_calls(function: *const c_char) -> *const c_char {
    CALL.replace(function)
}

pub(crate) fn call() -> Option<&'static str> {
    let function = CALL.get();
    // SAFETY: the program passes a string that ends and stays until it passes another, after the call.
    (!function.is_null()).then(|| unsafe { CStr::from_ptr(function) }.to_str().ok()).flatten()
}

//! The driver call that the program is in, if the program reports it. Until it returns, all other calls on that thread come from the tool
//! that intercepts it.

use std::cell::Cell;
use std::ffi::{CStr, c_char};

thread_local! {
    static CALL: Cell<*const c_char> = const { Cell::new(std::ptr::null()) };
}

/// Notes the function that the calling thread calls next, or null for none. Returns the earlier one.
#[unsafe(no_mangle)]
extern "C" fn standin_program_calls(function: *const c_char) -> *const c_char {
    CALL.replace(function)
}

pub(crate) fn call() -> Option<&'static str> {
    let function = CALL.get();
    // SAFETY: the program passes a string that ends with a zero and lives until the program passes another one, after the call.
    (!function.is_null()).then(|| unsafe { CStr::from_ptr(function) }.to_str().ok()).flatten()
}

//! Calls the driver by name.

use std::{ffi::CString, ptr};

use cudarc::driver::sys;

type Function = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> i32;

/// Returns the result of a call. The tests name only functions of at most six integers and pointers, which x86-64 and arm64
/// pass in registers. Their pointers are to live memory of the size that the function reads or writes.
///
/// # Panics
/// Panics if the driver does not have the function, or if there are more arguments.
pub fn call(function: &str, arguments: &[u64]) -> i32 {
    let name = CString::new(function).expect("names have no zeros");
    // SAFETY: loading the driver has no preconditions.
    let library = unsafe { sys::culib() };
    // SAFETY: each function that the tests name has this type from its caller's point of view.
    let call = unsafe { library.get::<Function>(name.as_bytes_with_nul()) }.expect(function);
    let mut words = [0; 6];
    words[..arguments.len()].copy_from_slice(arguments);
    let [first, second, third, fourth, fifth, sixth] = words;
    // SAFETY: the arguments are valid for the function, as documented above.
    unsafe { call(first, second, third, fourth, fifth, sixth) }
}

/// Makes a call that must succeed.
///
/// # Panics
/// Panics if the call fails.
#[track_caller]
pub fn call_ok(function: &str, arguments: &[u64]) {
    let code = call(function, arguments);
    assert_eq!(code, 0, "{function} {arguments:x?}");
}

/// Returns the code of a call, and the value of its out-parameter; the rest of the word is 0 if the value is narrower.
pub fn try_call_for_output(function: &str, arguments: impl FnOnce(u64) -> Vec<u64>) -> (i32, u64) {
    let mut out = Box::new(0_u64);
    let at = ptr::from_mut(&mut *out).expose_provenance();
    let code = call(function, &arguments(at as u64));
    (code, *std::hint::black_box(out))
}

/// Makes a call that must succeed, and returns its out-parameter.
///
/// # Panics
/// Panics if the call fails.
#[track_caller]
pub fn call_for_output(function: &str, arguments: impl FnOnce(u64) -> Vec<u64>) -> u64 {
    let (code, out) = try_call_for_output(function, arguments);
    assert_eq!(code, 0, "{function}");
    out
}

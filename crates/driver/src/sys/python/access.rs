//! Reads symbols of the interpreter, and words of its memory.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    mem::transmute_copy,
    ptr,
};

/// # Safety
/// `address` must be the address of an aligned, readable word.
pub(super) unsafe fn word(address: usize) -> usize {
    // SAFETY: required by this function's contract.
    unsafe { ptr::with_exposed_provenance::<usize>(address).read() }
}

/// # Safety
/// `address` must be the address of an aligned, readable `int`.
pub(super) unsafe fn int(address: usize) -> c_int {
    // SAFETY: required by this function's contract.
    unsafe { ptr::with_exposed_provenance::<c_int>(address).read() }
}

/// # Safety
/// `address` must be the address of a readable byte.
pub(super) unsafe fn byte(address: usize) -> u8 {
    // SAFETY: required by this function's contract.
    unsafe { ptr::with_exposed_provenance::<u8>(address).read() }
}

/// Returns a symbol of the program, or of a library whose symbols all others see. The layouts are as on Linux.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
pub(super) fn symbol(name: &CStr) -> Option<*mut c_void> {
    let name: *const c_char = name.as_ptr();
    // SAFETY: the name is a string. Nothing is loaded.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name) };
    (!found.is_null()).then_some(found)
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
pub(super) fn symbol(_: &CStr) -> Option<*mut c_void> {
    None
}

/// Returns the function with this name.
///
/// # Safety
/// `F` must be the type of a pointer to that function.
pub(super) unsafe fn function<F: Copy>(name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    let found = symbol(name)?;
    // SAFETY: the address is not null, and the type is required by this function's contract.
    Some(unsafe { transmute_copy::<*mut c_void, F>(&found) })
}

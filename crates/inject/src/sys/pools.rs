//! Pools that the program registers with its own copy of gpumem, which passes them on through these functions.

#![expect(unsafe_code, reason = "the gpumem of the program calls the functions, and hands over pointers")]

use std::{
    ffi::c_void,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr, slice,
};

use gpumem::{Bytes, pool::Pool};
use gpumem_driver::recorded_pools::{PoolFunctions, VERSION};

use crate::recordings;

/// A pool of the program.
struct ProgramPool {
    pool: Pool,
    /// The id of the recording that knows the pool. Other recordings do not know it.
    recording: u32,
}

static FUNCTIONS: PoolFunctions = PoolFunctions { register, allocated, freed, set_reserved, close };

/// Returns the functions for pools, or null if the program has another gpumem version.
// SAFETY: the name starts with the prefix of this project, so it cannot clash with another function of the program.
#[unsafe(no_mangle)]
pub extern "C" fn gpumem_pools(version: u32) -> *const PoolFunctions {
    if version == VERSION { &raw const FUNCTIONS } else { ptr::null() }
}

unsafe extern "C" fn register(name: *const u8, length: usize, device: u32) -> *mut c_void {
    // Without a recording, gpumem must not be called: its first use fixes the settings of the process.
    let Some(recording) = recordings::current() else { return ptr::null_mut() };
    // SAFETY: the caller passes a name of this length.
    let name = String::from_utf8_lossy(unsafe { slice::from_raw_parts(name, length) }).into_owned();
    match catch_unwind(|| Pool::register(name, device)) {
        Ok(Ok(pool)) => Box::into_raw(Box::new(ProgramPool { pool, recording })).cast(),
        Ok(Err(why)) => {
            super::say(" is recorded without the parts of a pool", Err(why.to_string()));
            ptr::null_mut()
        }
        // The panic hook has already printed the panic.
        Err(_) => ptr::null_mut(),
    }
}

unsafe extern "C" fn allocated(pool: *const c_void, address: u64, bytes: u64) {
    // SAFETY: the caller passes a pointer that `register` returned and that was not closed.
    unsafe { with(pool, |pool| pool.allocated(address, Bytes::new(bytes))) }
}

unsafe extern "C" fn freed(pool: *const c_void, address: u64) {
    // SAFETY: as above.
    unsafe { with(pool, |pool| pool.freed(address)) }
}

unsafe extern "C" fn set_reserved(pool: *const c_void, bytes: u64) {
    // SAFETY: as above.
    unsafe { with(pool, |pool| pool.set_reserved(Bytes::new(bytes))) }
}

unsafe extern "C" fn close(pool: *mut c_void) {
    // SAFETY: `register` created the pointer, and it is not used again.
    let pool = unsafe { Box::from_raw(pool.cast::<ProgramPool>()) };
    _ = catch_unwind(AssertUnwindSafe(|| drop(pool)));
}

/// Calls the pool if the recording that knows it is still the current one.
///
/// # Safety
/// `pool` must be a pointer that `register` returned and that was not closed.
#[inline]
unsafe fn with(pool: *const c_void, call: impl FnOnce(&Pool)) {
    // SAFETY: required by this function's contract.
    let ProgramPool { pool, recording } = unsafe { &*pool.cast::<ProgramPool>() };
    if Some(*recording) == recordings::current() {
        _ = catch_unwind(AssertUnwindSafe(|| call(pool)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_gets_nothing_and_no_pool_is_taken_without_a_recording() {
        assert!(gpumem_pools(VERSION + 1).is_null());
        // SAFETY: the function returns a table of this version.
        let functions = unsafe { gpumem_pools(VERSION).as_ref() }.expect("it is there");
        // SAFETY: the name has this length.
        assert!(unsafe { (functions.register)(b"arena".as_ptr(), 5, 0) }.is_null());
    }
}

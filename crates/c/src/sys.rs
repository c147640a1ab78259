//! The functions that a C program calls. No panic crosses the boundary into C.

#![expect(unsafe_code, reason = "C calls these functions by their names, and hands over pointers")]

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    panic::catch_unwind,
    ptr,
};

use gpumem::{__private::notice, Bytes, pool::Pool};

/// Registers a pool; see `gpumem.h`.
///
/// # Safety
/// `name` must be null or point to a text that ends with a zero byte.
// SAFETY: the name starts with `gpumem_`, the prefix of this project, so it cannot clash with another function of the program.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpumem_pool_register(name: *const c_char, device: c_int) -> *const Pool {
    // SAFETY: `name` is not null here, and this function's contract requires that it points to a C string.
    let name = if name.is_null() { c"" } else { unsafe { CStr::from_ptr(name) } };
    let name = name.to_string_lossy().into_owned();
    let registered = catch_unwind(move || Pool::register(name, u32::try_from(device).ok()));
    match registered {
        Ok(Ok(pool)) => Box::leak(Box::new(pool)),
        Ok(Err(why)) => {
            notice(format_args!("the pool is not measured: {why}"));
            ptr::null()
        }
        // The panic hook has printed the panic.
        Err(_) => ptr::null(),
    }
}

/// Records an allocation from a pool; see `gpumem.h`.
///
/// # Safety
/// `pool` must be null or come from [`gpumem_pool_register`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpumem_pool_allocated(pool: *const Pool, address: *const c_void, bytes: usize) {
    // SAFETY: this function's contract requires that `pool` is null or a registered pool, and pools are never freed.
    if let Some(pool) = unsafe { pool.as_ref() } {
        _ = catch_unwind(|| pool.allocated(address.addr() as u64, Bytes::from(bytes)));
    }
}

/// Records that an allocation was returned to its pool; see `gpumem.h`.
///
/// # Safety
/// `pool` must be null or come from [`gpumem_pool_register`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpumem_pool_freed(pool: *const Pool, address: *const c_void) {
    // SAFETY: this function's contract requires that `pool` is null or a registered pool, and pools are never freed.
    if let Some(pool) = unsafe { pool.as_ref() } {
        _ = catch_unwind(|| pool.freed(address.addr() as u64));
    }
}

/// Sets how much memory a pool holds from the driver; see `gpumem.h`.
///
/// # Safety
/// `pool` must be null or come from [`gpumem_pool_register`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpumem_pool_set_reserved(pool: *const Pool, bytes: usize) {
    // SAFETY: this function's contract requires that `pool` is null or a registered pool, and pools are never freed.
    if let Some(pool) = unsafe { pool.as_ref() } {
        _ = catch_unwind(|| pool.set_reserved(Bytes::from(bytes)));
    }
}

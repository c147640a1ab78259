//! Passes pools from the gpumem of the program to the library that records the process under `gpumem run`.
//!
//! The two are separate copies of gpumem, and may have different versions. They share only one table of C functions.

use std::{ffi::c_void, ptr::NonNull};

/// The version of [`PoolFunctions`]: a change of the table, or of what its functions mean, is a new version.
pub const VERSION: u32 = 1;

/// The functions of the library for a pool of the program. They do not unwind, and may be called by any thread.
#[repr(C)]
pub struct PoolFunctions {
    /// A pool begins. The name is UTF-8, and is copied. The result is null if the pool is not recorded.
    pub register: unsafe extern "C" fn(name: *const u8, length: usize, device: u32) -> *mut c_void,
    /// The pool has given out a part: the address and the size.
    pub allocated: unsafe extern "C" fn(pool: *const c_void, address: u64, bytes: u64),
    /// A part is freed: the address.
    pub freed: unsafe extern "C" fn(pool: *const c_void, address: u64),
    /// The pool sets its memory from the driver.
    pub set_reserved: unsafe extern "C" fn(pool: *const c_void, bytes: u64),
    /// The pool ends, and is not passed again.
    pub close: unsafe extern "C" fn(pool: *mut c_void),
}

/// A pool that the library of `gpumem run` records.
pub struct RecordedPool {
    functions: &'static PoolFunctions,
    pool: NonNull<c_void>,
}

// SAFETY: the functions may be called by any thread, as `PoolFunctions` says.
unsafe impl Send for RecordedPool {}
// SAFETY: as above.
unsafe impl Sync for RecordedPool {}

/// The functions of the library, if it is in this process and has this version.
#[cfg(all(feature = "cuda", target_os = "linux"))]
fn functions() -> Option<&'static PoolFunctions> {
    use libloading::os::unix::{Library, RTLD_LAZY};

    type Pools = unsafe extern "C" fn(version: u32) -> *const PoolFunctions;

    // The driver has loaded the library that this variable names.
    let path = std::env::var_os("CUDA_INJECTION64_PATH").filter(|path| !path.is_empty())?;
    // SAFETY: only a library that is loaded already is found, so none of its code runs.
    let library = unsafe { Library::open(Some(path), RTLD_LAZY | libc::RTLD_NOLOAD) }.ok()?;
    // SAFETY: a library with a function of this name is gpumem's, where it has this type in all versions.
    let pools = unsafe { library.get::<Pools>(b"gpumem_pools\0") }.ok().map(|pools| *pools);
    // The library is not unloaded while the process runs, so the table and its functions stay there.
    std::mem::forget(library);
    // SAFETY: the function may be called at any time. It returns null, or a table of this version in the memory of the library.
    unsafe { pools?(VERSION).as_ref() }
}

/// Other systems have no such library.
#[cfg(not(all(feature = "cuda", target_os = "linux")))]
fn functions() -> Option<&'static PoolFunctions> {
    None
}

impl RecordedPool {
    /// Registers a pool of a CUDA device. `None` if no library records the process.
    pub fn register(name: &str, device: u32) -> Option<Self> {
        let functions = functions()?;
        // SAFETY: the name is valid for this length during the call.
        let pool = unsafe { (functions.register)(name.as_ptr(), name.len(), device) };
        Some(Self { functions, pool: NonNull::new(pool)? })
    }

    /// The pool has given out a part.
    #[inline]
    pub fn allocated(&self, address: u64, bytes: u64) {
        // SAFETY: `register` returned the pool, and only `drop` ends it.
        unsafe { (self.functions.allocated)(self.pool.as_ptr(), address, bytes) }
    }

    /// A part is freed.
    #[inline]
    pub fn freed(&self, address: u64) {
        // SAFETY: as above.
        unsafe { (self.functions.freed)(self.pool.as_ptr(), address) }
    }

    /// The pool sets its memory from the driver.
    pub fn set_reserved(&self, bytes: u64) {
        // SAFETY: as above.
        unsafe { (self.functions.set_reserved)(self.pool.as_ptr(), bytes) }
    }
}

impl Drop for RecordedPool {
    fn drop(&mut self) {
        // SAFETY: `register` returned the pool, and nothing uses it any more.
        unsafe { (self.functions.close)(self.pool.as_ptr()) }
    }
}

//! Passes pools from the program's gpumem to the library that records the process under `gpumem run`.
//!
//! The two copies of gpumem may have different versions. They share only one table of C functions.

use std::{ffi::c_void, ptr::NonNull};

/// The version of [`PoolFunctions`]. It must be increased when the table or the meaning of its functions changes.
pub const VERSION: u32 = 1;

/// The library's functions for a pool of the program. They do not unwind, and any thread may call them.
#[repr(C)]
pub struct PoolFunctions {
    /// Registers a pool. The name is UTF-8, and is copied. Returns null if the pool is not recorded.
    pub register: unsafe extern "C" fn(name: *const u8, length: usize, device: u32) -> *mut c_void,
    /// Records that the pool has handed out a part with this address and size.
    pub allocated: unsafe extern "C" fn(pool: *const c_void, address: u64, bytes: u64),
    /// Records that the part at this address is freed.
    pub freed: unsafe extern "C" fn(pool: *const c_void, address: u64),
    /// Sets how much memory the pool holds from the driver.
    pub set_reserved: unsafe extern "C" fn(pool: *const c_void, bytes: u64),
    /// Closes the pool, which must not be passed again.
    pub close: unsafe extern "C" fn(pool: *mut c_void),
}

/// A pool that the library of `gpumem run` records.
pub struct RecordedPool {
    functions: &'static PoolFunctions,
    pool: NonNull<c_void>,
}

// SAFETY: any thread may call the functions, by the contract of `PoolFunctions`.
unsafe impl Send for RecordedPool {}
// SAFETY: as above.
unsafe impl Sync for RecordedPool {}

/// Returns the functions of the library, if it is loaded into this process and has this version.
#[cfg(all(feature = "cuda", target_os = "linux"))]
fn functions() -> Option<&'static PoolFunctions> {
    use libloading::os::unix::{Library, RTLD_LAZY};

    type Pools = unsafe extern "C" fn(version: u32) -> *const PoolFunctions;

    // The driver has loaded the library that this variable names.
    let path = std::env::var_os("CUDA_INJECTION64_PATH").filter(|path| !path.is_empty())?;
    // SAFETY: only a library that is already loaded is found, so none of its code runs.
    let library = unsafe { Library::open(Some(path), RTLD_LAZY | libc::RTLD_NOLOAD) }.ok()?;
    // SAFETY: a library with a function of this name is gpumem's, where it has this type in all versions.
    let pools = unsafe { library.get::<Pools>(b"gpumem_pools\0") }.ok().map(|pools| *pools);
    // The library is not unloaded while the process runs, so the table and its functions stay valid.
    std::mem::forget(library);
    // SAFETY: the function may be called at any time. It returns null, or a table of this version in the memory of the library.
    unsafe { pools?(VERSION).as_ref() }
}

/// Returns `None`, because other systems have no such library.
#[cfg(not(all(feature = "cuda", target_os = "linux")))]
fn functions() -> Option<&'static PoolFunctions> {
    None
}

impl RecordedPool {
    /// Registers a pool of a CUDA device. Returns `None` if no library records the process.
    pub fn register(name: &str, device: u32) -> Option<Self> {
        let functions = functions()?;
        // SAFETY: the name is valid for this length during the call.
        let pool = unsafe { (functions.register)(name.as_ptr(), name.len(), device) };
        Some(Self { functions, pool: NonNull::new(pool)? })
    }

    /// Records that the pool has handed out a part.
    #[inline]
    pub fn allocated(&self, address: u64, bytes: u64) {
        // SAFETY: `register` returned the pool, and only `drop` ends it.
        unsafe { (self.functions.allocated)(self.pool.as_ptr(), address, bytes) }
    }

    /// Records that a part is freed.
    #[inline]
    pub fn freed(&self, address: u64) {
        // SAFETY: as above.
        unsafe { (self.functions.freed)(self.pool.as_ptr(), address) }
    }

    /// Sets how much memory the pool holds from the driver.
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

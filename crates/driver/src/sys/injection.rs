//! Loads the libraries of other tools, which the driver or NVTX would have loaded instead of ours.

use std::{
    ffi::{CString, c_int, c_void},
    mem::{forget, transmute},
    path::Path,
    ptr::NonNull,
};

use libloading::Library;

/// Loads the library that `CUDA_INJECTION64_PATH` named, and calls its `InitializeInjection`, like the driver does.
///
/// # Errors
/// Returns an error if the library cannot be loaded or lacks the function, or if the function returns 0.
///
/// # Safety
/// The driver must be inside `cuInit` on this thread, where it would make the same call, and the user of the program must have named the
/// library.
pub unsafe fn initialize_injection(library: &Path) -> Result<(), String> {
    let failed = |why: String| format!("CUDA_INJECTION64_PATH named {}, which is not used: {why}", library.display());
    // SAFETY: the user named the library, by the contract of this function.
    let initialize = unsafe { function(library, "InitializeInjection") }.map_err(failed)?;
    // SAFETY: this is the type that NVIDIA documents for this name.
    let initialize = unsafe { transmute::<*mut c_void, extern "C" fn() -> c_int>(initialize.as_ptr()) };
    if initialize() == 0 { Err(failed("its initialization failed".to_owned())) } else { Ok(()) }
}

/// Returns a function of the library, which is never unloaded.
///
/// # Safety
/// It must be allowed to run the library's initializers, because the driver or NVTX would have loaded the library.
pub(super) unsafe fn function(library: &Path, name: &str) -> Result<NonNull<c_void>, String> {
    // SAFETY: the initializers may run, by the contract of this function.
    let library = unsafe { Library::new(library) }.map_err(|error| error.to_string())?;
    let symbol = CString::new(name).map_err(|error| error.to_string())?;
    // SAFETY: only its address is taken, and the library stays loaded.
    let address =
        unsafe { library.get::<*const c_void>(symbol.as_bytes_with_nul()).map(|symbol| symbol.try_as_raw_ptr()) };
    let address = address.map_err(|error| error.to_string())?.and_then(NonNull::new);
    let address = address.ok_or_else(|| format!("it has no {name}"))?;
    forget(library);
    Ok(address)
}

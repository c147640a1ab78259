//! Libraries of other tools, which the driver or NVTX would have loaded in the place of ours.

use std::{
    ffi::{CString, c_int, c_void},
    mem::{forget, transmute},
    path::Path,
    ptr::NonNull,
};

use libloading::Library;

/// Treats the library that `CUDA_INJECTION64_PATH` names as the driver does: loads it, and calls its `InitializeInjection`. It must be
/// called inside of `cuInit`, as the driver would do it.
///
/// # Errors
/// Returns an error if the library cannot be loaded or has no such function, or if the function returns 0.
pub fn initialize_injection(library: &Path) -> Result<(), String> {
    let failed = |why: String| format!("CUDA_INJECTION64_PATH named {}, which is not used: {why}", library.display());
    let initialize = function(library, "InitializeInjection").map_err(failed)?;
    // SAFETY: this is the type that NVIDIA documents for this name.
    let initialize = unsafe { transmute::<*mut c_void, extern "C" fn() -> c_int>(initialize.as_ptr()) };
    if initialize() == 0 { Err(failed("it refused".to_owned())) } else { Ok(()) }
}

/// Returns a function of the library, which is never unloaded.
pub(super) fn function(library: &Path, name: &str) -> Result<NonNull<c_void>, String> {
    // SAFETY: the initializers of the library run as if the driver or NVTX loaded it, which the user of the program asked for.
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

//! Loads tools as the driver does: `cuInit` loads the library that `CUDA_INJECTION64_PATH` names and calls its
//! `InitializeInjection`, once in a process.
//!
//! The log has a line `injection_begins=0` before and `injection_ends=…` after it, with the result of the function, or -1 if there is no
//! such function. The lines in between are the tool's calls of the driver inside `cuInit`.

use std::env;
use std::ffi::{CString, OsStr, c_int, c_void};
use std::mem;
use std::os::unix::ffi::OsStrExt;
use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};
use std::thread::{self, ThreadId};

use crate::{
    cuda::{ErrorCode, NOT_INITIALIZED},
    driver::Call,
};

/// True after the tool was loaded. This is not a `Once`, because a tool that calls `cuInit` in its `InitializeInjection` would wait for
/// itself.
static LOADED: AtomicBool = AtomicBool::new(false);
/// The thread that is loading the tool in `cuInit`.
static LOADS: Mutex<Option<ThreadId>> = Mutex::new(None);

/// Loads the tool. Returns an error if the tool has called `cuInit` in the meantime: driver 580 then fails in both calls, and the program
/// has no GPU.
pub(crate) fn load(call: &Call) -> Result<(), ErrorCode> {
    let loads = || LOADS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut is_nested = loads();
    if *is_nested == Some(thread::current().id()) {
        *is_nested = None;
        return Err(NOT_INITIALIZED);
    }
    drop(is_nested);
    let Some(path) = env::var_os("CUDA_INJECTION64_PATH").filter(|path| !path.is_empty()) else { return Ok(()) };
    if LOADED.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    call.log("injection_begins", 0);
    *loads() = Some(thread::current().id());
    let code = initialize(&path).unwrap_or(-1);
    call.log("injection_ends", code);
    loads().take().map(drop).ok_or(NOT_INITIALIZED)
}

fn initialize(path: &OsStr) -> Option<c_int> {
    let path = CString::new(path.as_bytes()).ok()?;
    // SAFETY: the function is the C library's, and the string ends with a zero. Loading runs the library's initialisers. Those of a tool
    // have no preconditions, because the real driver loads it in the same way.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    if library.is_null() {
        return None;
    }
    // SAFETY: the library is loaded, and the string ends with a zero.
    let initialize = unsafe { libc::dlsym(library, c"InitializeInjection".as_ptr()) };
    if initialize.is_null() {
        return None;
    }
    // SAFETY: the symbol with this name is a function of this type, by the driver's contract with tools. The library is never unloaded.
    Some(unsafe { mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(initialize)() })
}

//! Loads tools as the driver does: `cuInit` loads the library that `CUDA_INJECTION64_PATH` names and calls its
//! `InitializeInjection`, once in a process.
//!
//! The log has a line `injection_begins=0` before and `injection_ends=…` after it, with what the function returned, or -1 where
//! there is none. The lines between them are the tool's calls of the driver inside of `cuInit`.

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
    cuda::{NOT_INITIALIZED, Refusal},
    driver::Call,
};

/// It is not a `Once`: a tool that calls `cuInit` in its `InitializeInjection` would wait for itself.
static LOADED: AtomicBool = AtomicBool::new(false);
/// The thread whose `cuInit` loads the tool now.
static LOADS: Mutex<Option<ThreadId>> = Mutex::new(None);

/// Returns an error if the tool has called `cuInit` in between: driver 580 then fails in both calls, and the program has no GPU.
pub(crate) fn load(call: &Call) -> Result<(), Refusal> {
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
    let code = begin(&path).unwrap_or(-1);
    call.log("injection_ends", code);
    loads().take().map(drop).ok_or(NOT_INITIALIZED)
}

fn begin(path: &OsStr) -> Option<c_int> {
    let path = CString::new(path.as_bytes()).ok()?;
    // SAFETY: the function is the C library's, and the string ends. Loading runs the library's initialisers, which a tool keeps
    // free of preconditions, since the real driver loads it the same way.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    if library.is_null() {
        return None;
    }
    // SAFETY: the library is loaded, and the string ends.
    let begin = unsafe { libc::dlsym(library, c"InitializeInjection".as_ptr()) };
    if begin.is_null() {
        return None;
    }
    // SAFETY: what has this name is a function of this type: that is the driver's contract with tools. The library is never
    // unloaded.
    Some(unsafe { mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(begin)() })
}

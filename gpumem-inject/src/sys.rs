//! What the driver finds in the library, and what `gpumem attach` calls.

use std::{
    ffi::{CStr, CString, OsStr, c_char, c_int},
    io::{self, Write},
    os::unix::ffi::OsStrExt,
    panic::catch_unwind,
    path::Path,
    ptr,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use crate::{control, request::Request};

/// The library records the process, or waits for a command to do so.
///
/// A driver that comes here again while gpumem begins must not wait for it: this thread would wait for itself.
static CALLED: AtomicBool = AtomicBool::new(false);

/// The program does not depend on the file of this library any more: somebody may truncate it.
fn leave_own_file() {
    // A system may forbid it. Then the file is as any other library of the program.
    #[cfg(target_os = "linux")]
    let _ = gpumem_driver::own_file::leave();
}

/// The driver calls it inside of `cuInit`. It returns 1, as NVIDIA's examples do.
#[expect(unsafe_code, reason = "the driver finds the function by this name")]
// SAFETY: no other function of a program has this name: it belongs to the libraries that the driver loads. The driver calls it as a C
// function without arguments that returns an `int`.
#[unsafe(no_mangle)]
pub extern "C" fn InitializeInjection() -> c_int {
    if !CALLED.swap(true, Relaxed) {
        // First: no other thread runs code of this library yet.
        leave_own_file();
        // Nothing unwinds into C. The panic hook has printed the panic.
        let begun = catch_unwind(control::begin).unwrap_or_else(|_| Err("gpumem panicked".to_owned()));
        if let Err(why) = begun {
            // The program may have closed stderr.
            let _ = writeln!(io::stderr(), "gpumem: process {} is not recorded: {why}", std::process::id());
        }
    }
    1
}

/// Waits for `gpumem start` in a program that runs already: `gpumem attach` has Python load the library and call this. The texts are the
/// folder of the socket, the file of the recording, and what is recorded, as in the variables of [`crate::variable`]. Returns null, or
/// why it does not wait.
///
/// # Safety
/// Each argument is a string that ends with a zero.
#[expect(unsafe_code, reason = "Python finds the function by this name, and passes strings")]
// SAFETY: no other function of a program has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpumem_attach(
    folder: *const c_char,
    file: *const c_char,
    backtrace: *const c_char,
    keep: *const c_char,
    torch: *const c_char,
) -> *const c_char {
    // SAFETY: the caller passes strings, which are copied before this returns.
    let bytes = |text: *const c_char| unsafe { CStr::from_ptr(text) }.to_bytes().to_owned();
    let text = |text| String::from_utf8_lossy(&bytes(text)).into_owned();
    let request = Request {
        file: OsStr::from_bytes(&bytes(file)).into(),
        backtrace: text(backtrace),
        keep: text(keep),
        torch: text(torch),
        is_late: true,
    };
    let folder = bytes(folder);
    let listen = || {
        if CALLED.swap(true, Relaxed) {
            return Err("the library of gpumem is in it already".to_owned());
        }
        leave_own_file();
        control::listen(Path::new(OsStr::from_bytes(&folder)), request).inspect_err(|_| CALLED.store(false, Relaxed))
    };
    match catch_unwind(std::panic::AssertUnwindSafe(listen)).unwrap_or_else(|_| Err("gpumem panicked".to_owned())) {
        Ok(()) => ptr::null(),
        // Never released: it is called once.
        Err(why) => CString::new(why).map_or(c"it is not known why".as_ptr(), |why| why.into_raw().cast_const()),
    }
}

//! What the driver finds in the library.

use std::{
    ffi::c_int,
    io::{self, Write},
    panic::catch_unwind,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use crate::request;

/// The driver calls it inside of `cuInit`. It returns 1, as NVIDIA's examples do.
#[expect(unsafe_code, reason = "the driver finds the function by this name")]
// SAFETY: no other function of a program has this name: it belongs to the libraries that the driver loads. The driver calls it as a C
// function without arguments that returns an `int`.
#[unsafe(no_mangle)]
pub extern "C" fn InitializeInjection() -> c_int {
    // A driver that comes here again while gpumem begins must not wait for it: this thread would wait for itself.
    static CALLED: AtomicBool = AtomicBool::new(false);
    if !CALLED.swap(true, Relaxed) {
        // Nothing unwinds into C. The panic hook has printed the panic.
        let begun = catch_unwind(request::begin).unwrap_or_else(|_| Err("gpumem panicked".to_owned()));
        if let Err(why) = begun {
            // The program may have closed stderr.
            let _ = writeln!(io::stderr(), "gpumem: process {} is not recorded: {why}", std::process::id());
        }
    }
    1
}

//! The library that the command `gpumem` puts into the programs that it records. It is no library for programs: the command builds it
//! as a shared object, and NVIDIA's driver loads it, because `CUDA_INJECTION64_PATH` names it.
//!
//! The driver calls [`InitializeInjection`] when the program calls `cuInit`. From then on gpumem intercepts every allocation on all
//! threads and records it. The command says in [`variable`] what is to be recorded, and in which file.
//!
//! The program runs as without the library: nothing is printed on stdout, no panic leaves the library, and what fails is one line on
//! stderr.

#![deny(unsafe_code)]

mod request;

use std::{
    ffi::c_int,
    io::{self, Write},
    panic::catch_unwind,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

pub use request::variable;

/// The folder with the manifest of this crate, for the build script of the command.
pub const MANIFEST_DIR: &str = env!("CARGO_MANIFEST_DIR");

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

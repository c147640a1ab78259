//! Prints what any CUDA program did with GPU memory, when the program exits. The program stays as it is:
//!
//! ```console
//! $ cargo build --release -p gpumem-inject-example
//! $ CUDA_INJECTION64_PATH=$PWD/target/release/libgpumem_inject_example.so python train.py
//! ```
//!
//! The driver loads the library that `CUDA_INJECTION64_PATH` names when the program calls `cuInit`, and calls its
//! `InitializeInjection`. From then on gpumem intercepts every allocation. Programs that are started by the program get the same
//! variable, and each of them prints a summary of its own. A process that allocates no GPU memory prints nothing.
//!
//! | variable | |
//! |---|---|
//! | `GPUMEM_REPORT=json` | one JSON object on one line instead of the table; `off`: nothing |
//! | `GPUMEM_INJECT_OUT=file` | appends to this file instead of printing on stderr |
//!
//! What ends a process without its exit handlers (`os._exit`, `abort`, a signal that is not handled) ends it without a summary.
//! All else that gpumem understands works too, `GPUMEM_BACKTRACE=1` and `GPUMEM_LEAKS=1` for example.

#![deny(unsafe_code)]

mod report;

use std::{
    env,
    ffi::c_int,
    fs::File,
    io::{self, Write},
    panic::catch_unwind,
    process,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Instant,
};

use report::Report;

/// What began when the driver was initialised.
struct Begun {
    /// A child of `fork` has a copy of all this, but no GPU.
    process: u32,
    at: Instant,
    subscribed: gpumem::Result<()>,
}

static BEGUN: OnceLock<Begun> = OnceLock::new();

// SAFETY: `atexit` is in the C library that every program with NVIDIA's driver uses, with this signature. It keeps the function
// pointer, which is valid as long as this library is loaded, and the C library runs the handlers of a library that is unloaded
// before that. So any function that does not unwind may be passed to it.
#[expect(unsafe_code, reason = "std has nothing for the end of the process")]
unsafe extern "C" {
    safe fn atexit(callback: extern "C" fn()) -> c_int;
}

/// The driver calls it inside of `cuInit`. It returns 1, as NVIDIA's examples do.
///
/// The handler is registered after gpumem's own: handlers run in reverse order, so the summary is made while gpumem still
/// listens.
#[expect(unsafe_code, reason = "the driver finds the function by this name")]
#[unsafe(no_mangle)]
pub extern "C" fn InitializeInjection() -> c_int {
    // A driver that comes here again while gpumem begins must not wait for it: this thread would wait for itself.
    static CALLED: AtomicBool = AtomicBool::new(false);
    if CALLED.swap(true, Relaxed) {
        return 1;
    }
    // Nothing unwinds into C.
    let _ = catch_unwind(|| {
        // The program's own output on stdout stays as it is.
        if format() != "off" {
            gpumem::sink::set_sink(gpumem::sink::Sink::Stderr);
        }
        let begun = Begun { process: process::id(), at: Instant::now(), subscribed: gpumem::intercept::subscribe() };
        if BEGUN.set(begun).is_ok() {
            // Where it is refused (no memory), there is no summary.
            atexit(at_exit);
        }
    });
    1
}

extern "C" fn at_exit() {
    // The panic hook has spoken; the program exits with its own status.
    let _ = catch_unwind(|| {
        let Some(begun) = BEGUN.get().filter(|begun| begun.process == process::id()) else { return };
        let format = format();
        if format == "off" {
            return;
        }
        let Some(report) = Report::of(&begun.subscribed, begun.at.elapsed()) else { return };
        let text = if format == "json" { format!("{}\n", report.json()) } else { report.to_string() };
        // A write that fails cannot be reported anywhere.
        let _ = write(&text);
    });
}

/// What the summary is written as.
fn format() -> String {
    env::var("GPUMEM_REPORT").unwrap_or_default().trim().to_ascii_lowercase()
}

/// Written with one call, so that the lines of several processes that write to the same file do not mix.
fn write(text: &str) -> io::Result<()> {
    match env::var_os("GPUMEM_INJECT_OUT").filter(|path| !path.is_empty()) {
        Some(path) => File::options().append(true).create(true).open(path)?.write_all(text.as_bytes()),
        None => io::stderr().write_all(text.as_bytes()),
    }
}

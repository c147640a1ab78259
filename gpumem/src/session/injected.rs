//! The session of a program that does not know gpumem: the driver loads a library with gpumem into it, and that library begins the
//! recording.

use std::{fs, os::fd::OwnedFd, path::Path};

use super::{
    capture::Keep,
    of_process,
    output::oom,
    recording::{subscribe, unsubscribe},
};
#[cfg(feature = "backtrace")]
use crate::source;
use crate::{
    settings::{self, Settings},
    sys::{descriptor, process},
};

/// What is recorded of a program that does not know gpumem.
#[derive(Clone, Copy, Debug)]
pub struct Injected<'a> {
    /// The file of the recording. An existing file is replaced.
    pub recording: &'a Path,
    /// A value of the setting `GPUMEM_BACKTRACE`: the allocations whose stack is recorded. Only that of the first call has an effect.
    pub backtrace: &'a str,
    /// What is kept in the recording.
    pub keep: Keep,
    /// The process may have allocated before.
    pub is_late: bool,
}

/// Begins to record what the process allocates from now on, on all threads. Inside of `cuInit` it may be called, too.
///
/// The settings of gpumem in the environment are for the program, which may use gpumem itself: they have no effect here. Nothing is
/// printed on stdout, and on stderr only what keeps the recording from being complete.
///
/// # Errors
/// Why the process is not recorded, in words. It runs on as if nothing had been tried.
pub fn begin_injected(injected: Injected<'_>) -> Result<(), String> {
    let Injected { recording, backtrace, keep, is_late } = injected;
    let values = [("GPUMEM_REPORT", "stderr"), ("GPUMEM_SOURCE", "dispatch"), ("GPUMEM_BACKTRACE", backtrace)];
    let value = |name: &str| values.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into());
    settings::preset(Settings::read(value));
    let session = of_process();
    // The program handles a refusal, and does not wait for a report about it.
    oom::print_none(session);
    session.capture.set_injected();
    if is_late {
        session.capture.set_late();
    }
    session.try_capture(recording, keep).map_err(|why| format!("cannot record to {}: {why}", recording.display()))?;
    subscribe().map_err(|why| {
        session.end_capture();
        let _ = fs::remove_file(recording);
        why.to_string()
    })
}

/// Ends what [`begin_injected`] began: the recording is complete, and nothing is intercepted until it is called again.
pub fn end_injected() {
    // First: what the end of the interception loses is no loss of this recording.
    of_process().end_capture();
    unsubscribe();
}

/// The program does not depend on the file of the library with this code any more: somebody may truncate it. To be called once, before
/// anything else: no other thread may run code of the library.
pub fn leave_own_file() {
    // A system may forbid it. Then the file is as any other library of the program.
    #[cfg(target_os = "linux")]
    let _ = crate::sys::own_file::leave();
}

/// Runs `code` on a thread of its own, which gets no signals of the program.
///
/// # Errors
/// If no thread can be started.
pub fn run_beside_program(name: &str, code: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    process::with_signals_blocked(|| thread.spawn(code)).map(drop)
}

/// As [`run_beside_program`], on a thread that has descriptors of its own, if that is possible: `code` gets whether it is. It brings no
/// descriptor with it.
///
/// # Errors
/// If no thread can be started.
pub fn run_with_own_descriptors(name: &str, code: impl FnOnce(bool) + Send + 'static) -> std::io::Result<()> {
    run_beside_program(name, || code(descriptor::leave_table_of_program()))
}

/// The same file or socket with a number that the program hardly uses.
pub fn with_high_number(descriptor: OwnedFd) -> OwnedFd {
    descriptor::with_high_number(descriptor.into()).into()
}

/// Ends the process if all threads of the program have ended. Code that runs beside the program calls it regularly.
pub fn exit_without_program() {
    process::exit_without_program();
}

/// Runs Python code in the interpreter of this process, on its main thread, as soon as that executes Python code: `again` if this was
/// called before. All code has one namespace. It is to print nothing, and an exception that comes out of it is dropped. Returns false
/// if there is no interpreter.
#[cfg(feature = "backtrace")]
pub fn run_in_python(first: &std::ffi::CStr, again: &std::ffi::CStr) -> bool {
    source::run_in_python(first, again)
}

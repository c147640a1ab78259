//! The session of a program that does not know gpumem: the driver loads a library with gpumem into it, and that library begins the
//! recording.

use std::{fs, path::Path};

use super::{of_process, output::oom, recording::subscribe};
use crate::settings::{self, Settings};

/// What is recorded of a program that does not know gpumem.
#[derive(Clone, Copy, Debug)]
pub struct Injected<'a> {
    /// The file of the recording. An existing file is replaced.
    pub recording: &'a Path,
    /// The stacks of large blocks are recorded.
    pub stacks: bool,
}

/// Begins to record what the process allocates from now on, on all threads. Inside of `cuInit` it may be called, too.
///
/// The settings of gpumem in the environment are for the program, which may use gpumem itself: they have no effect here. Nothing is
/// printed on stdout, and on stderr only what keeps the recording from being complete.
///
/// # Errors
/// Why the process is not recorded, in words. It runs on as if nothing had been tried.
pub fn begin_injected(injected: Injected<'_>) -> Result<(), String> {
    let Injected { recording, stacks } = injected;
    let backtrace = if stacks { "auto" } else { "0" };
    let values = [("GPUMEM_REPORT", "stderr"), ("GPUMEM_SOURCE", "dispatch"), ("GPUMEM_BACKTRACE", backtrace)];
    let value = |name: &str| values.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into());
    settings::preset(Settings::read(value));
    let session = of_process();
    // The program handles a refusal, and does not wait for a report about it.
    oom::print_none(session);
    session.capture.set_injected();
    session.try_capture(recording).map_err(|why| format!("cannot record to {}: {why}", recording.display()))?;
    subscribe().map_err(|why| {
        session.end_capture();
        let _ = fs::remove_file(recording);
        why.to_string()
    })
}

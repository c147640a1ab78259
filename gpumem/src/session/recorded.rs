//! Recordings that start and end while the process runs.

use std::{fs, io, panic::Location, path::Path};

#[cfg(all(feature = "cuda", target_os = "linux"))]
use super::ranges;
use super::{events::subscribe, of_process, output::oom, recorder::Keep};
use crate::settings::{self, Settings};

/// Starts to record the allocations of all threads of the process to this file. An existing recording is replaced.
///
/// Blocks that are already live are in the recording only if gpumem intercepted their allocation. A process has one recording at a time.
///
/// # Errors
/// Returns an error if the file cannot be written, if it exists and is not a recording, if the process is already being recorded, or if
/// allocations cannot be intercepted: without a GPU, or for a reason that [`status`](crate::status) also shows. Nothing is recorded then.
pub fn start(file: &Path, keep: Keep) -> io::Result<()> {
    of_process().recorder.set_late();
    start_at_launch(file, keep)
}

/// Like [`start`], but called before the program has allocated anything. The recording does not warn that older blocks may be missing.
///
/// # Errors
/// Returns the same errors as [`start`].
pub fn start_at_launch(file: &Path, keep: Keep) -> io::Result<()> {
    let session = of_process();
    if session.is_recorded() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "this process is recorded already"));
    }
    session.try_record(file, keep)?;
    subscribe().map_err(|why| {
        session.end_recording();
        let _ = fs::remove_file(file);
        io::Error::other(why)
    })?;
    #[cfg(all(feature = "cuda", target_os = "linux"))]
    ranges::recording_started();
    Ok(())
}

/// Ends the recording, so that the file is complete. Allocations are intercepted afterwards as well, for traces;
/// [`unsubscribe`](crate::intercept::unsubscribe) ends that.
pub fn end() {
    of_process().end_recording();
}

/// Marks this moment with a name in the recording of the process. Does nothing if the process is not recorded.
///
/// The number of names is limited as for scopes: 1,024 per source line.
#[track_caller]
pub fn mark(name: &str) {
    of_process().record_mark(name, Location::caller());
}

/// Prepares gpumem in a library that is injected into a program without gpumem. Call this before anything else in gpumem. The settings in
/// the environment are for the program, and have no effect here; `backtrace` is the value of `GPUMEM_BACKTRACE`. Nothing is printed on
/// stdout, and only reasons for incomplete recordings are printed on stderr. Neither NVML nor CUPTI is loaded.
///
/// A later call has no effect.
pub fn serve_foreign_program(backtrace: &str) {
    settings::preset(Settings::of_foreign_program(backtrace));
    let session = of_process();
    // The program handles a rejected allocation, and does not wait for a report.
    oom::print_none(session);
    session.recorder.set_injected();
}

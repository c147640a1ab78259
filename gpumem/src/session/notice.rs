//! What is said once for each process, on stderr.

use std::{
    cell::Cell,
    fmt::{self, Display},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use super::sink;
use crate::{
    error::Error,
    model::Device,
    settings::{self, Settings},
    sys::process,
};

/// What a notice is about.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Notice {
    Off,
    Sampled,
    Simulated,
    Stale,
    PoolReset,
    Lost,
    Untracked,
    Settings,
    Unwritten,
    Budget,
    UnwrittenTracker,
    NoBlocks,
    #[cfg(feature = "cudarc")]
    WrongShape,
}

/// The settings of this process. The first use says which of them cannot be used, in one notice; errors that these cause are
/// not said again.
pub(super) fn settings() -> &'static Settings {
    let settings = settings::settings();
    if let Some(problems) = settings.problems() {
        notify(Notice::Settings, &problems);
    }
    settings
}

/// Says why a trace is off, once for each reason, of the first few.
pub(super) fn notify_off(error: &Error) {
    static GIVEN: Mutex<Vec<Error>> = Mutex::new(Vec::new());
    if process::is_forked() {
        return;
    }
    if error.is_unavailable() {
        return notify(Notice::Off, &format_args!("traces are off: {error}"));
    }
    if settings().is_problem(error) {
        return;
    }
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    if given.len() < 8 && !given.contains(error) && !sink::is_off() {
        given.push(error.clone());
        drop(given);
        say(&format_args!("gpumem: a trace is off: {error}\n"));
    }
}

/// Says why figures are unknown.
pub(super) fn notify_stale(device: Device, error: &Error) {
    notify(Notice::Stale, &format_args!("reports show ? while {device} cannot be read: {error}"));
}

/// Says that figures may be wrong, if so many events or blocks were missed while they were taken.
pub(super) fn notify_missed(lost: u64, untracked: u64) {
    if lost > 0 {
        notify(Notice::Lost, &"allocations were missed while a trace was open; its figures may be wrong");
    }
    if untracked > 0 {
        let text = "blocks older than the first trace were freed, and nobody knows their size: `used` may be too high; \
                    call gpumem::subscribe() before they are allocated";
        notify(Notice::Untracked, &text);
    }
}

/// Says it on stderr, unless the same notice was given before, reports are off, or this is the child of a fork.
pub(crate) fn notify(notice: Notice, text: &dyn Display) {
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    let bit = 1 << notice as u32;
    if GIVEN.load(Relaxed) & bit != 0
        || process::is_forked()
        || sink::is_off()
        || GIVEN.fetch_or(bit, Relaxed) & bit != 0
    {
        return;
    }
    say(&format_args!("gpumem: {text}\n"));
}

/// Writes to stderr, all at once: what other processes and libraries write there does not come in between.
pub(super) fn say(text: &dyn Display) {
    eprint!("{}", Quiet::new(&text.to_string()));
}

/// Text for `print!` that does not make it panic when nobody can be written to (a closed pipe, a full disk): the error
/// stays here. `print!` and not a write to stdout, because the test harness captures that alone.
pub(super) struct Quiet<'a> {
    text: &'a dyn Display,
    failed: Cell<bool>,
}

impl<'a> Quiet<'a> {
    pub(super) fn new(text: &'a dyn Display) -> Self {
        Self { text, failed: Cell::new(false) }
    }

    pub(super) fn failed(&self) -> bool {
        self.failed.get()
    }
}

impl Display for Quiet<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failed.set(self.text.fmt(f).is_err());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};

    use super::*;

    #[test]
    fn a_writer_that_fails_is_no_error_and_is_known() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::StorageFull.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let quiet = Quiet::new(&"text");
        assert!(write!(Full, "{quiet}").is_ok());
        assert!(quiet.failed());
        assert!(write!(Vec::new(), "{quiet}").is_ok());
        assert!(!quiet.failed());
    }
}

//! Where reports go.

use std::{
    cell::Cell,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, PoisonError},
};

use crate::session::{
    Session, current,
    output::notice::{Notice, Quiet},
};
use crate::{
    export::{self, Format},
    report::{Report, Tracked},
    settings::ReportTo,
    sys::process,
};

/// Where the reports of all traces go. The environment variable `GPUMEM_REPORT` (`stdout`, `stderr`, `json` or `off`)
/// sets it from outside, [`set_sink`] from inside; stdout is the default.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum Sink {
    /// Lines on stdout, through `print!`, so that tests capture them.
    #[default]
    Stdout,
    /// Lines on stderr.
    Stderr,
    /// A JSON object a line, on stdout.
    #[cfg(feature = "json")]
    Json,
    /// Nowhere. Notices on stderr are off as well.
    Off,
    /// To a function; see [`Sink::custom`].
    Custom(Arc<dyn Fn(&Report) + Send + Sync>),
}

impl Sink {
    /// Hands each report to a function, on the thread that reports. A panic that unwinds from it is caught, since it may
    /// run in the drop of a guard. Traces in it do not report.
    ///
    /// ```
    /// use gpumem::{GpuMemTrace, Sink, set_sink};
    /// set_sink(Sink::custom(|report| log(&report.to_string())));
    /// # fn log(_: &str) {}
    /// ```
    pub fn custom(to: impl Fn(&Report) + Send + Sync + 'static) -> Self {
        Self::Custom(Arc::new(to))
    }
}

impl fmt::Debug for Sink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stdout => "Stdout",
            Self::Stderr => "Stderr",
            #[cfg(feature = "json")]
            Self::Json => "Json",
            Self::Off => "Off",
            Self::Custom(_) => "Custom",
        })
    }
}

thread_local! {
    /// This thread is in a custom sink.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Sends the reports of all traces there from now on, whatever `GPUMEM_REPORT` says. The child of a fork reports nothing.
pub fn set_sink(sink: Sink) {
    current().set_sink(sink);
}

impl Session {
    fn set_sink(&self, sink: Sink) {
        // A thread that does not exist in this copy of the process may hold the lock for ever.
        if process::is_forked() {
            return;
        }
        let replaced = self.sink.write().unwrap_or_else(PoisonError::into_inner).replace(sink);
        // Not under the lock: what a sink owns may itself report when it is dropped.
        drop(replaced);
    }

    fn sink(&self) -> Sink {
        // Cloned, not borrowed: a sink may itself set another.
        let set = self.sink.read().unwrap_or_else(PoisonError::into_inner).clone();
        set.unwrap_or(match self.settings.report {
            ReportTo::Stdout => Sink::Stdout,
            ReportTo::Stderr => Sink::Stderr,
            #[cfg(feature = "json")]
            ReportTo::Json => Sink::Json,
            ReportTo::Off => Sink::Off,
        })
    }

    /// Nothing is printed.
    pub(in crate::session) fn is_silent(&self) -> bool {
        matches!(self.sink(), Sink::Off)
    }

    /// Writes one report.
    pub(in crate::session) fn write(&self, report: &Report) {
        match self.sink() {
            Sink::Off => {}
            sink @ (Sink::Stdout | Sink::Stderr) => {
                self.print(&export::TEXT.line(report), matches!(sink, Sink::Stderr));
            }
            #[cfg(feature = "json")]
            Sink::Json => self.print(&export::JSON.line(report), false),
            Sink::Custom(to) => {
                // A trace inside a sink would report to it without end.
                if INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(true) {
                    return;
                }
                // The panic hook has printed it. A guard's drop must not make its program panic.
                let _ = catch_unwind(AssertUnwindSafe(|| to(report)));
                let _ = INSIDE.try_with(|inside| inside.set(false));
            }
        }
    }

    /// Writes what a tracker saw. A custom sink receives the reports of traces only; with one this goes to stdout.
    pub(in crate::session) fn write_tracked(&self, tracked: &Tracked) {
        match self.sink() {
            Sink::Off => {}
            sink => self.print(&self.format().tracked(tracked), matches!(sink, Sink::Stderr)),
        }
    }

    /// The format of the sink.
    pub(in crate::session) fn format(&self) -> &'static Format {
        match self.sink() {
            #[cfg(feature = "json")]
            Sink::Json => &export::JSON,
            _ => &export::TEXT,
        }
    }

    fn print(&self, text: &str, to_stderr: bool) {
        let quiet = Quiet::new(&text);
        if to_stderr {
            eprint!("{quiet}");
        } else {
            print!("{quiet}");
        }
        if quiet.failed() && !to_stderr {
            let text = "cannot write reports to stdout (a closed pipe or a full disk?); they are lost";
            self.notify(Notice::Unwritten, &text);
        }
    }
}

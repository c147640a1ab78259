//! Notices: messages that are printed once.

use std::{
    fmt::Display,
    sync::{PoisonError, atomic::Ordering::Relaxed},
};

use super::Notice;
use crate::session::Session;
use crate::{
    error::Error,
    model::{Bytes, Device, alike, bounded, quoted},
    process,
    report::Content,
    settings::Settings,
};

/// Creates a notice with this text. It is truncated, because a notice with a long path would not be read.
pub(super) fn as_notice(text: &str) -> Content {
    const MOST: usize = 2000;
    Content::Notice(bounded(text, MOST).into_owned())
}

impl Session {
    /// Returns the settings. The first use prints a notice about each value that cannot be used; errors caused by such a value are not
    /// printed again.
    pub(crate) fn settings(&self) -> &'static Settings {
        let mut problems = self.settings.problems().peekable();
        if problems.peek().is_some() && self.is_new(Notice::Settings) {
            problems.for_each(|problem| self.print(as_notice(&problem)));
        }
        self.settings
    }

    /// Prints the reason why a trace is off, once for each of the first eight reasons.
    pub(in crate::session) fn notify_off(&self, error: &Error) {
        if process::is_forked() {
            return;
        }
        if error.is_unavailable() {
            return self.notify(Notice::Off, &format_args!("{}traces are off: {error}", self.unrecorded()));
        }
        if self.settings().is_problem(error) {
            return;
        }
        let mut off = self.notices.off.lock().unwrap_or_else(PoisonError::into_inner);
        if off.len() < 8 && !off.contains(error) && !self.is_silent() {
            off.push(error.clone());
            drop(off);
            self.print(as_notice(&format!("a trace is off: {error}")));
        }
    }

    /// Prints a notice that `GPUMEM_GAUGE=off` prevents a requested recording.
    pub(in crate::session) fn notify_gauge_off(&self) {
        let unrecorded = self.unrecorded();
        if !unrecorded.is_empty() {
            self.notify(Notice::Off, &format_args!("{unrecorded}GPUMEM_GAUGE is off"));
        }
    }

    /// Returns the first words of a notice that traces are off, for a requested recording that has not started. Otherwise empty.
    fn unrecorded(&self) -> String {
        #[cfg(feature = "capture")]
        if let Some(path) = self.settings.recording().filter(|_| !self.is_started()) {
            return format!("nothing is recorded to {}: ", path.display());
        }
        #[cfg(not(feature = "capture"))]
        let _ = self;
        String::new()
    }

    /// Prints notices about names in `GPUMEM` that no trace had, about names that were merged, and if all lines were too small. Called at
    /// exit, because a trace may come late. A program without traces prints nothing: it is probably a helper of another program.
    pub(in crate::session) fn notify_unmatched(&self) {
        if let Some(largest) = self.notices.largest_too_small() {
            let largest = Bytes::new(largest);
            let text = format_args!(
                "GPUMEM: no line was printed, because all amounts are below its limits; the largest is {largest}"
            );
            self.notify(Notice::TooSmall, &text);
        }
        let names = self.callsites.names();
        let unmatched = self.settings.filter.unmatched(&names);
        if names.is_empty() || unmatched.is_empty() {
            return;
        }
        let (merged, unmatched): (Vec<_>, Vec<_>) =
            unmatched.into_iter().partition(|(name, _)| self.callsites.merges(name));
        let in_words = |(name, near): &(&str, Option<&str>)| match near {
            Some(near) => format!("{} (near: `{near}`)", quoted(name)),
            None => quoted(name),
        };
        let unmatched = unmatched.iter().map(in_words).collect::<Vec<_>>().join(", ");
        let unmatched = (!unmatched.is_empty()).then(|| format!("no trace was named {unmatched}"));
        let of_merged = |(name, _): (&str, _)| {
            let [name, like] = [name, &*alike(name)].map(quoted);
            format!("{name} has no effect: after 1,024 names of one line, names are not kept apart; use {like}")
        };
        let text = unmatched.into_iter().chain(merged.into_iter().map(of_merged)).collect::<Vec<_>>().join("; ");
        self.notify(Notice::Filter, &format_args!("GPUMEM: {text}"));
    }

    /// Prints a notice with the reason why numbers are unknown.
    pub(in crate::session) fn notify_stale(&self, device: Device, error: &Error) {
        self.notify(Notice::Stale, &format_args!("reports show ? while {device} cannot be read: {error}"));
    }

    /// Prints a notice that numbers may be wrong, if events were lost or untracked blocks were freed during the measurement.
    pub(in crate::session) fn notify_missed(&self, lost: u64, untracked: u64) {
        if lost > 0 {
            let or_wrong = if self.pools.is_empty() {
                ""
            } else {
                ", or a pool made wrong calls (its row in reports counts them),"
            };
            let text =
                format_args!("allocations were missed{or_wrong} while a trace was open; its numbers may be wrong");
            self.notify(Notice::Lost, &text);
        }
        if untracked > 0 {
            let text = "blocks older than the first trace were freed, and their size is not known: `used` may be too high; \
                        call gpumem::intercept::subscribe() before they are allocated";
            self.notify(Notice::Untracked, &text);
        }
    }

    /// Prints a notice, unless it was already printed, output is off, or this is the child of a fork.
    pub(crate) fn notify(&self, about: Notice, text: &dyn Display) {
        if self.is_new(about) {
            self.print(as_notice(&text.to_string()));
        }
    }

    /// Returns whether this notice was printed.
    pub(super) fn was_printed(&self, notice: Notice) -> bool {
        self.notices.printed.load(Relaxed) & 1 << notice as u32 != 0
    }

    /// Returns whether the notice must be printed, and marks it as printed.
    pub(super) fn is_new(&self, notice: Notice) -> bool {
        let bit = 1 << notice as u32;
        !self.was_printed(notice)
            && !process::is_forked()
            && !self.is_silent()
            && self.notices.printed.fetch_or(bit, Relaxed) & bit == 0
    }
}

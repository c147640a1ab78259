//! A refused allocation, and what is known of it at once.

use std::{thread::ThreadId, time::Duration};

use crate::{
    derive,
    error::{Error, Kind},
    report::OutOfMemory,
};

/// How long the refused thread waits for the report.
pub(super) const REFUSED_THREAD_WAIT: Duration = Duration::from_millis(50);

/// An allocation that was refused, and its thread.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    pub(super) thread: ThreadId,
    pub(super) of: derive::Refusal,
}

impl Refusal {
    /// The report with what is known at once.
    pub(super) fn report(&self) -> OutOfMemory {
        self.of.report(Err(no_answer(REFUSED_THREAD_WAIT)))
    }
}

/// The device was not read in time.
pub(super) fn no_answer(within: Duration) -> Error {
    Kind::NoAnswer { within }.into()
}

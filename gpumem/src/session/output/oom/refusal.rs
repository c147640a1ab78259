//! A refused allocation, and the facts that are known at once.

use std::{thread::ThreadId, time::Duration};

use crate::{
    derive,
    error::{Error, Kind},
    report::OutOfMemory,
};

/// The longest wait of the refused thread for the report.
pub(super) const REFUSED_THREAD_WAIT: Duration = Duration::from_millis(50);

/// An allocation that was refused, and its thread.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    pub(super) thread: ThreadId,
    pub(super) of: derive::Refusal,
}

impl Refusal {
    /// Returns the report with the facts that are known at once.
    pub(super) fn report(&self) -> OutOfMemory {
        self.of.report(Err(no_answer(REFUSED_THREAD_WAIT)))
    }
}

/// The device was not read in time.
pub(super) fn no_answer(within: Duration) -> Error {
    Kind::NoAnswer { within }.into()
}

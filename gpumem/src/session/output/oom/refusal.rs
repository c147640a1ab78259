//! A refused allocation, and what is known of it at once.

use std::{thread::ThreadId, time::Duration};

use crate::{
    error::{Error, Kind},
    model::{Bytes, Device, MemKind, StackId},
    report::OutOfMemory,
};

/// How long the refused thread waits for the report.
pub(super) const REFUSED_THREAD_WAIT: Duration = Duration::from_millis(50);

/// An allocation that was refused, and its thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refusal {
    pub(super) thread: ThreadId,
    pub(super) device: Device,
    pub(super) requested: Bytes,
    pub(super) kind: MemKind,
    pub(super) stack: StackId,
}

impl Refusal {
    /// The report with what is known at once.
    pub(super) fn out_of_memory(&self, path: Vec<String>) -> OutOfMemory {
        let Self { device, requested, kind, .. } = *self;
        OutOfMemory::new(device.ordinal, requested, kind, path, no_answer(REFUSED_THREAD_WAIT))
    }
}

/// The device was not read in time.
pub(super) fn no_answer(within: Duration) -> Error {
    Kind::NoAnswer { within }.into()
}

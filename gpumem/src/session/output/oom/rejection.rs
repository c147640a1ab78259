//! A rejected allocation, and the stages in which its report is completed.

use std::{thread::ThreadId, time::Duration};

use crate::{
    derive::{self, KeptPeak, Snapshot},
    error::{Error, Kind, Result},
    report::{DeviceReading, OutOfMemory},
};

/// The longest time that the calling thread waits for the report.
pub(super) const REJECTED_THREAD_WAIT: Duration = Duration::from_millis(50);

/// A rejected allocation, and its thread.
#[derive(Clone, Debug)]
pub(super) struct ThreadRejection {
    pub(super) thread: ThreadId,
    pub(super) of: derive::Rejection,
}

impl ThreadRejection {
    /// Returns the report with the facts that are known immediately.
    pub(super) fn report(&self) -> OutOfMemory {
        self.of.report(Err(no_answer(REJECTED_THREAD_WAIT)))
    }
}

/// Returns the error that the device was not read in time.
pub(super) fn no_answer(within: Duration) -> Error {
    Kind::NoAnswer { within }.into()
}

/// The longest wait of a report for the driver's reading of the device, which usually takes milliseconds.
pub(super) const DRIVER_WAIT: Duration = Duration::from_secs(2);

/// The known part of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// The scopes that hold the memory are known.
    Scopes,
    /// The driver's reading of the device is known as well.
    Device,
    /// The lines are known as well.
    Complete,
}

/// A report that is more complete than the previous one.
pub(super) struct OomUpdate {
    pub(super) oom: OutOfMemory,
    pub(super) stage: Stage,
}

/// The memory that was live when an allocation was rejected, and the driver's reading of the device.
pub(super) struct Observation {
    pub(super) snapshot: Snapshot,
    pub(super) peak: Option<KeptPeak<'static>>,
    pub(super) reading: Result<DeviceReading>,
}

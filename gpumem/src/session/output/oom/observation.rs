//! What was live when an allocation was refused, and the driver's reading of the device.

use std::time::Duration;

use super::refusal::{Refusal, no_answer};
use crate::{
    derive::{KeptPeak, Snapshot},
    error::Result,
    report::{DeviceReading, OutOfMemory},
    session::Session,
};

/// How long a report waits for the driver's reading of the device, which usually takes milliseconds.
pub(super) const DRIVER_WAIT: Duration = Duration::from_secs(2);

/// How much of a report is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// The scopes that hold the memory.
    Scopes,
    /// The driver's reading of the device as well.
    Device,
    /// The lines as well.
    Complete,
}

/// A report of which more is known than before.
pub(super) struct OomUpdate {
    pub(super) oom: OutOfMemory,
    pub(super) stage: Stage,
}

/// What was live when an allocation was refused, and the driver's reading of the device.
pub(super) struct Observation {
    pub(super) snapshot: Snapshot,
    pub(super) peak: Option<KeptPeak<'static>>,
    pub(super) reading: Result<DeviceReading>,
}

impl Observation {
    /// What is live now, if the driver did not answer in time.
    pub(super) fn without_driver(session: &'static Session, refusal: &Refusal) -> Self {
        let (snapshot, peak) = live_now(session, refusal);
        Self { snapshot, peak, reading: Err(no_answer(DRIVER_WAIT)) }
    }

    /// The complete report. Reads the files with debug information, unless that was done before.
    pub(super) fn resolve(self, session: &Session, refusal: &Refusal) -> OutOfMemory {
        let peak = self.peak.and_then(|peak| peak.holders(session));
        refusal.of.resolved(&self.snapshot, peak, self.reading, std::process::id(), session)
    }
}

/// What is live, and which allocations made the peak of the device.
pub(super) fn live_now(session: &'static Session, refusal: &Refusal) -> (Snapshot, Option<KeptPeak<'static>>) {
    let snapshot = Snapshot::now(&session.inbox, session, refusal.of.device);
    let peak = KeptPeak::of_device(&session.inbox, refusal.of.device, session.next_scope());
    (snapshot, peak)
}

//! The memory that was live when an allocation was refused, and the driver's reading of the device.

use std::time::Duration;

use crate::{
    derive::{KeptPeak, Snapshot},
    error::Result,
    report::{DeviceReading, OutOfMemory},
};

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

/// A report of which more is known than before.
pub(super) struct OomUpdate {
    pub(super) oom: OutOfMemory,
    pub(super) stage: Stage,
}

/// The memory that was live when an allocation was refused, and the driver's reading of the device.
pub(super) struct Observation {
    pub(super) snapshot: Snapshot,
    pub(super) peak: Option<KeptPeak<'static>>,
    pub(super) reading: Result<DeviceReading>,
}

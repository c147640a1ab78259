//! A rejected allocation.

use super::{Names, Snapshot};
use crate::{
    error::Result,
    model::{Bytes, Device, MemKind, StackId},
    report::{Breakdown, DeviceReading, OutOfMemory, PeakHolders},
};

/// A rejected allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// The device on which memory ran out.
    pub device: Device,
    /// The size that was requested.
    pub requested: Bytes,
    /// The kind of memory that was requested.
    pub kind: MemKind,
    /// The stack of the call. It is resolved when the report is made.
    pub stack: StackId,
    /// The scopes that the thread was in.
    pub path: Vec<String>,
}

impl Rejection {
    /// Returns a report with the facts that are known immediately; `breakdown` is the reason why there are no others.
    pub fn report(&self, breakdown: Result<Breakdown>) -> OutOfMemory {
        OutOfMemory {
            device: self.device.ordinal,
            requested: self.requested,
            kind: self.kind,
            path: self.path.clone(),
            line: None,
            breakdown,
            scopes: Vec::new(),
            places: Vec::new(),
            peak: None,
        }
    }

    /// Returns the complete report, with the memory that was live and the driver's reading. May read files.
    pub fn resolved(
        &self,
        snapshot: &Snapshot,
        peak: Option<PeakHolders>,
        reading: Result<DeviceReading>,
        own_pid: u32,
        names: &dyn Names,
    ) -> OutOfMemory {
        let groups = snapshot.groups(|stack| names.stack(stack));
        let breakdown = reading.map(|reading| Breakdown::of(&reading, own_pid, &groups));
        let line = names.stack(self.stack).line;
        OutOfMemory { line, peak, ..self.report(breakdown) }.with_holders(&groups)
    }
}

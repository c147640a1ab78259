//! An allocation that was refused.

use super::{Names, Snapshot};
use crate::{
    error::Result,
    model::{Bytes, Device, MemKind, StackId},
    report::{Breakdown, DeviceReading, OutOfMemory, PeakHolders},
};

/// The refused allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
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

impl Refusal {
    /// Returns the facts that are known at once; `breakdown` is the reason why no more is known.
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

    /// Returns the whole report: the memory that was live then, and the reading of the driver. It may read files.
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

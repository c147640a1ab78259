//! What the fold is told, in order. A live run and a replayed one differ in nothing but where these come from.

use std::time::Duration;

use super::{Bytes, Device, Gauge, GpuMemory};

/// Time since the session began.
pub(crate) type Time = Duration;

/// One span of program time that is open. Never given out twice in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ScopeId(pub(crate) u64);

/// What sort of memory a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemKind {
    /// `cuMemAlloc`
    Device,
    /// Stream-ordered: `cuMemAllocAsync`
    Pool,
}

/// One live allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) device: Device,
    pub(crate) address: u64,
    pub(crate) bytes: Bytes,
    pub(crate) kind: MemKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventKind {
    /// Memory was given out; posted when the call has succeeded.
    Alloc(Block),
    /// Memory is given back; posted before the address can be given out again. The source says the size where it
    /// knows it, for blocks that are older than the session.
    Free { device: Device, address: u64, bytes: Option<Bytes> },
    /// A device was read.
    Sample { device: Device, memory: GpuMemory },
    /// A device was to be read and could not be.
    Unread { device: Device },
    /// A scope begins; `every` is the wanted time between samples, zero unless the gauge is sampled.
    Open { scope: ScopeId, device: Device, gauge: Gauge, every: Duration },
    /// What has the scope come to so far?
    Read { scope: ScopeId },
    /// As `Read`, and the scope begins anew from the same moment.
    Reset { scope: ScopeId },
    /// As `Read`, and the scope is over.
    Close { scope: ScopeId },
    /// So many events could not be taken.
    Lost { count: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    /// Gap-free, in the order of the door.
    pub(crate) number: u64,
    pub(crate) time: Time,
    pub(crate) kind: EventKind,
}

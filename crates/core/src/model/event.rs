//! Events. A live run and a replayed run differ only in where the events come from.

use std::time::Duration;

use super::{
    Block, Bytes, CallsiteId, Device, DriverGauge, Gauge, GpuMemory, Key, MemKind, PoolId, Source, StackId, ThreadName,
    Threads,
};

/// Time since the session started.
pub type Time = Duration;

/// The id of an open scope, or of a kept peak. Never reused in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScopeId(pub u64);

/// The id of a thread that has recorded an event, starting at 1. Ids of ended threads are reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ThreadId(pub u32);

/// An owner thread: the thread that allocates a block, and the thread in whose scope it does. Unlike a [`ThreadId`] it is
/// never reused, because blocks outlive the threads that allocated them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct OwnerThread(pub u32);

impl OwnerThread {
    /// The last owner thread. All later threads share it.
    pub const LAST: Self = Self(u32::MAX);
}

/// The kinds of events.
#[allow(missing_docs, reason = "the fields of the variants have the names of their types")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// Memory was allocated. This is recorded after the call has succeeded. The context of a part of a pool is the id of the
    /// pool.
    Alloc { key: Key, block: Block },
    /// Memory is being freed. This is recorded before the call, because its address may be reused afterwards. `block` is
    /// set if the source knows the block; the ledger uses it for a block that is older than the session. If the answer is that the ledger does not
    /// know the block, one of the next three events follows.
    Free { key: Key, block: Option<Block> },
    /// The last free of this thread was of an unknown block, and a late lookup has found the block.
    LateLookup { block: Block },
    /// The last free of this thread was of an unknown block, whose size is not known either.
    Untracked,
    /// The last free of this thread failed: its block is still live and belongs to the same owner.
    FreeFailed,
    /// A block has this size now: a piece of it was freed, or a part of a pool was resized.
    Shrink { key: Key, bytes: Bytes },
    /// A context was destroyed, with all its blocks.
    ContextDestroyed { context: u8 },
    /// A pool is registered on a device. From this event on, the device has two views: see `ledger/pools.rs`.
    PoolRegistered { pool: PoolId, device: Device },
    /// A pool holds this number of bytes from the driver, in use or not.
    PoolReserved { pool: PoolId, bytes: Bytes },
    /// All parts of a pool are freed at once.
    PoolEmptied { pool: PoolId },
    /// The program queries results: blocks that no pool has taken so far now belong to the program.
    PoolsQueried,
    /// The memory of a device was read.
    Sample { device: Device, memory: GpuMemory },
    /// A reading of a device for this gauge failed.
    ReadFailed { device: Device, gauge: Gauge },
    /// This thread opens a scope inside the scope that it is in, and enters it.
    Open { scope: ScopeId, spec: ScopeSpec },
    /// This thread enters an open scope.
    Enter { scope: ScopeId },
    /// This thread leaves a scope that it entered.
    Leave { scope: ScopeId },
    /// Queries the trace of a scope.
    Read { scope: ScopeId },
    /// Queries the trace of a scope and restarts the scope from 0.
    Reset { scope: ScopeId },
    /// Like `Reset`, but the recorded allocations are still those of the peak since the start, and
    /// [`Trace::allocated_on`](super::Trace::allocated_on) still counts from the start. This event comes between two statements
    /// of a function.
    ResetKeepingPeak { scope: ScopeId },
    /// Queries the trace of a scope and closes the scope.
    Close { scope: ScopeId },
    /// Resets the peaks of the device's allocator statistics. The peaks of scopes do not change.
    ResetPeaks { device: Device },
    /// Restarts the summary by scope: calls, allocations and peaks, and the record of each device. The bytes in use stay.
    ResetSummary,
    /// From this event on, the memory that the driver takes on this device is measured in this way.
    DriverMeasured { device: Device, by: DriverGauge },
    /// `count` events could not be recorded.
    Lost { count: u64 },
    /// Other tools have replaced `now` functions of the driver, `more` of them since the last such event. The calls of these
    /// functions are missed.
    Displaced { now: u64, more: u64 },
    /// The driver rejected an allocation because there was not enough memory. This is posted only while a recording is made. The
    /// device is not known for some pools, and for memory of the host.
    Rejected { device: Option<Device>, bytes: Bytes, kind: MemKind, stack: StackId },
    /// In a dry run, blocks up to this size are real. This is posted once.
    RealBlocks { largest: Bytes },
    /// In a dry run, the program has copied a value to the host that was not computed.
    UnknownValue { bytes: Bytes, stack: StackId },
    /// The program marked this moment. The callsite has the name of the mark. This is posted only while a recording is
    /// made.
    Mark { callsite: CallsiteId },
    /// From this event on, this open scope adopts these threads: their allocations in no scope count for the innermost scope of
    /// the thread that opened it.
    Adopt { scope: ScopeId, threads: Threads },
    /// This thread has this name. The name is recorded if it decides which scope adopts the next allocation.
    Named { name: ThreadName },
}

impl EventKind {
    /// Returns whether the event registers a pool, reports its memory or empties it. Such an event does not give a block to the
    /// program.
    pub(crate) fn is_of_pool(&self) -> bool {
        matches!(self, Self::PoolRegistered { .. } | Self::PoolReserved { .. } | Self::PoolEmptied { .. })
    }

    /// Returns whether the event reads the memory in use, or may free blocks of other threads. Such an event needs the owner of
    /// each block.
    pub(crate) fn concerns_all_blocks(&self) -> bool {
        matches!(
            self,
            Self::Open { .. }
                | Self::Read { .. }
                | Self::Reset { .. }
                | Self::ResetKeepingPeak { .. }
                | Self::Close { .. }
                | Self::ResetPeaks { .. }
                | Self::ResetSummary
                | Self::PoolsQueried
                | Self::Shrink { .. }
                | Self::LateLookup { .. }
                | Self::FreeFailed
                | Self::Lost { .. }
                | Self::Displaced { .. }
        )
    }

    /// Returns the stack of the allocated block, of the block that the source knows, or of the rejected allocation or the unknown value.
    pub const fn stack(&self) -> Option<StackId> {
        match self {
            Self::Alloc { block, .. } | Self::Free { block: Some(block), .. } | Self::LateLookup { block } => {
                Some(block.stack)
            }
            Self::Rejected { stack, .. } | Self::UnknownValue { stack, .. } => Some(*stack),
            _ => None,
        }
    }

    /// Returns whether the clock is read for such an event. Other events get the time of the last event for which the clock was
    /// read.
    pub const fn needs_time(&self) -> bool {
        match self {
            Self::Alloc { block, .. } => block.kind.needs_time(),
            Self::Free { .. }
            | Self::FreeFailed
            | Self::LateLookup { .. }
            | Self::Untracked
            | Self::Enter { .. }
            | Self::Leave { .. }
            | Self::PoolReserved { .. }
            | Self::PoolsQueried
            | Self::Read { .. }
            | Self::Named { .. } => false,
            _ => true,
        }
    }
}

/// The settings of a scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScopeSpec {
    /// The device.
    pub device: Device,
    /// The gauge that measures the scope.
    pub gauge: Gauge,
    /// The requested time between samples; zero unless the gauge is sampled.
    pub every: Duration,
    /// The threads whose allocations the scope counts.
    pub counts: Counted,
    /// The place where the scope is opened.
    pub callsite: CallsiteId,
    /// The source of the numbers.
    pub source: Source,
    /// True to record which allocations make the scope's peak.
    pub at_peak: bool,
}

/// The threads whose allocations a scope counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// All threads of the process.
    AllThreads,
    /// The thread that opens the scope, threads that are in its scopes, and threads that are in no scope.
    OwnAndUnscoped,
    /// The thread that opens the scope, and threads that are in its scopes.
    Own,
    /// A task: the threads that are in the scope, while they are in it. The thread that opens the scope does not enter it.
    Task,
}

impl ScopeSpec {
    /// Returns the settings of a scope that counts its own thread and threads in no scope exactly on this device, intercepted in
    /// the driver's dispatch table. The scope has no callsite and does not record which allocations make its peak.
    pub const fn exact(device: Device) -> Self {
        Self {
            device,
            gauge: Gauge::Exact,
            every: Duration::ZERO,
            counts: Counted::OwnAndUnscoped,
            callsite: CallsiteId::NONE,
            source: Source::Dispatch,
            at_peak: false,
        }
    }
}

/// The result of applying an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The event is applied.
    Applied,
    /// The event is a free of a block that the ledger does not know.
    Untracked,
}

/// An event that was recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event<'a> {
    /// The number of the event. Numbers have no gaps.
    pub number: u64,
    /// The time at which the event was recorded.
    pub time: Time,
    /// The thread that recorded the event.
    pub thread: ThreadId,
    /// The kind of the event. This is a reference because a copy costs more than applying an allocation.
    pub kind: &'a EventKind,
}

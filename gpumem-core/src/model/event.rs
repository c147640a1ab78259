//! Events. A live run and a replayed run differ only in where the events come from.

use std::{fmt, time::Duration};

use super::{Bytes, CallsiteId, Device, Family, Gauge, GpuMemory, PoolUsage, Source, StackId};

/// Time since the session began.
pub type Time = Duration;

/// The number of an open scope, or of a kept peak. It is never reused in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScopeId(pub u64);

/// The number of a thread that has recorded an event, from 1 on. The number of a thread that has ended is given to another
/// thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ThreadId(pub u32);

/// An owner thread: the thread that allocates a block, and the thread in whose scope it does. Unlike a [`ThreadId`] it is
/// never reused, because blocks outlive the threads that allocated them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct OwnerThread(pub u32);

impl OwnerThread {
    /// The last one. All later threads share it.
    pub const LAST: Self = Self(u32::MAX);
}

/// What sort of memory a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum MemKind {
    /// Memory of the device: `cuMemAlloc`, arrays.
    Device,
    /// Stream-ordered: `cuMemAllocAsync`.
    Pool,
    /// Virtual, and wherever it was touched last: `cuMemAllocManaged`.
    Managed,
    /// On the host, locked for the device: `cuMemAllocHost`, `cuMemHostRegister`.
    PinnedHost,
    /// Physical memory behind a handle: `cuMemCreate`.
    Vmm,
    /// What the driver maps for the memory nodes of graphs: `cuGraphLaunch`.
    Graph,
}

impl MemKind {
    #[doc(hidden)]
    pub const ALL: [Self; 6] = [Self::Device, Self::Pool, Self::Managed, Self::PinnedHost, Self::Vmm, Self::Graph];

    /// The name in reports and in JSON, such as `pinned host`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Pool => "pool",
            Self::Managed => "managed",
            Self::PinnedHost => "pinned host",
            Self::Vmm => "vmm",
            Self::Graph => "graph",
        }
    }

    /// It is in the device's memory for certain, and so counted by traces: managed memory is where it was touched last, and pinned
    /// memory is on the host.
    pub const fn is_on_device(self) -> bool {
        matches!(self, Self::Device | Self::Pool | Self::Vmm | Self::Graph)
    }
}

/// The [name](Self::name).
impl fmt::Display for MemKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Identifies a live block in its process. The key may be reused after the block is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(u64);

/// The kinds of numbers that identify blocks. Addresses are unique in a process, over all devices and the host, but a handle
/// may be the same number as an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// An address of memory.
    Address,
    /// The handle of physical memory.
    Handle,
    /// The handle of an array.
    Array,
    /// The address of host memory that was registered.
    Registered,
    /// A number of ours: the driver reports only how much memory graphs have.
    Graph,
}

impl Key {
    /// The key of no block.
    pub const NONE: Self = Self(u64::MAX);

    /// The key as a number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The key of a number that [`get`](Self::get) returned.
    pub const fn from_raw(key: u64) -> Self {
        Self(key)
    }

    /// User space ends at 2^57, so the bits above are free for the kind of the number.
    pub const fn new(space: Space, name: u64) -> Self {
        Self(name ^ ((space as u64) << 58))
    }
}

/// One allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The device that it is on.
    pub device: Device,
    /// Its size.
    pub bytes: Bytes,
    /// Its kind of memory.
    pub kind: MemKind,
    /// The context whose end frees it, as the source numbers contexts; 0 if there is none.
    pub context: u8,
    /// The stack of the call that allocated it.
    pub stack: StackId,
}

/// What a block has besides its size, in one word: it is passed in a register and compared in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tag(u64);

impl Tag {
    /// As a number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The tag that [`get`](Self::get) gave this number for.
    pub const fn from_raw(tag: u64) -> Self {
        Self(tag)
    }

    /// The tag of no block.
    pub const NONE: Self = Self(u64::MAX);

    /// The tag of a block.
    #[inline]
    pub const fn new(device: Device, kind: MemKind, context: u8, stack: StackId) -> Self {
        let device = (device.ordinal as u64) << 48 | (device.family as u64) << 16;
        Self(device | (stack.0 as u64) << 20 | (context as u64) << 8 | kind as u64)
    }

    /// The device.
    pub fn device(self) -> Device {
        let family = if self.0 & 1 << 16 == 0 { Family::Cuda } else { Family::Simulated };
        Device { family, ordinal: (self.0 >> 48) as u32 }
    }

    /// The kind of memory.
    #[inline]
    pub const fn kind(self) -> MemKind {
        MemKind::ALL[(self.0 & 0xff) as usize]
    }

    /// The context; see [`Block::context`].
    #[expect(clippy::cast_possible_truncation, reason = "only the bits of this part are kept")]
    pub const fn context(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// The stack of the call.
    #[expect(clippy::cast_possible_truncation, reason = "only the bits of this part are kept")]
    pub const fn stack(self) -> StackId {
        StackId((self.0 >> 20) as u32 & Self::MOST_STACKS)
    }

    /// A stack has 28 bits; there are fewer different stacks.
    const MOST_STACKS: u32 = (1 << 28) - 1;
}

impl Block {
    /// A block with this size and tag.
    pub fn from_tag(bytes: Bytes, tag: Tag) -> Self {
        Self { device: tag.device(), bytes, kind: tag.kind(), context: tag.context(), stack: tag.stack() }
    }

    /// Its tag.
    #[inline]
    pub const fn tag(&self) -> Tag {
        Tag::new(self.device, self.kind, self.context, self.stack)
    }

    /// A block without a context and without a stack.
    pub const fn new(device: Device, bytes: Bytes, kind: MemKind) -> Self {
        Self { device, bytes, kind, context: 0, stack: StackId::NONE }
    }
}

/// What happened.
#[allow(missing_docs, reason = "the fields of the variants have the names of their types")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// Memory was allocated. Recorded after the call has succeeded.
    Alloc { key: Key, block: Block },
    /// Memory is being freed. Recorded before the call, because its address may be reused afterwards. `block` is set if the
    /// source knows the block, for blocks that are older than the session. The answer says whether the ledger knows the
    /// block; if it does not, one of the next three events follows.
    Free { key: Key, block: Option<Block> },
    /// The newest free of this thread was of an unknown block, and a late lookup has found it.
    LateLookup { block: Block },
    /// The newest free of this thread was of an unknown block, whose size is not known either.
    Untracked,
    /// The newest free of this thread failed: its block is still live and belongs to the same owner.
    FreeFailed,
    /// A part of a block was freed, so that it has this size now.
    Shrink { key: Key, bytes: Bytes },
    /// A context was destroyed, with all its blocks.
    ContextDestroyed { context: u8 },
    /// The memory of a device was read.
    Sample { device: Device, memory: GpuMemory },
    /// The usage of a device's pool was read.
    PoolUsage { device: Device, usage: PoolUsage },
    /// A reading of a device for this gauge failed.
    ReadFailed { device: Device, gauge: Gauge },
    /// This thread opens a scope inside the scope that it is in, and enters it.
    Open { scope: ScopeId, spec: ScopeSpec },
    /// This thread enters an open scope.
    Enter { scope: ScopeId },
    /// This thread leaves a scope that it entered.
    Leave { scope: ScopeId },
    /// Queries the figures of a scope.
    Read { scope: ScopeId },
    /// Queries the figures of a scope, which then starts again from 0.
    Reset { scope: ScopeId },
    /// Like `Reset`, but the peak of which the allocations are recorded is still that since the start.
    ResetKeepingPeak { scope: ScopeId },
    /// Queries the figures of a scope and closes it.
    Close { scope: ScopeId },
    /// Resets the peaks of the device's allocator statistics. The peaks of scopes do not change.
    ResetPeaks { device: Device },
    /// `count` events could not be recorded.
    Lost { count: u64 },
    /// Other tools have replaced `now` functions of the driver, `more` of them since the last such event. The calls of these
    /// functions are missed.
    Displaced { now: u64, more: u64 },
    /// Another library reset the high-water mark of a device's pool, or gave the device another pool.
    PoolMarkDisturbed { device: Device },
}

impl MemKind {
    /// The clock is read for each allocation of this kind. Allocations from a pool are cheaper than a reading of the clock;
    /// the others cost more.
    #[inline]
    pub const fn needs_time(self) -> bool {
        !matches!(self, Self::Pool)
    }
}

impl EventKind {
    /// The clock is read for each such event. Other events have the time of the newest event before them that the clock was
    /// read for.
    pub const fn needs_time(&self) -> bool {
        match self {
            Self::Alloc { block, .. } => block.kind.needs_time(),
            Self::Free { .. }
            | Self::FreeFailed
            | Self::LateLookup { .. }
            | Self::Untracked
            | Self::Enter { .. }
            | Self::Leave { .. } => false,
            _ => true,
        }
    }
}

/// What a scope counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScopeSpec {
    /// The device.
    pub device: Device,
    /// What measures it.
    pub gauge: Gauge,
    /// The requested time between samples; zero unless the gauge is sampled.
    pub every: Duration,
    /// The only thread that it counts. `None`: the whole process.
    pub thread: Option<ThreadId>,
    /// Where it is opened.
    pub callsite: CallsiteId,
    /// Where the figures come from.
    pub source: Source,
    /// Whether to record which allocations make its peak.
    pub at_peak: bool,
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
    /// Its number. Numbers have no gaps.
    pub number: u64,
    /// When it was recorded.
    pub time: Time,
    /// The thread that recorded it.
    pub thread: ThreadId,
    /// What happened. A reference, because a copy costs more than applying an allocation.
    pub kind: &'a EventKind,
}

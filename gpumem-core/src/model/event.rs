//! What the fold is told, in order. A live run and a replayed one differ in nothing but where these come from.

use std::time::Duration;

use super::{Bytes, CallsiteId, Device, Family, Gauge, GpuMemory, PoolUsage, Source, StackId};

/// Time since the session began.
pub type Time = Duration;

/// One span of program time that is open. Never given out twice in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScopeId(pub u64);

/// A thread of the process that has posted something, numbered from 1. The number of a thread that has ended is given to
/// another one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ThreadId(pub u32);

/// The thread that allocates something, and on whose behalf it does. Other than a [`ThreadId`], it is never given to another thread, since
/// blocks outlive the threads that allocated them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct OwnerThread(pub u32);

impl OwnerThread {
    /// What follows it is this one as well.
    pub const LAST: Self = Self(u32::MAX);
}

/// What sort of memory a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    pub const ALL: [Self; 6] = [Self::Device, Self::Pool, Self::Managed, Self::PinnedHost, Self::Vmm, Self::Graph];

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

    /// It is in the device's memory for certain, and so counted by traces.
    pub const fn is_on_device(self) -> bool {
        matches!(self, Self::Device | Self::Pool | Self::Vmm | Self::Graph)
    }
}

/// What a block is known by while it lives: unique among the live blocks of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(u64);

/// The sorts of names that blocks have. Addresses are unique in a process across devices and host, but a handle may be
/// the same number as an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Address,
    Handle,
    Array,
    Registered,
    /// Of graphs, the driver tells only how much there is: these names are ours.
    Graph,
}

impl Key {
    /// No block's.
    pub const NONE: Self = Self(u64::MAX);

    pub const fn get(self) -> u64 {
        self.0
    }

    /// The key that [`get`](Self::get) gave this number for.
    pub const fn from_raw(key: u64) -> Self {
        Self(key)
    }

    /// User space ends at 2^57, so the bits above tell the spaces apart.
    pub const fn new(space: Space, name: u64) -> Self {
        Self(name ^ ((space as u64) << 58))
    }
}

/// One allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub device: Device,
    pub bytes: Bytes,
    pub kind: MemKind,
    /// The context that it goes with, as its source numbers them; 0 if with none.
    pub context: u8,
    /// Where it was asked for.
    pub stack: StackId,
}

/// What the blocks of one call have in common besides their size, in one word: it is passed in a register and compared at
/// once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tag(u64);

impl Tag {
    /// The tag of no block.
    pub const NONE: Self = Self(u64::MAX);

    #[inline]
    pub const fn new(device: Device, kind: MemKind, context: u8, stack: StackId) -> Self {
        let device = (device.ordinal as u64) << 48 | (device.family as u64) << 16;
        Self(device | (stack.0 as u64) << 20 | (context as u64) << 8 | kind as u64)
    }

    pub fn device(self) -> Device {
        let family = if self.0 & 1 << 16 == 0 { Family::Cuda } else { Family::Simulated };
        Device { family, ordinal: (self.0 >> 48) as u32 }
    }

    #[inline]
    pub const fn kind(self) -> MemKind {
        MemKind::ALL[(self.0 & 0xff) as usize]
    }

    #[expect(clippy::cast_possible_truncation, reason = "the parts are taken out as they were put in")]
    pub const fn context(self) -> u8 {
        (self.0 >> 8) as u8
    }

    #[expect(clippy::cast_possible_truncation, reason = "the parts are taken out as they were put in")]
    pub const fn stack(self) -> StackId {
        StackId((self.0 >> 20) as u32 & Self::MOST_STACKS)
    }

    /// Stacks have 28 bits, more than are told apart.
    const MOST_STACKS: u32 = (1 << 28) - 1;
}

impl Block {
    /// The block of so many bytes that has this tag.
    pub fn from_tag(bytes: Bytes, tag: Tag) -> Self {
        Self { device: tag.device(), bytes, kind: tag.kind(), context: tag.context(), stack: tag.stack() }
    }

    #[inline]
    pub const fn tag(&self) -> Tag {
        Tag::new(self.device, self.kind, self.context, self.stack)
    }

    /// One that goes with no context, and of which nobody knows where it was asked for.
    pub const fn new(device: Device, bytes: Bytes, kind: MemKind) -> Self {
        Self { device, bytes, kind, context: 0, stack: StackId::NONE }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// Memory was given out; posted when the call has succeeded.
    Alloc { key: Key, block: Block },
    /// Memory is given back; posted before its name can be given out again. The source says what the block is where it
    /// knows, for blocks that are older than the session. The answer is whether the block is known; if it is not, one of the next
    /// three follows.
    Free { key: Key, block: Option<Block> },
    /// The block of this thread's newest free, which is not known, was looked up.
    LateLookup { block: Block },
    /// The block of this thread's newest free is not known, and nobody knows its size.
    Untracked,
    /// The newest free of this thread failed after all: its block is still there, as whoever allocated it has it.
    FreeFailed,
    /// A part of a block is given back: it has only so many bytes from now on.
    Shrink { key: Key, bytes: Bytes },
    /// A context is gone, and with it all its blocks.
    ContextDestroyed { context: u8 },
    /// A device was read.
    Sample { device: Device, memory: GpuMemory },
    /// The marks of a device's pool were read.
    PoolUsage { device: Device, usage: PoolUsage },
    /// A device was to be read, for this gauge, and could not be.
    ReadFailed { device: Device, gauge: Gauge },
    /// A scope begins, inside what this thread is in.
    Open { scope: ScopeId, spec: ScopeSpec },
    /// This thread is in the scope from now on, until it leaves it.
    Enter { scope: ScopeId },
    /// It is not any more.
    Leave { scope: ScopeId },
    /// What has the scope come to so far?
    Read { scope: ScopeId },
    /// As `Read`, and the scope begins anew from the same moment.
    Reset { scope: ScopeId },
    /// As `Reset`, but which allocations made the scope's peak is still asked since its start.
    ResetKeepingPeak { scope: ScopeId },
    /// As `Read`, and the scope is over.
    Close { scope: ScopeId },
    /// The peaks of the device's allocator statistics begin anew; no scope's do.
    ResetPeaks { device: Device },
    /// So many events could not be taken.
    Lost { count: u64 },
    /// Other tools have taken over so many of the driver's functions at this moment, so many of them since this was last said: their
    /// calls are missed.
    Displaced { now: u64, more: u64 },
    /// Somebody else reset the mark of a device's pool, or gave the device another pool.
    PoolMarkDisturbed { device: Device },
}

impl MemKind {
    /// The clock is read for an allocation: the calls that are not stream-ordered cost more than that.
    #[inline]
    pub const fn needs_time(self) -> bool {
        !matches!(self, Self::Pool)
    }
}

impl EventKind {
    /// The clock is read for it. Other events carry the time of the newest one before them that it was read for.
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

/// What a scope looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScopeSpec {
    pub device: Device,
    pub gauge: Gauge,
    /// The wanted time between samples; zero unless the gauge is sampled.
    pub every: Duration,
    /// Only what this thread allocates, instead of the whole process.
    pub thread: Option<ThreadId>,
    /// Where it is opened.
    pub callsite: CallsiteId,
    /// What its numbers come from.
    pub source: Source,
    /// It is asked which allocations make its peak.
    pub at_peak: bool,
}

/// What is said to a fact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It was taken in.
    Applied,
    /// It frees a block that is not known.
    Untracked,
}

/// A fact that has come through the door.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event<'a> {
    /// Gap-free, in the order of the door.
    pub number: u64,
    pub time: Time,
    /// The thread that posted it.
    pub thread: ThreadId,
    /// Borrowed: copying one costs more than folding an allocation.
    pub kind: &'a EventKind,
}

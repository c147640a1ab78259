//! Who is told what events do to blocks. The ledger is the only place that knows it.

use super::groups::AllocGroup;
use crate::model::{Bytes, Device, Key};

/// What an event did to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockChange {
    /// How the block came, changed or went.
    pub kind: BlockChangeKind,
    /// The key of the block.
    pub key: Key,
    /// The number of the event that allocated it. No other block has it, whereas a key may be reused.
    pub number: u64,
    /// Its size before, in bytes; 0 if it was not live.
    pub before: Bytes,
    /// Its size from now on, in bytes; 0 if it is not live any more.
    pub after: Bytes,
    /// The device.
    pub device: Device,
    /// Its allocation group.
    pub group: AllocGroup,
}

/// How a block came, changed or went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockChangeKind {
    /// It was allocated.
    Allocated,
    /// It was freed.
    Freed,
    /// A part of it was freed.
    Shrunk,
    /// Its context was destroyed, with all its blocks.
    RemovedWithContext,
    /// Its free was missed: its address was given to another block.
    FreeMissed,
    /// Its free has failed: it is live again.
    FreeFailed,
}

impl BlockChangeKind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; 6] =
        [Self::Allocated, Self::Freed, Self::Shrunk, Self::RemovedWithContext, Self::FreeMissed, Self::FreeFailed];

    /// How many blocks more are live.
    pub const fn blocks(self) -> i64 {
        match self {
            Self::Allocated | Self::FreeFailed => 1,
            Self::Freed | Self::RemovedWithContext | Self::FreeMissed => -1,
            Self::Shrunk => 0,
        }
    }

    /// The name that it has in files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allocated => "alloc",
            Self::Freed => "free",
            Self::Shrunk => "shrink",
            Self::RemovedWithContext => "free with context",
            Self::FreeMissed => "free missed",
            Self::FreeFailed => "free failed",
        }
    }
}

/// Is told of each block that an event changes, in the order in which that happens.
pub trait Observer {
    /// False if changes are not looked at: then they cost nothing.
    const OBSERVES: bool = true;

    /// A block has changed.
    fn changed(&mut self, change: BlockChange);
}

/// Nobody observes.
impl Observer for () {
    const OBSERVES: bool = false;

    fn changed(&mut self, _: BlockChange) {}
}

/// Keeps the changes.
impl Observer for Vec<BlockChange> {
    fn changed(&mut self, change: BlockChange) {
        self.push(change);
    }
}

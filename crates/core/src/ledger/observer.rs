//! Observers of the effects of events on blocks. Only the ledger knows these effects.

use super::{groups::AllocGroup, live::Entry, sums::Sums};
use crate::model::{Bytes, Device, Key};

/// The effect of an event on a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockChange {
    /// The kind of the change.
    pub kind: BlockChangeKind,
    /// The key of the block.
    pub key: Key,
    /// The number of the event that allocated the block. This number is unique, whereas a key may be reused.
    pub number: u64,
    /// The size of the block before the change, in bytes; 0 if it was not live.
    pub before: Bytes,
    /// The size of the block after the change, in bytes; 0 if it is no longer live.
    pub after: Bytes,
    /// The device.
    pub device: Device,
    /// Its allocation group.
    pub group: AllocGroup,
}

/// The kinds of changes of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockChangeKind {
    /// The block was allocated.
    Allocated,
    /// The block was freed.
    Freed,
    /// A part of the block was freed.
    Shrunk,
    /// The context of the block was destroyed, with all its blocks.
    RemovedWithContext,
    /// The free of the block was missed: its address was given to another block.
    FreeMissed,
    /// The free of the block failed, so the block is live again.
    FreeFailed,
    /// The block now belongs to a pool: the parts of the pool count instead of it.
    TakenByPool,
    /// The block belongs to no pool. It was allocated on a device with a pool, so this was not known until now.
    GivenToProgram,
}

impl BlockChangeKind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; 8] = [
        Self::Allocated,
        Self::Freed,
        Self::Shrunk,
        Self::RemovedWithContext,
        Self::FreeMissed,
        Self::FreeFailed,
        Self::TakenByPool,
        Self::GivenToProgram,
    ];

    /// Returns the number of blocks that this change adds to the program's view, if the block counts there. Returns 0 if only the
    /// size changes.
    pub const fn blocks(self) -> i64 {
        match self {
            Self::Allocated | Self::FreeFailed | Self::GivenToProgram => 1,
            Self::Freed | Self::RemovedWithContext | Self::FreeMissed | Self::TakenByPool => -1,
            Self::Shrunk => 0,
        }
    }

    /// Returns the name of this kind in files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allocated => "alloc",
            Self::Freed => "free",
            Self::Shrunk => "shrink",
            Self::RemovedWithContext => "free with context",
            Self::FreeMissed => "free missed",
            Self::FreeFailed => "free failed",
            Self::TakenByPool => "taken by pool",
            Self::GivenToProgram => "alloc beside a pool",
        }
    }
}

/// An observer of each block that an event changes, in the order of the changes. The program's view has a block if
/// [`AllocGroup::is_in_program`].
pub trait Observer {
    /// False if the observer ignores changes, so that they cost nothing.
    const OBSERVES: bool = true;

    /// Called when a block has changed.
    fn changed(&mut self, change: BlockChange);
}

/// An observer that ignores all changes.
impl Observer for () {
    const OBSERVES: bool = false;

    fn changed(&mut self, _: BlockChange) {}
}

/// An observer that keeps the changes.
impl Observer for Vec<BlockChange> {
    fn changed(&mut self, change: BlockChange) {
        self.push(change);
    }
}

impl Sums {
    /// Tells the observer what happened to a block.
    #[inline]
    pub(super) fn notify<O: Observer>(&self, kind: BlockChangeKind, key: Key, entry: &Entry, observer: &mut O) {
        if O::OBSERVES {
            let sizes = if kind.blocks() > 0 { (Bytes::ZERO, entry.bytes) } else { (entry.bytes, Bytes::ZERO) };
            self.notify_change(kind, key, entry, sizes, observer);
        }
    }

    /// Like [`notify`](Self::notify), with the sizes of the block before and after the change.
    pub(super) fn notify_change<O: Observer>(
        &self,
        kind: BlockChangeKind,
        key: Key,
        entry: &Entry,
        (before, after): (Bytes, Bytes),
        observer: &mut O,
    ) {
        if O::OBSERVES {
            let group = *self.groups.get(entry.group());
            let device = self.device_of(entry);
            observer.changed(BlockChange { kind, key, number: entry.number(), before, after, device, group });
        }
    }
}

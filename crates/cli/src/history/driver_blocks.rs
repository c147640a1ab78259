//! The blocks that the driver took by itself, and the blocks of registered pools: the memory that no list of allocations contains.

use std::collections::HashMap;

use gpumem_core::{
    ledger::{BlockChange, BlockChangeKind},
    model::{Label, MemKind},
};

use super::block_lives::When;

/// The memory that no list of allocations contains.
#[derive(Debug, Default)]
pub(crate) struct DriverMemory {
    /// The blocks that the driver took by itself, in the order in which it took them.
    pub(crate) blocks: Vec<DriverBlock>,
    /// The names of these blocks, by their index, and the bytes of local memory for each thread.
    labels: HashMap<u32, (Box<str>, Option<u64>)>,
    pub(super) changes: Vec<DriverChange>,
    /// The live blocks, by the number of the event that added them.
    live: HashMap<u64, u32>,
    /// How many of these blocks ended with their context.
    pub(super) gone_with_context: u64,
}

/// A block that the driver took by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DriverBlock {
    /// The index of its origin in the history.
    pub(crate) origin: u32,
    /// The index of its device in the history.
    pub(crate) device: u16,
    pub(crate) kind: MemKind,
}

/// A change of the memory that no list of allocations contains.
#[derive(Clone, Copy, Debug)]
pub(super) struct DriverChange {
    pub(super) when: When,
    /// The number of changes of [`History::lives`] before it.
    pub(super) after: u32,
    pub(super) what: Changed,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Changed {
    /// A block that the driver took has this size now; `None` if it has ended.
    Taken { block: u32, bytes: Option<u64> },
    /// A block of a pool that the program registered has another size now. Its parts are in the list of allocations.
    OfPool { device: u16, key: u64, kind: MemKind, before: u64, after: u64 },
}

impl DriverMemory {
    /// Notes a change of a block that the driver took by itself.
    pub(super) fn note_taken(&mut self, when: When, after: usize, change: &BlockChange, (device, origin): (u16, u32)) {
        let BlockChange { kind, number, after: bytes, group, .. } = *change;
        let block = if kind.blocks() > 0 {
            let block = index(self.blocks.len());
            self.blocks.push(DriverBlock { origin, device, kind: group.kind });
            self.live.insert(number, block);
            block
        } else {
            let Some(block) = self.live.get(&number).copied() else { return };
            block
        };
        self.gone_with_context += u64::from(kind == BlockChangeKind::RemovedWithContext);
        let is_live = kind.blocks() >= 0;
        if !is_live {
            self.live.remove(&number);
        }
        let bytes = is_live.then_some(bytes.get());
        self.changes.push(DriverChange { when, after: index(after), what: Changed::Taken { block, bytes } });
    }

    /// Notes a change of a driver's block that belongs to a registered pool.
    pub(super) fn note_of_pool(&mut self, when: When, at: usize, change: &BlockChange, device: u16, is_added: bool) {
        let BlockChange { key, before, after, group, .. } = *change;
        let (before, after) = match change.kind {
            // The size stays. The block moves from one list to the other.
            BlockChangeKind::TakenByPool | BlockChangeKind::GivenToProgram => {
                let bytes = before.max(after).get();
                if is_added { (0, bytes) } else { (bytes, 0) }
            }
            _ => (before.get(), after.get()),
        };
        let what = Changed::OfPool { device, key: key.get(), kind: group.kind, before, after };
        self.changes.push(DriverChange { when, after: index(at), what });
    }

    /// Gives a label to the block that the event with this number added. Returns whether there is such a block.
    pub(super) fn label(&mut self, number: u64, label: &Label) -> bool {
        let Some(block) = self.live.get(&number) else { return false };
        let bytes_per_thread = label.shape.first().map(|bytes| *bytes as u64);
        self.labels.insert(*block, (label.name.as_str().into(), bytes_per_thread));
        true
    }

    /// Returns the name of a block, and the bytes of local memory for each thread.
    pub(super) fn label_of(&self, block: u32) -> (Option<&str>, Option<u64>) {
        self.labels.get(&block).map_or((None, None), |(name, bytes_per_thread)| (Some(name), *bytes_per_thread))
    }
}

/// Returns a number of changes or blocks. The reader stops before there are that many.
pub(super) fn index(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

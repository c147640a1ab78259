//! Handles of physical memory, with their references and mappings.

use std::collections::{BTreeMap, HashMap};

use crate::model::Block;

/// A mapping that was removed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mapping {
    pub(super) at: u64,
    pub(super) handle: u64,
    pub(super) reference: Reference,
}

/// A removed reference to a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reference {
    /// True if there are no more references to the handle.
    pub(super) was_last: bool,
    pub(super) memory: HandleMemory,
}

impl Reference {
    /// Returns whether removing the reference frees memory of this process.
    pub(super) fn frees(&self) -> bool {
        self.was_last && self.memory != HandleMemory::Foreign
    }
}

/// The memory behind a handle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum HandleMemory {
    Block(Block),
    /// Memory that was allocated before the subscription.
    #[default]
    Older,
    /// Imported memory, or none.
    Foreign,
}

/// The handles of `cuMemCreate`. Creating or retaining a handle adds a reference, and so does each mapping. Removing the last reference
/// frees the memory.
#[derive(Debug, Default)]
pub(super) struct Handles {
    /// The number of references to each handle, and its memory.
    references: HashMap<u64, (u32, HandleMemory)>,
    /// The handle of each mapping, by its address.
    mappings: BTreeMap<u64, u64>,
}

impl Handles {
    pub(super) fn create(&mut self, handle: u64, block: Block) {
        self.references.insert(handle, (1, HandleMemory::Block(block)));
    }

    pub(super) fn retain(&mut self, handle: u64) {
        self.references.entry(handle).or_default().0 += 1;
    }

    /// Restores a reference, because the call that removed it failed.
    pub(super) fn restore(&mut self, handle: u64, reference: Reference) {
        self.references.entry(handle).or_insert((0, reference.memory)).0 += 1;
    }

    /// Adds a reference for an import. If this process imports a handle that it exported itself, it may get the same handle.
    pub(super) fn import(&mut self, handle: u64) {
        self.references.entry(handle).or_insert((0, HandleMemory::Foreign)).0 += 1;
    }

    /// Removes one reference. If the handle is older than the subscription, this counts as its last reference.
    pub(super) fn release(&mut self, handle: u64) -> Reference {
        if let Some((references @ 2.., memory)) = self.references.get_mut(&handle) {
            *references -= 1;
            return Reference { was_last: false, memory: *memory };
        }
        let memory = self.references.remove(&handle).map_or(HandleMemory::Older, |(_, memory)| memory);
        Reference { was_last: true, memory }
    }

    pub(super) fn map(&mut self, at: u64, handle: u64) {
        // Memory that is older than the subscription is not counted.
        if let Some((references, _)) = self.references.get_mut(&handle) {
            *references += 1;
            self.mappings.insert(at, handle);
        }
    }

    /// Removes all mappings in a range.
    pub(super) fn unmap(&mut self, at: u64, bytes: u64) -> Vec<Mapping> {
        let inside: Vec<_> =
            self.mappings.range(at..at.saturating_add(bytes)).map(|(at, handle)| (*at, *handle)).collect();
        let unmap = |(at, handle)| {
            self.mappings.remove(&at);
            Mapping { at, handle, reference: self.release(handle) }
        };
        inside.into_iter().map(unmap).collect()
    }

    /// Restores a mapping, because the call that removed it failed.
    pub(super) fn map_again(&mut self, at: u64, handle: u64, reference: Reference) {
        self.restore(handle, reference);
        self.mappings.insert(at, handle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Bytes, Device, Family, MemKind};

    /// The other steps are in `tests/standin/calls.rs` and `graphs.rs`.
    #[test]
    fn exported_memory_is_imported_under_the_same_handle() {
        const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };

        let mut handles = Handles::default();
        handles.create(1, Block::new(DEVICE, Bytes::mib(2), MemKind::Vmm));
        handles.import(1);
        assert_eq!([(); 2].map(|()| handles.release(1).frees()), [false, true]);
    }
}

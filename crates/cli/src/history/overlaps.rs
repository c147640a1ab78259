//! Finds parts of pools that overlap. The ledger does not compare parts, because that would make allocating a part in
//! the program several times as slow.

use std::collections::{BTreeMap, HashMap};

use gpumem_core::{
    ledger::{BlockChange, BlockChangeKind},
    model::{MemKind, PoolId},
};

/// At most this many live parts at one address are distinguished.
const MOST_LAYERS: usize = 8;

/// Finds the parts that overlap a live one when they are allocated.
#[derive(Debug, Default)]
pub(super) struct OverlapFinder {
    /// The live parts, each with its start and end. Parts of one layer do not overlap. Without overlaps, there is one
    /// layer.
    layers: Vec<BTreeMap<(PoolId, u64), u64>>,
    found: OverlappingParts,
}

/// The parts that overlapped a live one when they were allocated.
#[derive(Debug, Default)]
pub(crate) struct OverlappingParts {
    /// The number of such parts, including those of an earlier pool with the same id.
    pub(crate) count: u64,
    of_pool: HashMap<PoolId, u64>,
}

impl OverlappingParts {
    /// Returns the number of such parts in this pool.
    pub(crate) fn of(&self, pool: PoolId) -> u64 {
        self.of_pool.get(&pool).copied().unwrap_or(0)
    }
}

impl OverlapFinder {
    /// Updates the live parts after a change of a block, and counts the overlaps.
    pub(super) fn note(&mut self, change: &BlockChange) {
        if change.group.kind != MemKind::Part {
            return;
        }
        let (pool, start) = (change.group.pool, change.key.address());
        for layer in &mut self.layers {
            layer.remove(&(pool, start));
        }
        let end = start.saturating_add(change.after.get());
        if end == start {
            return;
        }
        // Parts of a layer do not overlap, so the last one that starts before the end reaches farthest.
        let has_room = |layer: &BTreeMap<(PoolId, u64), u64>| {
            layer.range((pool, 0)..(pool, end)).next_back().is_none_or(|(_, reach)| *reach <= start)
        };
        if change.kind == BlockChangeKind::Allocated && !self.layers.iter().all(has_room) {
            self.found.count += 1;
            *self.found.of_pool.entry(pool).or_default() += 1;
        }
        let at = self.layers.iter().position(has_room).unwrap_or(self.layers.len());
        if at == self.layers.len() && at < MOST_LAYERS {
            self.layers.push(BTreeMap::new());
        }
        if let Some(layer) = self.layers.get_mut(at) {
            layer.insert((pool, start), end);
        }
    }

    /// Forgets all live parts, because events were lost and their frees may be among them.
    pub(super) fn lose(&mut self) {
        self.layers.clear();
    }

    /// Starts a pool. An earlier one with the same id is closed.
    pub(super) fn start(&mut self, pool: PoolId) {
        self.found.of_pool.remove(&pool);
    }

    pub(super) fn finish(self) -> OverlappingParts {
        self.found
    }
}

//! Finds the age and the size of freed blocks that are not in the ledger.

use std::{
    cell::Cell,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use super::{
    super::recorder::record,
    events::{block_key, cuda_device, kind_on},
    state::{is_capture_active, state},
};
use crate::{
    model::{Block, Bytes, EventKind, Key, MemKind},
    sys::{calls::IdKind, cuda},
};

/// The lowest known id of a block that was allocated after the subscription started; [`u64::MAX`] while none is known. The driver numbers
/// blocks in the order of allocation, so a block with a lower id is older. A block that was allocated after the start of the subscription
/// but before the first known id also counts as older.
static FIRST_BLOCK: AtomicU64 = AtomicU64::new(u64::MAX);

thread_local! {
    /// The imported memory that this thread freed last, kept in case the call fails.
    static LAST_IMPORTED_FREE: Cell<Option<Key>> = const { Cell::new(None) };
}

/// Forgets the lowest id, because a new subscription starts.
pub(super) fn forget_first_block() {
    FIRST_BLOCK.store(u64::MAX, Relaxed);
}

/// Notes the id of the block that was just allocated at this address, if none is known yet.
#[inline]
pub(super) fn note_block(address: u64) {
    if FIRST_BLOCK.load(Relaxed) == u64::MAX
        && let Some(number) = cuda::block_number(address)
    {
        FIRST_BLOCK.fetch_min(number, Relaxed);
    }
}

/// Asks the driver for the id of the next block, if none is known yet.
pub(super) fn find_first_block() {
    if FIRST_BLOCK.load(Relaxed) == u64::MAX
        && let Some(number) = cuda::next_block_number()
    {
        FIRST_BLOCK.fetch_min(number, Relaxed);
    }
}

/// Records the coming free of a block that the ledger does not know.
#[cold]
pub(super) fn record_unknown_free(id_kind: IdKind, id: u64) {
    // Freeing null, imported memory or the memory of a graph does not change any count.
    if id == 0 || is_uncounted(id_kind, id) {
        record(&EventKind::FreeFailed);
    } else if let Some(block) = look_up(id_kind, id) {
        record(&EventKind::LateLookup { block });
    } else {
        record(&EventKind::Untracked);
    }
}

/// Returns whether the block was never counted because it was imported or belongs to a graph.
fn is_uncounted(id_kind: IdKind, id: u64) -> bool {
    let key = block_key(id_kind, id);
    if state().imported.remove(&key) {
        LAST_IMPORTED_FREE.set(Some(key));
        return true;
    }
    if id_kind != IdKind::Address {
        return false;
    }
    // If there is no block at this address and a capture is active, the free is captured: the graph will allocate the block.
    cuda::belongs_to_graph(id).unwrap_or_else(is_capture_active)
}

/// Records that the free of a block failed.
pub(super) fn record_failed_free() {
    state().imported.extend(LAST_IMPORTED_FREE.take());
    record(&EventKind::FreeFailed);
}

/// Returns the block that is about to be freed, if it is older than the subscription. The driver still knows the block, and the query has
/// no side effect. A younger block that the ledger does not know was allocated by a call that is not intercepted, so it was never counted.
fn look_up(id_kind: IdKind, id: u64) -> Option<Block> {
    let first = FIRST_BLOCK.load(Relaxed);
    // Without the id of a younger block, the age of this block is not known.
    if id_kind != IdKind::Address || first == u64::MAX || cuda::block_number(id)? >= first {
        return None;
    }
    let cuda::AddressRange { bytes, ordinal, managed, on_host } = cuda::range_at(id)?;
    let kind = match (on_host, managed) {
        (_, true) => MemKind::Managed,
        (true, false) => MemKind::PinnedHost,
        (false, false) => MemKind::Device,
    };
    Some(Block::new(cuda_device(ordinal), Bytes::new(bytes), kind_on(ordinal, kind)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn imported_memory_is_forgotten_when_it_is_freed() {
        let id = 0x7fff_1234_0000;
        state().imported.insert(block_key(IdKind::Array, id));
        let [freed, freed_again] = [(); 2].map(|()| is_uncounted(IdKind::Array, id));
        assert!(freed && !freed_again);
    }
}

//! Calls that free memory. A free is recorded before the call, and undone if the call fails.

use std::{cell::Cell, thread};

use super::{
    super::recorder::record,
    blocks::{record_failed_free, record_unknown_free},
    events::{block_key, record_lost},
    handles::{HandleMemory, Mapping, Reference},
    state::{GENERATION, state},
};
use crate::{
    model::{Answer, EventKind, Key, Space},
    sys::calls::IdKind,
};
use std::sync::atomic::Ordering::Relaxed;

/// The memory that the current call of a thread frees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PendingFree {
    /// A block. The ledger remembers which one.
    Block,
    /// One reference to a handle.
    Handle { handle: u64, reference: Reference },
    /// The mappings in [`DriverState::unmapping`](super::state::DriverState::unmapping).
    Mappings,
}

thread_local! {
    static PENDING: Cell<PendingFree> = const { Cell::new(PendingFree::Block) };
}

/// Records that a block is about to be freed.
pub(super) fn freeing(id_kind: IdKind, id: u64) {
    if record(&EventKind::Free { key: block_key(id_kind, id), block: None }) == Answer::Untracked {
        record_unknown_free(id_kind, id);
    }
}

/// Records that a reference to a handle is about to be removed.
pub(super) fn releasing(handle: u64) {
    let reference = state().handles.release(handle);
    if reference.frees() {
        record_handle_free(handle);
    }
    PENDING.set(PendingFree::Handle { handle, reference });
}

/// Records that all mappings in a range are about to be removed.
pub(super) fn unmapping(at: u64, bytes: u64) {
    let unmapped = state().handles.unmap(at, bytes);
    for Mapping { handle, .. } in unmapped.iter().filter(|mapping| mapping.reference.frees()) {
        record_handle_free(*handle);
    }
    state().unmapping.insert(thread::current().id(), unmapped);
    PENDING.set(PendingFree::Mappings);
}

/// Finishes the call after it has returned, and undoes its events if it failed.
pub(super) fn freed(succeeded: bool) {
    match PENDING.replace(PendingFree::Block) {
        PendingFree::Mappings => {
            let unmapped = state().unmapping.remove(&thread::current().id()).unwrap_or_default();
            if !succeeded {
                restore_mappings(unmapped);
            }
        }
        _ if succeeded => {}
        PendingFree::Block => record_failed_free(),
        PendingFree::Handle { handle, reference } => {
            state().handles.restore(handle, reference);
            if reference.frees() {
                record(&EventKind::FreeFailed);
            }
        }
    }
}

fn restore_mappings(unmapped: Vec<Mapping>) {
    for Mapping { at, handle, reference } in unmapped {
        state().handles.map_again(at, handle, reference);
        if let (true, HandleMemory::Block(block)) = (reference.was_last, reference.memory) {
            record(&EventKind::Alloc { key: Key::new(Space::Handle, handle), block });
        }
    }
}

/// Records that the memory of a handle is freed. If the ledger does not know the handle, the driver cannot help, because it describes only
/// addresses.
fn record_handle_free(handle: u64) {
    if record(&EventKind::Free { key: Key::new(Space::Handle, handle), block: None }) == Answer::Untracked {
        record(&EventKind::Untracked);
    }
}

/// Records that a context is destroyed, together with all blocks that were allocated in it. Blocks of pools and virtual memory (VMM) stay,
/// because they belong to the device.
pub(super) fn context_gone(handle: usize) {
    let removed = {
        let mut state = state();
        GENERATION.fetch_add(1, Relaxed);
        state.contexts.remove(handle)
    };
    // Nothing was allocated in a context that is not in `contexts`, so that context needs no event.
    for owner in removed {
        if owner.number == 0 {
            // There were too many contexts to number this one, so its blocks are not known.
            record_lost();
        } else {
            record(&EventKind::ContextDestroyed { context: owner.number });
            state().contexts.release_number(owner.number);
        }
    }
}

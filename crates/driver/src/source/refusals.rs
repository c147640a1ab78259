//! Allocations that failed because there was not enough memory.

use std::cell::Cell;

use once_cell::sync::OnceCell;

use crate::model::Block;
use crate::model::{Bytes, Device, MemKind};

/// The functions that are called about refused allocations.
pub struct RefusalHandler {
    /// An allocation was refused. The device is `None` if it is not known, or if the memory is on the host.
    pub refused: fn(Option<Device>, Bytes, MemKind),
    /// A thread that was refused memory has allocated this much on the device after all.
    pub obtained: fn(Device, Bytes),
}

static HANDLER: OnceCell<RefusalHandler> = OnceCell::new();

/// Sets the functions that are called. Only the first call has an effect.
pub fn handle_refusals(handler: RefusalHandler) {
    let _ = HANDLER.set(handler);
}

thread_local! {
    /// True if this thread was refused memory, and the handler waits for its next allocations.
    static IS_WATCHED: Cell<bool> = const { Cell::new(false) };
}

/// Reports the allocations of this thread to [`RefusalHandler::obtained`] from now on, or no longer.
#[inline]
pub fn watch_allocations(watch: bool) {
    IS_WATCHED.set(watch);
}

/// Returns whether the handler waits for the next allocations of this thread.
#[inline]
pub fn is_watched() -> bool {
    IS_WATCHED.get()
}

/// An allocation was refused.
pub(super) fn refused(device: Option<Device>, bytes: Bytes, kind: MemKind) {
    if let Some(handler) = HANDLER.get() {
        (handler.refused)(device, bytes, kind);
    }
}

/// A block was allocated.
#[inline]
pub(super) fn allocated(block: &Block) {
    if IS_WATCHED.get() {
        obtained(block);
    }
}

#[cold]
fn obtained(block: &Block) {
    if let Some(handler) = HANDLER.get().filter(|_| block.kind != MemKind::PinnedHost) {
        (handler.obtained)(block.device, block.bytes);
    }
}

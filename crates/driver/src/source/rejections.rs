//! Allocations that failed because there was not enough memory.

use std::cell::Cell;

use once_cell::sync::OnceCell;

use crate::model::Block;
use crate::model::{Bytes, Device, MemKind};

/// The functions that are called for failed allocations.
pub struct RejectionHandler {
    /// Called when an allocation failed. The device is `None` if it is not known, or if the memory is on the host.
    pub rejected: fn(Option<Device>, Bytes, MemKind),
    /// Called when a thread has allocated this much on the device after one of its earlier allocations failed.
    pub obtained: fn(Device, Bytes),
}

static HANDLER: OnceCell<RejectionHandler> = OnceCell::new();

/// Sets the functions. Only the first call has an effect.
pub fn handle_rejections(handler: RejectionHandler) {
    let _ = HANDLER.set(handler);
}

thread_local! {
    /// True if an allocation of this thread failed and the handler waits for its next allocations.
    static IS_WATCHED: Cell<bool> = const { Cell::new(false) };
}

/// Starts or stops reporting this thread's allocations to [`RejectionHandler::obtained`].
#[inline]
pub fn watch_allocations(watch: bool) {
    IS_WATCHED.set(watch);
}

/// Returns whether the handler waits for this thread's next allocations.
#[inline]
pub fn is_watched() -> bool {
    IS_WATCHED.get()
}

/// Reports that an allocation failed.
pub(super) fn rejected(device: Option<Device>, bytes: Bytes, kind: MemKind) {
    if let Some(handler) = HANDLER.get() {
        (handler.rejected)(device, bytes, kind);
    }
}

/// Reports that a block was allocated, if this thread is watched.
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

//! The id of the current recording.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The number of times that a recording has started or ended.
static CHANGES: AtomicU32 = AtomicU32::new(0);

/// Notes that a recording has started, or is about to end.
pub(crate) fn change() {
    CHANGES.fetch_add(1, Relaxed);
}

/// Returns the id of the current recording, or `None` if there is none.
pub(crate) fn current() -> Option<u32> {
    let changes = CHANGES.load(Relaxed);
    (!changes.is_multiple_of(2)).then_some(changes)
}

//! The number of the recording that is made now.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The number of times that a recording has begun or ended.
static CHANGES: AtomicU32 = AtomicU32::new(0);

/// Notes that a recording has begun, or ends.
pub(crate) fn change() {
    CHANGES.fetch_add(1, Relaxed);
}

/// Returns the number of the recording that is made; `None` if there is none.
pub(crate) fn current() -> Option<u32> {
    let changes = CHANGES.load(Relaxed);
    (!changes.is_multiple_of(2)).then_some(changes)
}

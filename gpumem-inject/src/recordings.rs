//! Which recording is made now.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// How often a recording has begun or ended.
static CHANGES: AtomicU32 = AtomicU32::new(0);

/// A recording has begun, or ends.
pub(crate) fn change() {
    CHANGES.fetch_add(1, Relaxed);
}

/// The number of the recording that is made; `None` if none is.
pub(crate) fn current() -> Option<u32> {
    let changes = CHANGES.load(Relaxed);
    (!changes.is_multiple_of(2)).then_some(changes)
}

//! Whether launches of graphs are recorded.

use std::sync::atomic::{
    AtomicBool,
    Ordering::{AcqRel, Acquire, Relaxed},
};

/// The known facts about the graphs of this process. Launches are not recorded until a graph is known to have a node
/// that allocates, because a program may launch a graph of kernels every microsecond.
struct GraphLaunches {
    allocate: AtomicBool,
    /// A launch was not recorded, and nobody has asked since.
    were_launched: AtomicBool,
}

static LAUNCHES: GraphLaunches =
    GraphLaunches { allocate: AtomicBool::new(false), were_launched: AtomicBool::new(false) };

/// Notes that a graph is launched. Returns whether the launch must be recorded.
#[inline]
pub(super) fn launched() -> bool {
    if LAUNCHES.allocate.load(Relaxed) {
        return true;
    }
    if !LAUNCHES.were_launched.load(Relaxed) {
        LAUNCHES.were_launched.store(true, Relaxed);
    }
    false
}

/// Records launches of graphs from now on. Returns whether they already were recorded.
pub(crate) fn record_graph_launches() -> bool {
    LAUNCHES.allocate.swap(true, Relaxed)
}

/// Returns whether graphs were launched since the last question, or are being launched, and the launches are not recorded. A launch
/// sets the flag before and after, so the next question finds memory that it maps after this one.
pub(crate) fn take_unrecorded_launches() -> bool {
    has_unrecorded_launches() && LAUNCHES.were_launched.swap(false, AcqRel)
}

/// Returns what [`take_unrecorded_launches`] would return. After `false`, this thread sees all writes that another thread made
/// before it took the launches.
pub(crate) fn has_unrecorded_launches() -> bool {
    LAUNCHES.were_launched.load(Acquire)
}

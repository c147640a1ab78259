//! Whether launches of graphs are recorded.

use std::sync::atomic::{
    AtomicBool,
    Ordering::{AcqRel, Acquire, Relaxed},
};

/// What is known about the graphs of this process. Launches are not recorded until a graph is known to have a node that
/// allocates, because a program may launch a graph of kernels every microsecond.
struct GraphLaunches {
    allocate: AtomicBool,
    /// A launch was not recorded, and nobody has asked since.
    were_launched: AtomicBool,
}

static LAUNCHES: GraphLaunches =
    GraphLaunches { allocate: AtomicBool::new(false), were_launched: AtomicBool::new(false) };

/// A graph is launched. Returns whether the launch must be recorded.
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

/// From now on launches of graphs are recorded. Returns whether they already were.
pub(crate) fn record_graph_launches() -> bool {
    LAUNCHES.allocate.swap(true, Relaxed)
}

/// Returns whether graphs were launched since the last question, or are being launched, and the launches are not recorded. A launch
/// says so before and after, so what it maps after this question is found by the next one.
pub(crate) fn take_unrecorded_launches() -> bool {
    has_unrecorded_launches() && LAUNCHES.were_launched.swap(false, AcqRel)
}

/// What [`take_unrecorded_launches`] would return. After `false`, what another thread did before it took the launches is seen.
pub(crate) fn has_unrecorded_launches() -> bool {
    LAUNCHES.were_launched.load(Acquire)
}

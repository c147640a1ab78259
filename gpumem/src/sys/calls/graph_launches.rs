//! Whether launches of graphs are recorded.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What is known about the graphs of this process. Launches are not recorded until a graph is known to have a node that
/// allocates, because a program may launch a graph of kernels every microsecond.
struct GraphLaunches {
    allocate: AtomicBool,
    /// At least one launch was not recorded.
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

/// Whether graphs were launched, and no launch is recorded yet.
pub(crate) fn launches_are_unrecorded() -> bool {
    !LAUNCHES.allocate.load(Relaxed) && LAUNCHES.were_launched.load(Relaxed)
}

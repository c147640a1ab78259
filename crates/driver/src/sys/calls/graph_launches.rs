//! Decides whether launches of graphs are recorded.

use std::sync::atomic::{
    AtomicBool,
    Ordering::{AcqRel, Acquire, Relaxed},
};

/// The known facts about the graphs of this process. Launches are not recorded until a graph is known to have a node that allocates,
/// because a program may launch a graph of kernels every microsecond.
struct GraphLaunches {
    allocate: AtomicBool,
    /// True if a launch was not recorded since the flag was last taken.
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

/// Starts to record launches of graphs. Returns whether they were recorded already.
pub(crate) fn record_graph_launches() -> bool {
    LAUNCHES.allocate.swap(true, Relaxed)
}

/// Returns whether graphs have been launched since the last call, or are being launched, without being recorded. A launch sets the flag
/// before and after, so the next call of this function finds memory that the launch maps after this one.
pub(crate) fn take_unrecorded_launches() -> bool {
    has_unrecorded_launches() && LAUNCHES.were_launched.swap(false, AcqRel)
}

/// Returns what [`take_unrecorded_launches`] would return, without changing anything. After `false`, this thread sees all writes that
/// another thread made before it took the launches.
pub(crate) fn has_unrecorded_launches() -> bool {
    LAUNCHES.were_launched.load(Acquire)
}

//! The guards of a program: traces, trackers, handles of scopes, the guards that attributes add.

mod body;
mod handle;
mod task;
mod trace;
mod tracker;

pub use self::{
    body::{BodyGuard, End, Lines, TraceSpec},
    handle::{Entered, InScope, ScopeHandle},
    task::Traced,
    trace::{GpuMemTrace, GpuMemTraceBuilder},
    tracker::{MemTracker, MemTrackerBuilder},
};

//! The guards of a program: traces, trackers, handles of scopes, the guards that attributes add.

mod body;
mod builder;
mod handle;
mod report;
mod task;
mod task_scope;
mod trace;
mod tracker;

pub use self::{
    body::{BodyGuard, End, Lines, TraceSpec},
    builder::GpuMemTraceBuilder,
    handle::{Entered, InScope, ScopeHandle},
    task::Traced,
    task_scope::TaskScope,
    trace::GpuMemTrace,
    tracker::{MemTracker, MemTrackerBuilder},
};

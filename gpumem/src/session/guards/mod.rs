//! The guards of a program: traces, trackers, handles of scopes, the guards that attributes add.

mod body;
mod builder;
mod handle;
mod report;
mod silent;
mod task;
mod trace;
mod tracker;

pub use self::{
    body::{BodyGuard, End, Lines, TraceSpec},
    builder::GpuMemTraceBuilder,
    handle::{Entered, InScope, ScopeHandle},
    silent::SilentScope,
    task::Traced,
    trace::GpuMemTrace,
    tracker::{MemTracker, MemTrackerBuilder},
};

//! Recordings of a program: its use of GPU memory, and the definitions of all ids.
//!
//! [`Writer`] writes recordings. [`Reader`] reads them and derives reports, on any machine and without the program. The format is in
//! `docs/RECORDING.md`.

#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr, clippy::dbg_macro)]

mod allocator;
mod allocator_sizes;
mod allocator_tracker;
mod budget;
mod bytes;
mod check;
mod definitions;
mod event;
mod follow;
mod item;
mod items;
mod part;
mod reader;
mod record;
mod recover;
mod ring;
mod state;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod testing;
#[cfg(test)]
mod tests;
mod totals;
mod wire;
mod writer;

pub use self::{
    allocator::{
        AllocatorAction, AllocatorContradiction, AllocatorDefinition, AllocatorDevice, AllocatorEvent, AllocatorEvents,
        AllocatorSettings, AllocatorStats, TensorClass, TensorGroup, TensorHolder,
    },
    allocator_tracker::{AllocatorTracker, Held, TrackedEvent},
    definitions::Definitions,
    event::RecordedEvent,
    follow::{FileStart, Follower, Growing},
    item::{
        BlockLabel, CallsiteDefinition, ClockPair, CodeAddress, ContextDefinition, DeviceDefinition, Finished,
        Interception, Item, ModuleDefinition, PartDefinition, PoolBlock, PoolDefinition, Process, ProcessEnd,
        RingDefinition, StackDefinition, Symbol, SymbolsDefinition, ThreadDefinition,
    },
    items::{for_each_item, items_of},
    part::Part,
    reader::{Reader, Skipped, Step},
    record::{End, VERSION, is_recording},
    recover::{Ended, Segment, Segments, has_ring, left_in_ring, new_path, old_path, recover},
    ring::{
        Line, RingContent, RingDefinitions, RingMemory, RingReader, RingWriter, WHOLE_FILE, lines_for, on_the_heap,
        ring,
    },
    totals::{DevicePeak, Totals, Waiting},
    writer::{Writer, Written},
};

//! Recordings of a program: what it did with GPU memory, what the numbers in it stand for, and the reports that it requested.
//!
//! [`Writer`] writes them, [`Reader`] reads them and derives the same reports, on any machine and without the program. The format
//! is in `docs/CAPTURE.md`.

mod bytes;
mod check;
mod definitions;
mod event;
mod item;
mod items;
mod output;
mod reader;
mod record;
mod recover;
mod requests;
mod ring;
mod state;
mod wire;
mod writer;

pub use self::{
    definitions::Definitions,
    event::RecordedEvent,
    item::{
        BlockLabel, CallsiteDefinition, ClockPair, CodeAddress, ContextDefinition, DeviceDefinition, DeviceReading,
        Interception, Item, ModuleDefinition, PoolDefinition, Process, Request, StackDefinition, Symbol,
        SymbolsDefinition, ThreadDefinition,
    },
    items::items_of,
    output::ReplayedReport,
    reader::{Reader, Skipped, Step},
    record::{End, VERSION},
    recover::{Recovered, recover, ring_path},
    ring::{Line, RingMemory, RingOwner, RingReader, RingWriter, lines_for, on_the_heap, ring},
    writer::{Writer, Written},
};

//! Plain data: what every floor above may name, and which names nothing but `std`.

mod bytes;
mod callsite;
mod device;
mod event;
mod frame;
mod gauge;
mod label;
mod memory;
mod process;
mod source;
mod trace;

pub use bytes::{ByteDelta, Bytes, ParseBytesError};
pub use callsite::{CallsiteId, StackId};
pub use device::{Device, Family};
pub use event::{
    Answer, Block, Event, EventKind, Key, MemKind, OwnerThread, ScopeId, ScopeSpec, Space, Tag, ThreadId, Time,
};
pub use frame::is_driver;
pub use frame::{Frame, library, of_program, users_line};
pub use gauge::{Gauge, ParseGaugeError, Sampling};
pub use label::{Label, Shape};
pub use memory::GpuMemory;
pub use memory::PoolUsage;
pub use process::{GpuProcess, ProcessKind};
pub use source::{ParseSourceError, Source};
pub use trace::Trace;

//! Plain data: what every floor above may name, and which names nothing but `std`.

mod bytes;
mod device;
mod event;
mod frame;
mod gauge;
mod label;
mod memory;
mod process;
mod site;
mod source;
mod trace;

pub use bytes::{ByteDelta, Bytes, ParseBytesError};
pub(crate) use device::{Device, Family};
pub(crate) use event::{
    Answer, Block, Event, EventKind, Key, MemKind, ScopeId, Space, Strand, Tag, ThreadId, Time, Watch,
};
#[cfg(feature = "backtrace")]
pub(crate) use frame::is_driver;
pub(crate) use frame::{Frame, library, of_program, users_line};
pub use gauge::{Gauge, ParseGaugeError, Sampling};
pub(crate) use label::{Label, Shape};
pub use memory::GpuMemory;
pub(crate) use memory::Marks;
pub use process::{GpuProcess, ProcessKind};
pub(crate) use site::{SiteId, StackId};
pub use source::{ParseSourceError, Source};
pub use trace::Trace;

//! The history of a recording. All reports and formats are derived from it.
//!
//! The reader in `gpumem-core` applies the events to its ledger, which is the only place that knows how an event
//! affects a block. The ledger does not store when blocks are allocated and freed. It passes these changes to [`read`],
//! which stores them in [`lives`].

mod allocator;
mod block_lives;
mod device;
mod driver_blocks;
mod held;
#[cfg(test)]
mod hostile;
mod names;
mod origin_sums;
mod overlaps;
mod process_memory;
mod read;
mod recorded;
mod recording_bytes;
mod step_peaks;
mod tensor_blocks;
pub(crate) mod tensors;
#[cfg(test)]
mod tests;
mod time;

pub(crate) use gpumem_core::ledger::BlockChangeKind as ChangeKind;

#[cfg(feature = "export")]
pub(crate) use self::names::pay;
pub(crate) use self::{
    block_lives::{BlockLife, Change, Lives},
    device::DeviceHistory,
    names::{Origin, library_or_program},
    origin_sums::{OriginSum, Sum, sums_by},
    process_memory::{DriverSum, ProcessMemory, ProcessSeries, taken_now},
    recorded::{History, MarkedMoment, RejectedRequest, ScopeLife, UnknownValue},
    step_peaks::{step_of, step_peaks},
    time::{AskedMoment, Moment, in_words, nanos},
};

//! The sources: everything that brings events or readings in. Each family of devices can be asked (a reading, the current
//! device). Some also record an event for each allocation and free, as it happens.

#[cfg(all(feature = "__internal", feature = "cupti", feature = "dispatch"))]
mod both;
#[cfg(feature = "cuda")]
mod cuda;
mod devices;
#[cfg(any(feature = "cupti", feature = "dispatch"))]
mod driver;
mod hasher;
#[cfg(feature = "nvml")]
pub(crate) mod machine;
mod off;
#[cfg(feature = "nvml")]
mod processes;
#[cfg(feature = "backtrace")]
mod python;
mod recorder;
mod refusals;
#[cfg(feature = "sim")]
pub mod sim;
#[cfg(feature = "backtrace")]
mod stack;
mod stacks;

#[cfg(all(feature = "__internal", feature = "cupti", feature = "dispatch"))]
pub use self::both::calls_of_both_sources;
#[cfg(all(feature = "__internal", feature = "dispatch"))]
pub(crate) use self::driver::{hook_for_nobody, intercepted, rehearse};
#[cfg(feature = "capture")]
pub(crate) use self::stacks::{LoadedFile, files_of, python_frame};
pub(crate) use self::{
    devices::Devices,
    off::{traces_are_off, turn_traces_off},
    recorder::RecordEvents,
    refusals::{RefusalHandler, handle_refusals, watch_allocations},
    stacks::{StackTable, addresses_here, current_stack, frames, min_bytes_of, own_module},
};
#[cfg(feature = "sim")]
pub(crate) use self::{off::ask_for_each_trace, refusals::is_watched, stacks::uncached_stack};
#[cfg(all(feature = "__internal", feature = "backtrace"))]
pub(crate) use self::{
    python::{python_line_at, python_lines},
    stacks::WAYS_TO_A_STACK,
};
#[cfg(all(feature = "backtrace", feature = "capture", feature = "dispatch"))]
pub(crate) use crate::sys::python::run_in_python;

use self::devices::Selection;
use crate::{
    error::{Error, Kind, Result},
    settings::Settings,
};

/// The families, in the order in which they are asked.
const FAMILIES: &[fn() -> Selection] = &[
    #[cfg(feature = "sim")]
    sim::select,
    #[cfg(feature = "cuda")]
    cuda::select,
];

/// The devices of this process: simulated ones if there are any, else CUDA's.
pub(crate) fn devices() -> Result<&'static dyn Devices> {
    let selected = FAMILIES.iter().find_map(|select| select());
    selected.unwrap_or_else(|| Err(Error::from(Kind::NotBuilt { feature: "cuda" })))
}

/// From now on all sources record to `R`, with the stacks that these settings ask for. The session of the process calls this when it
/// begins.
pub(crate) fn record_to<R: RecordEvents>(settings: &Settings) {
    recorder::set(recorder::EventRecorder {
        record: R::record,
        number_stack: R::number_stack,
        addresses: R::addresses,
        #[cfg(any(feature = "cupti", feature = "dispatch"))]
        subscribe: driver::subscribe_to::<R>,
    });
    stacks::begin(settings);
}

//! The sources of events and readings. Each family of devices answers queries, for example for a reading or the current device. Some
//! families also record an event for each allocation and free.

mod cards;
#[cfg(feature = "cuda")]
pub mod compare_sources;
#[cfg(feature = "cuda")]
mod cuda;
mod custom;
mod devices;
#[cfg(feature = "cuda")]
mod driver;
mod files;
#[cfg(feature = "cuda")]
pub mod machine;
#[cfg(feature = "cuda")]
mod processes;
#[cfg(feature = "backtrace")]
pub(crate) mod python;
#[cfg(feature = "cuda")]
mod readings;
#[cfg_attr(not(any(feature = "cuda", feature = "sim")), allow(dead_code, reason = "there is no source that records"))]
mod recorder;
#[cfg_attr(not(any(feature = "cuda", feature = "sim")), allow(dead_code, reason = "there is no source that records"))]
mod rejections;
#[cfg(feature = "sim")]
pub mod sim;
#[cfg_attr(not(any(feature = "cuda", feature = "sim")), allow(dead_code, reason = "there is no source that records"))]
mod stacks;
mod traces_off;
#[cfg_attr(not(feature = "backtrace"), path = "no_walks.rs")]
mod walks;

pub use self::{
    cards::replaced_cards,
    custom::{custom_devices, set_gauge},
    devices::{Devices, Interception},
    files::own_module,
    recorder::{LabelBlock, LiveMemory, RecordEvents, call_before_allocations, label_with},
    rejections::{RejectionHandler, handle_rejections, is_watched, watch_allocations},
    stacks::{StackTable, min_bytes_of},
    traces_off::{ask_for_each_trace, traces_are_off, turn_traces_off},
    walks::{
        addresses_here, current_file, current_stack, forget_stacks, frames, modules, python_frame, uncached_stack,
    },
};

pub use crate::sys::loader::{LoadedFile, files_of};

use self::devices::Selection;
use crate::{
    error::{Error, Kind, Result},
    model::Source,
    settings::Settings,
};
#[cfg(feature = "cuda")]
use crate::{model::Family, sys::cupti};

/// The families, in the order in which they are tried.
const FAMILIES: &[fn() -> Selection] = &[
    #[cfg(feature = "sim")]
    sim::select,
    #[cfg(feature = "cuda")]
    cuda::select,
];

/// Returns the devices of this process: the simulated ones if there are any, or else CUDA's.
///
/// # Errors
/// Returns an error if the value of `GPUMEM_SIM` cannot be used, or if this build supports no devices.
pub fn devices() -> Result<&'static dyn Devices> {
    let selected = FAMILIES.iter().find_map(|select| select());
    selected.unwrap_or_else(|| Err(Error::from(Kind::NotBuilt { feature: "cuda" })))
}

/// Checks whether this source could intercept the allocations of this process.
///
/// # Errors
/// Returns the reason why the source could not.
pub fn can_intercept(source: Source) -> Result<()> {
    devices()?.can_subscribe(Some(source)).map(drop)
}

/// Compares the memory of the process on each device with everything that is recorded, and records the rest. Called about once a second
/// while a recording is made, before reports, and at the end.
pub fn compare_driver_memory() {
    #[cfg(feature = "cuda")]
    if devices().is_ok_and(|devices| devices.family() == Family::Cuda) {
        driver::compare_all();
    }
}

/// Opens NVML on the thread of a recording, while the program initializes its first device. The driver is not called.
pub fn open_nvml() {
    #[cfg(feature = "cuda")]
    if devices().is_ok_and(|devices| devices.family() == Family::Cuda) {
        crate::sys::nvml::open_all();
    }
}

/// Reads the memory that stream-ordered pools keep. Called every few milliseconds while a recording is made.
pub fn read_pools() {
    #[cfg(feature = "cuda")]
    if devices().is_ok_and(|devices| devices.family() == Family::Cuda) {
        driver::read_pools();
    }
}

/// Returns the version of CUPTI's interface, if the devices are CUDA's and CUPTI can be used. For example, 130002 means CUDA 13.0.
#[cfg(feature = "cuda")]
pub fn cupti_version() -> Option<u32> {
    devices().ok().filter(|devices| devices.family() == Family::Cuda).and_then(|_| cupti::version())
}

/// Makes all sources send events to `R`, with the stacks that the settings request. Only the first call in a process has an effect.
pub fn record_to<R: RecordEvents>(settings: &Settings) {
    recorder::set(recorder::EventRecorder {
        record: R::record,
        number_stack: R::number_stack,
        number_file: R::number_file,
        addresses: R::addresses,
        #[cfg(feature = "cuda")]
        subscribe: driver::subscribe_to::<R>,
        #[cfg(feature = "cuda")]
        live: R::live,
        #[cfg(feature = "cuda")]
        rounding: R::rounding,
    });
    stacks::start(settings);
}

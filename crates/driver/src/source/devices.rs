//! The trait that every family of devices implements.

use std::panic::RefUnwindSafe;

use crate::{
    error::Result,
    model::{Device, Family, GpuMemory, GpuProcess, PoolUsage, Source},
};

/// The devices of one family, by ordinal. A method that returns a `Result` fails if the device does not exist, or if the library that it
/// calls is missing or fails. The error names it.
#[expect(clippy::missing_errors_doc, reason = "stated above, for all methods")]
pub trait Devices: Send + Sync + RefUnwindSafe {
    /// Returns the family.
    fn family(&self) -> Family;

    /// Returns the number of devices.
    ///
    /// # Errors
    /// Returns an error if the number is not known.
    fn count(&self) -> Result<u32>;

    /// Returns the calling thread's current device, or 0 if the thread has not chosen one.
    fn current(&self) -> Result<u32>;

    /// Returns the device with this ordinal, or the current one for `None`. Does not check whether the device exists.
    fn device(&self, id: Option<u32>) -> Result<Device> {
        let ordinal = id.map_or_else(|| self.current(), Ok)?;
        Ok(Device { family: self.family(), ordinal })
    }

    /// Returns an error if there is no such device.
    fn check(&self, ordinal: u32) -> Result<()>;

    /// Returns the device's name, such as `NVIDIA H200`.
    ///
    /// # Errors
    /// Returns an error if the name cannot be read.
    fn name(&self, ordinal: u32) -> Result<String>;

    /// Returns the UUID as `nvidia-smi -L` prints it, or without `GPU-` or `MIG-` if NVML cannot be used. `None` if the device has no UUID.
    fn uuid(&self, _ordinal: u32) -> Option<String> {
        None
    }

    /// Reads the memory of the whole device. Never creates a context.
    fn read(&self, ordinal: u32) -> Result<GpuMemory>;

    /// Returns whether the device uses the machine's memory because it does not have its own.
    fn is_integrated(&self, _ordinal: u32) -> bool {
        false
    }

    /// Returns the processes that use the device, by pid. In a container, this process may be missing or have another pid. A value that is
    /// not known is `None`, not 0.
    fn processes(&self, ordinal: u32) -> Result<Vec<GpuProcess>>;

    /// Reads the device's current stream-ordered pool. Returns `None` if the device has no pools. Never creates a context.
    fn read_pool(&self, ordinal: u32) -> Result<Option<PoolUsage>>;

    /// Resets the high-water mark of that pool's reserved memory to its current value.
    fn reset_pool_reserved(&self, ordinal: u32) -> Result<()>;

    /// Waits for the device and releases the unused memory of its pools.
    fn trim(&self, ordinal: u32) -> Result<()>;

    /// Initializes the device as its first use would, for example by creating a context.
    fn preload(&self, ordinal: u32) -> Result<()>;

    /// Starts to intercept every allocation on the devices, through the requested source or else the best one. Does nothing if allocations
    /// are intercepted already.
    fn subscribe(&self, requested: Option<Source>) -> Result<Interception>;

    /// Returns the source that [`subscribe`](Self::subscribe) would use.
    fn can_subscribe(&self, requested: Option<Source>) -> Result<Source>;

    /// Stops intercepting.
    fn unsubscribe(&self);

    /// Returns the source that intercepts allocations now, or `None` if none does.
    fn subscribed(&self) -> Option<Interception>;

    /// Reads the memory of this device that no intercepted call shows, and records it. Called before a trace starts and at each of its
    /// readings.
    fn poll(&self, _: u32) {}

    /// Reads the memory of this process on a device, and records what no call explains. Called before reports.
    fn compare(&self, _: u32) {}

    /// Returns a bit mask with one bit for each function that is no longer intercepted because another tool replaced our hook. Calls of
    /// these functions may be missed.
    fn displaced(&self) -> u128 {
        0
    }
}

/// How allocations are intercepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interception {
    /// The source that intercepts them.
    pub source: Source,
    /// The path of the library whose calls are intercepted.
    pub library: &'static str,
}

/// Whether this process uses a family: `None` if it does not, and an error if it should but cannot.
pub(super) type Selection = Option<Result<&'static dyn Devices>>;

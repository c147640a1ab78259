//! The questions that every family of devices answers.

use std::panic::RefUnwindSafe;

use crate::{
    error::Result,
    model::{Device, Family, GpuMemory, GpuProcess, PoolUsage, Source},
};

/// The devices of one family, by number. A method that returns a `Result` fails if there is no such device, or if the library that it
/// asks is missing or fails; the error names it.
#[expect(clippy::missing_errors_doc, reason = "stated above, for all methods")]
pub trait Devices: Send + Sync + RefUnwindSafe {
    /// Returns the family.
    fn family(&self) -> Family;

    /// Returns the number of devices.
    ///
    /// # Errors
    /// Returns an error if it cannot be found out.
    fn count(&self) -> Result<u32>;

    /// The calling thread's current device; 0 if it has not chosen one.
    fn current(&self) -> Result<u32>;

    /// Returns the device with this number, else the current one. It does not check whether the device exists.
    fn device(&self, id: Option<u32>) -> Result<Device> {
        let ordinal = id.map_or_else(|| self.current(), Ok)?;
        Ok(Device { family: self.family(), ordinal })
    }

    /// Returns an error if there is no such device.
    fn check(&self, ordinal: u32) -> Result<()>;

    /// Returns the device's name, such as `NVIDIA H200`.
    ///
    /// # Errors
    /// Returns an error if the device cannot be asked.
    fn name(&self, ordinal: u32) -> Result<String>;

    /// The UUID, as `nvidia-smi -L` prints it; without `GPU-` or `MIG-` if NVML cannot be used. `None` if it has none.
    fn uuid(&self, _ordinal: u32) -> Option<String> {
        None
    }

    /// Reads the whole device. It never creates a context.
    fn read(&self, ordinal: u32) -> Result<GpuMemory>;

    /// Returns whether the device has no memory of its own, but uses that of the machine.
    fn is_integrated(&self, _ordinal: u32) -> bool {
        false
    }

    /// Returns the processes that use the device, by pid. In a container this process may be missing, or have another pid. A
    /// figure that is not known is `None`, not 0.
    fn processes(&self, ordinal: u32) -> Result<Vec<GpuProcess>>;

    /// Reads the device's current stream-ordered pool; `None` if the device has no pools. It never creates a context.
    fn read_pool(&self, ordinal: u32) -> Result<Option<PoolUsage>>;

    /// Resets the high-water mark of that pool's reserved memory to its current value.
    fn reset_pool_reserved(&self, ordinal: u32) -> Result<()>;

    /// Waits for the device and releases the unused memory of its pools.
    fn trim(&self, ordinal: u32) -> Result<()>;

    /// Initialises the device as its first use would, for example by creating a context.
    fn preload(&self, ordinal: u32) -> Result<()>;

    /// Intercepts every allocation on the devices from now on, unless this is already the case: through the wanted source, else
    /// through the best one.
    fn subscribe(&self, wanted: Option<Source>) -> Result<Interception>;

    /// Returns the source that [`subscribe`](Self::subscribe) would use.
    fn can_subscribe(&self, wanted: Option<Source>) -> Result<Source>;

    /// Stops intercepting.
    fn unsubscribe(&self);

    /// The source that intercepts allocations now; `None` if there is none.
    fn subscribed(&self) -> Option<Interception>;

    /// Asks for memory of this device that no intercepted call shows, and records it. It is called before a trace begins and at
    /// each of its readings.
    fn poll(&self, _: u32) {}

    /// Returns one bit for each function that is no longer intercepted because another tool replaced our hook. Its calls may
    /// be missed.
    fn displaced(&self) -> u128 {
        0
    }
}

/// The way in which allocations are intercepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interception {
    /// The source that intercepts them.
    pub source: Source,
    /// The path of the library whose calls are intercepted.
    pub library: &'static str,
}

/// The use of a family by this process: `None` if the process does not use it, an error if it would but cannot.
pub(super) type Selection = Option<Result<&'static dyn Devices>>;

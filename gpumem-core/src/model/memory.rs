use std::fmt;

use super::Bytes;

/// What one device has, as of one moment: the whole device, all processes on it.
///
/// `Display` is the line that fastai prints, in whole MiB:
///
/// ```
/// use gpumem::{Bytes, GpuMemory};
/// let memory = GpuMemory { total: Bytes::mib(4096), free: Bytes::mib(3934), used: Bytes::mib(161), reserved: None };
/// assert_eq!(memory.to_string(), "GPUMemory(total=4096, free=3934, used=161)");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct GpuMemory {
    /// All memory of the device.
    pub total: Bytes,
    /// What an allocation can still get.
    pub free: Bytes,
    /// In use by any process, as `nvidia-smi` shows it.
    pub used: Bytes,
    /// Kept by the driver for itself: `total = free + used + reserved`. `None` where the source does not tell it apart;
    /// it is then part of `used`.
    pub reserved: Option<Bytes>,
}

impl fmt::Display for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (total, free, used) = (self.total.mb(), self.free.mb(), self.used.mb());
        write!(f, "GPUMemory(total={total}, free={free}, used={used})")
    }
}

/// What the driver itself counts of one stream-ordered pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolUsage {
    /// The driver's name for the pool.
    pub pool: u64,
    /// In the hands of the program.
    pub used: Bytes,
    /// The most of that since the mark was reset.
    pub used_high: Bytes,
    /// Taken from the device: what is used, and what is kept for later.
    pub reserved: Bytes,
    /// The most of that since its own mark was reset.
    pub reserved_high: Bytes,
}

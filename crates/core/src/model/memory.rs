use std::fmt;

use super::Bytes;

/// The memory of one device at one moment: the whole device, with all its processes.
///
/// `Display` prints fastai's line, in whole MiB:
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::mib(4096))?;
/// # let block = gpu.alloc(gpumem::Bytes::mib(160))?;
/// let memory = gpumem::gpu_mem_get(0);
/// assert_eq!(memory.to_string(), "GPUMemory(total=4096, free=3936, used=160)");
/// # drop(block);
/// # Ok::<(), gpumem::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct GpuMemory {
    /// The total memory of the device.
    pub total: Bytes,
    /// The memory that can still be allocated.
    pub free: Bytes,
    /// The memory in use by any process, as `nvidia-smi` shows it.
    pub used: Bytes,
    /// The memory that the driver reserves for itself: `total = free + used + reserved`. `None` if the source does not
    /// report it; then it is part of `used`.
    pub reserved: Option<Bytes>,
}

impl GpuMemory {
    #[doc(hidden)]
    pub const fn new(total: Bytes, free: Bytes, used: Bytes, reserved: Option<Bytes>) -> Self {
        Self { total, free, used, reserved }
    }
}

impl fmt::Display for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (total, free, used) = (self.total.mb(), self.free.mb(), self.used.mb());
        write!(f, "GPUMemory(total={total}, free={free}, used={used})")
    }
}

/// The usage of one stream-ordered pool, as the driver counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolUsage {
    /// The driver's handle of the pool.
    pub pool: u64,
    /// The bytes in use by the program.
    pub used: Bytes,
    /// The high-water mark of `used`.
    pub used_high: Bytes,
    /// The backing that the pool has from the device: the used part, and the part that is kept for later.
    pub reserved: Bytes,
    /// The high-water mark of `reserved`.
    pub reserved_high: Bytes,
}

//! The figures of stream-ordered pools.

use cudarc::driver::{
    result::{self, DriverError},
    sys,
};

use super::{capture::relaxed, device::CudaDevice, failure::call_failed};
use crate::error::{Error, Kind};

/// A high-water mark of a stream-ordered pool that can be reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoolMark {
    /// Of the memory that the program has allocated.
    Used,
    /// Of the memory that the pool has reserved on the device.
    Reserved,
}

/// The driver's figures of one stream-ordered pool, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolFigures {
    /// The pool's handle, which identifies the pool.
    pub(crate) pool: u64,
    pub(crate) used: u64,
    pub(crate) used_high: u64,
    pub(crate) reserved: u64,
    pub(crate) reserved_high: u64,
}

impl CudaDevice {
    /// The figures of the device's current pool, from which `cuMemAllocAsync` allocates. The high-water marks are read first.
    /// `reset` resets one mark as soon as it is read, to what is then used or reserved.
    #[doc(alias(
        "cuMemPoolGetAttribute",
        "cuMemPoolSetAttribute",
        "CU_MEMPOOL_ATTR_USED_MEM_HIGH",
        "CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH"
    ))]
    pub(crate) fn read_pool(self, reset: Option<PoolMark>) -> Result<PoolFigures, Error> {
        // SAFETY: the device came from the driver, which is initialised.
        let pool = unsafe { result::device::get_mem_pool(self.device) }.map_err(|error| match error {
            DriverError(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED) => {
                let why = "the device has no stream-ordered pools; use another gauge";
                Kind::NoGauge { gauge: "pool", why }.into()
            }
            error => call_failed("cuDeviceGetMemPool", error, Some(self.ordinal)),
        })?;
        relaxed(|| self.read_figures(pool, reset))
    }

    fn read_figures(self, pool: sys::CUmemoryPool, reset: Option<PoolMark>) -> Result<PoolFigures, Error> {
        use sys::CUmemPool_attribute as Attribute;

        let figure = |attribute| {
            let mut bytes = 0_u64;
            // SAFETY: the four attributes below are `cuuint64_t`, as the live out-parameter is. The pool is alive: the driver has
            // just returned it as the device's current pool. A program that destroys its current pool while other threads may
            // allocate from it has the same race with its own `cuMemAllocAsync`.
            unsafe { result::mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast()) }
                .map_err(self.failed("cuMemPoolGetAttribute"))?;
            Ok::<_, Error>(bytes)
        };
        let reserved_high = figure(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?;
        let used_high = figure(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?;
        if let Some(reset) = reset {
            let mark = match reset {
                PoolMark::Used => Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
                PoolMark::Reserved => Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
            };
            let mut zero = 0_u64;
            // SAFETY: as above. 0 is the only value that these attributes can be set to.
            unsafe { result::mem_pool::set_attribute(pool, mark, (&raw mut zero).cast()) }
                .map_err(self.failed("cuMemPoolSetAttribute"))?;
        }
        let used = figure(Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
        let reserved = figure(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
        Ok(PoolFigures { pool: pool.addr() as u64, used, used_high, reserved, reserved_high })
    }
}

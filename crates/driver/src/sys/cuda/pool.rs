//! Reads stream-ordered pools.

use cudarc::driver::{
    result::{self, DriverError},
    sys::{self, CUmemPool_attribute as Attribute},
};

use super::{capture::relaxed, device::CudaDevice, failure::call_failed};
use crate::{
    error::Error,
    model::{Bytes, PoolUsage},
    sys::calls::as_library,
};

impl CudaDevice {
    /// Reads the device's current pool, from which `cuMemAllocAsync` allocates. Returns `None` if the device has no pools. The high-water
    /// marks are read first, so that they exclude everything after the usage is read.
    #[doc(alias("cuMemPoolGetAttribute", "CU_MEMPOOL_ATTR_USED_MEM_HIGH", "CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH"))]
    pub(crate) fn read_pool(self) -> Result<Option<PoolUsage>, Error> {
        self.current_pool()?.map(|pool| relaxed(|| self.read_usage(pool))).transpose()
    }

    /// Resets the high-water mark of the current pool's reserved memory to its current value. Does nothing on a device without pools.
    #[doc(alias = "cuMemPoolSetAttribute")]
    pub(crate) fn reset_pool_reserved(self) -> Result<(), Error> {
        let Some(pool) = self.current_pool()? else { return Ok(()) };
        let (mark, mut zero) = (Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 0_u64);
        // SAFETY: the attribute is `cuuint64_t`, as `zero` is, and 0 is the only value that it can be set to. The pool is alive: see
        // `read_usage`.
        relaxed(|| unsafe { result::mem_pool::set_attribute(pool, mark, (&raw mut zero).cast()) })
            .map_err(self.failed("cuMemPoolSetAttribute"))
    }

    /// Returns the device's current pool, or `None` if the device has no pools.
    fn current_pool(self) -> Result<Option<sys::CUmemoryPool>, Error> {
        // SAFETY: the device came from the driver, which is initialized.
        match unsafe { result::device::get_mem_pool(self.device) } {
            Ok(pool) => Ok(Some(pool)),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED)) => Ok(None),
            Err(error) => Err(call_failed("cuDeviceGetMemPool", error, Some(self.ordinal))),
        }
    }

    fn read_usage(self, pool: sys::CUmemoryPool) -> Result<PoolUsage, Error> {
        let value = |attribute| {
            let mut bytes = 0_u64;
            // SAFETY: the four attributes below are `cuuint64_t`, as the live out-parameter is. The pool is alive: the driver has
            // just returned it as the device's current pool. A program that destroys its current pool while other threads may
            // allocate from it has the same race with its own `cuMemAllocAsync`.
            unsafe { result::mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast()) }
                .map_err(self.failed("cuMemPoolGetAttribute"))?;
            Ok::<_, Error>(Bytes::new(bytes))
        };
        let reserved_high = value(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?;
        let used_high = value(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?;
        let used = value(Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
        let reserved = value(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
        Ok(PoolUsage { pool: pool.addr() as u64, used, used_high, reserved, reserved_high })
    }
}

/// The memory of one stream-ordered pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PoolState {
    pub(crate) reserved: u64,
    pub(crate) used: u64,
    /// The unused memory that the pool keeps at a synchronization.
    pub(crate) threshold: u64,
}

/// Returns the pool from which a device allocates unless the program sets another one.
#[doc(alias = "cuDeviceGetDefaultMemPool")]
pub(crate) fn default_pool(ordinal: u32) -> Option<u64> {
    // SAFETY: the driver returns an error for a number that is not a device.
    let pool = as_library(|| unsafe { result::device::get_default_mem_pool(ordinal.cast_signed()) }).ok()?;
    Some(pool.expose_provenance() as u64)
}

/// Reads the memory of a pool, which must not be destroyed meanwhile. Hooks may call this.
#[doc(alias = "cuMemPoolGetAttribute")]
pub(crate) fn pool_state(pool: u64) -> Option<PoolState> {
    let pool: sys::CUmemoryPool = std::ptr::with_exposed_provenance_mut(usize::try_from(pool).ok()?);
    let value = |attribute| {
        let mut bytes = 0_u64;
        // SAFETY: the attributes are `cuuint64_t`, as the live out-parameter is. The caller guarantees that the pool exists.
        unsafe { result::mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast()) }.ok().map(|()| bytes)
    };
    relaxed(|| {
        Some(PoolState {
            reserved: value(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
            used: value(Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            threshold: value(Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)?,
        })
    })
}

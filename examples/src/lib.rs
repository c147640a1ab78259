//! The device of the examples: a CUDA device, or a simulated one if there is no GPU. A printed line then tells the user.

use std::{ptr, sync::Arc};

use cudarc::driver::{CudaContext, DriverError, result, sys};
use gpumem::{
    Bytes,
    sim::{SimBlock, SimGpu},
};

/// A device to allocate from.
#[derive(Debug)]
pub enum Gpu {
    /// A CUDA device, with its context current on the thread that opened it.
    Cuda(Arc<CudaContext>),
    /// A simulated device.
    Simulated(SimGpu),
}

/// Memory of a device. It is freed on drop.
#[derive(Debug)]
#[must_use = "dropping it frees the memory at once"]
pub enum Block {
    /// It comes from `cuMemAlloc` or `cuMemAllocAsync`.
    Cuda(CudaBlock),
    /// It comes from the simulated device.
    Simulated(SimBlock),
}

/// Memory from `cuMemAlloc` or `cuMemAllocAsync`. It is freed on drop.
#[derive(Debug)]
pub struct CudaBlock {
    context: Arc<CudaContext>,
    address: sys::CUdeviceptr,
    /// True if it was allocated from the pool, on the null stream.
    pooled: bool,
}

/// The reason why a device or a block is not available.
pub type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

impl Gpu {
    /// Returns device 0.
    ///
    /// # Errors
    /// Returns an error if there is a device but it cannot be used.
    pub fn open() -> Result<Self> {
        Self::nth(0)
    }

    /// Returns the device with this ordinal. If there is no GPU, creates simulated devices up to this ordinal.
    ///
    /// # Errors
    /// Returns an error if there are devices but not this one, or if this one cannot be used.
    pub fn nth(ordinal: u32) -> Result<Self> {
        if SimGpu::all()?.is_empty() && gpumem::is_available() {
            return Ok(Self::Cuda(CudaContext::new(ordinal as usize)?));
        }
        if SimGpu::all()?.is_empty() {
            println!("(no GPU here: the examples use simulated ones)");
        }
        while SimGpu::all()?.len() <= ordinal as usize {
            SimGpu::install(Bytes::gib(16))?;
        }
        Ok(Self::Simulated(SimGpu::all()?.swap_remove(ordinal as usize)))
    }

    /// Makes this the calling thread's current device.
    ///
    /// # Errors
    /// Returns an error if the device can no longer be used.
    pub fn make_current(&self) -> Result<()> {
        match self {
            Self::Cuda(context) => context.bind_to_thread()?,
            Self::Simulated(gpu) => gpu.make_current(),
        }
        Ok(())
    }

    /// Allocates memory.
    ///
    /// # Errors
    /// Returns an error if the device is full.
    pub fn alloc(&self, bytes: Bytes) -> Result<Block> {
        match self {
            Self::Cuda(context) => Ok(Block::Cuda(CudaBlock::new(context, bytes, false)?)),
            Self::Simulated(gpu) => Ok(Block::Simulated(gpu.alloc(bytes)?)),
        }
    }

    /// Allocates from the stream-ordered pool, which keeps freed memory for a while.
    ///
    /// # Errors
    /// Returns an error if the device is full, or has no pools.
    pub fn alloc_async(&self, bytes: Bytes) -> Result<Block> {
        match self {
            Self::Cuda(context) => Ok(Block::Cuda(CudaBlock::new(context, bytes, true)?)),
            Self::Simulated(gpu) => Ok(Block::Simulated(gpu.alloc_async(bytes)?)),
        }
    }
}

impl CudaBlock {
    fn new(context: &Arc<CudaContext>, bytes: Bytes, pooled: bool) -> Result<Self, DriverError> {
        context.bind_to_thread()?;
        let bytes = usize::try_from(bytes.get()).expect("64-bit sizes");
        // SAFETY: a context of the device is current. The memory is never read.
        let address =
            unsafe { if pooled { result::malloc_async(ptr::null_mut(), bytes) } else { result::malloc_sync(bytes) } }?;
        Ok(Self { context: Arc::clone(context), address, pooled })
    }
}

impl Drop for CudaBlock {
    fn drop(&mut self) {
        let freed = self.context.bind_to_thread().and_then(|()| {
            // SAFETY: the address came from the matching allocation function in this context and is freed once.
            unsafe {
                if self.pooled {
                    result::free_async(self.address, ptr::null_mut())
                } else {
                    result::free_sync(self.address)
                }
            }
        });
        if let Err(error) = freed {
            eprintln!("cuMemFree: {error}");
        }
    }
}

//! Statistics of this process's allocations, with the names of PyTorch's allocator.

use crate::{
    error::Result,
    model::Bytes,
    report::{LiveBlock, MemoryStats, MemorySummary, PeakBounds},
    session::statistics::{InterceptedDevice, live_blocks},
};

/// Returns the bytes that this process has allocated on a device and not freed, in requested sizes. `id` is the device's CUDA ordinal;
/// `None` is the calling thread's current device.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::{Bytes, gpu_mem_get_used, torch::{max_memory_allocated, memory_allocated, memory_reserved}};
/// assert_eq!(memory_allocated(0)?, 0); // counts from here on
/// let weights = gpu.alloc(Bytes::new(1_000))?;
/// drop(gpu.alloc_async(Bytes::mib(40))?);
/// assert_eq!(memory_allocated(0)?, 1_000);
/// assert_eq!(max_memory_allocated(0)?, 1_000 + (40 << 20));
/// assert_eq!(memory_reserved(0)?, 1_000 + (64 << 20)); // the pool took 2 times 32 MiB, and keeps them
/// assert_eq!(gpu_mem_get_used(), Bytes::mib(2 + 64)); // the block takes a page
/// # drop(weights);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// *Allocated* is what the program requested. *Reserved* ([`memory_reserved`]) is what the driver reserved on the device for it: a
/// stream-ordered pool reserves 32 MiB at a time and keeps them after a free. *Used* ([`gpu_mem_get_used`](crate::gpu_mem_get_used), NVML,
/// `nvidia-smi`) is the memory of the whole device: pages of 2 MiB instead of bytes, the CUDA context (about half a GiB), kernels, and
/// all other processes. A framework with its own allocator (burn, PyTorch) requests large blocks from the driver and divides them;
/// here the large blocks count as allocated.
///
/// Like traces, this counts memory that is certainly on the device. Counting starts with the first trace,
/// [`subscribe`](crate::intercept::subscribe), [`preload`](crate::preload) or the first call of one of these functions. Older blocks are
/// not counted.
///
/// # Errors
/// Returns an error if there is no such device, or if allocations cannot be intercepted: sampled values would include other processes.
#[doc(alias = "torch.cuda.memory_allocated")]
pub fn memory_allocated(id: impl Into<Option<u32>>) -> Result<Bytes> {
    let (all, _) = InterceptedDevice::on(id.into())?.allocated();
    Ok(all.bytes.current)
}

/// Returns the highest value of [`memory_allocated`], at any moment since counting began or since
/// [`reset_peak_memory_stats`].
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::{Bytes, torch::max_memory_allocated};
/// assert_eq!(max_memory_allocated(0)?, 0); // counts from here on
/// drop(gpu.alloc(Bytes::mib(300))?);
/// drop(gpu.alloc(Bytes::mib(100))?);
/// assert_eq!(max_memory_allocated(0)?, Bytes::mib(300));
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// # Errors
/// Returns the same errors as [`memory_allocated`].
#[doc(alias = "torch.cuda.max_memory_allocated")]
pub fn max_memory_allocated(id: impl Into<Option<u32>>) -> Result<Bytes> {
    let (all, _) = InterceptedDevice::on(id.into())?.allocated();
    Ok(all.bytes.peak)
}

/// Returns the memory that the driver reserves on a device for this process's allocations, in use or kept for later:
///
/// - the memory that the device's current stream-ordered pool reserves, as the driver reports it
///   ([`empty_cache`](crate::torch::empty_cache) frees its unused part);
/// - the requested sizes of `cuMemAlloc`, arrays and `cuMemCreate`. The driver rounds them up to pages of 2 MiB, which small blocks
///   share. It does not report how, so the rounding is not counted.
///
/// The driver reports pools that the program created only by their handles, which gpumem does not have. Their live blocks count if they
/// exceed the memory that the current pool reserves.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::{Bytes, torch::{empty_cache, memory_reserved}};
/// # memory_reserved(0)?;
/// drop(gpu.alloc_async(Bytes::mib(40))?);
/// assert_eq!(memory_reserved(0)?, Bytes::mib(64)); // the pool took 2 times 32 MiB, and keeps them
/// empty_cache()?;
/// assert_eq!(memory_reserved(0)?, 0);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// # Errors
/// Returns the same errors as [`memory_allocated`], and one if the pool cannot be read. A device without pools is not an error.
#[doc(alias("torch.cuda.memory_reserved", "torch.cuda.memory_cached", "CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT"))]
pub fn memory_reserved(id: impl Into<Option<u32>>) -> Result<Bytes> {
    Ok(InterceptedDevice::on(id.into())?.reserved()?.current)
}

/// Returns bounds of the highest value of [`memory_reserved`].
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::{Bytes, torch::max_memory_reserved};
/// # gpumem::torch::memory_allocated(0)?;
/// drop(gpu.alloc_async(Bytes::mib(30))?);
/// assert_eq!(max_memory_reserved(0)?.exact(), Some(Bytes::mib(32)));
/// gpumem::torch::empty_cache()?;
/// drop(gpu.alloc(Bytes::mib(10))?);
/// assert_eq!(max_memory_reserved(0)?.to_string(), "32 MiB to 42 MiB"); // not at the same time: it was 32
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// The driver keeps the pool's high-water mark, and gpumem keeps one for each other kind of memory. The marks may be from different
/// moments, so the peak is between the highest mark and the sum of all marks. The two are equal if the program uses only one kind of
/// memory, as with cudarc's streams. The pool's mark counts since the pool was created, or since [`reset_peak_memory_stats`].
///
/// # Errors
/// Returns the same errors as [`memory_reserved`].
#[doc(alias("torch.cuda.max_memory_reserved", "torch.cuda.max_memory_cached", "CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH"))]
pub fn max_memory_reserved(id: impl Into<Option<u32>>) -> Result<PeakBounds> {
    Ok(InterceptedDevice::on(id.into())?.reserved()?.peak)
}

/// Resets the peaks of these statistics to the current values: bytes and blocks of each kind, and reserved memory. Peaks of traces do
/// not change. A program that reads `CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH` itself observes the reset.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::{Bytes, GpuMemTrace, torch::{max_memory_allocated, reset_peak_memory_stats}};
/// let trace = GpuMemTrace::new();
/// for batch in [300, 100] {
///     reset_peak_memory_stats(0)?;
///     drop(gpu.alloc(Bytes::mib(batch))?);
///     assert_eq!(max_memory_allocated(0)?, Bytes::mib(batch));
/// }
/// assert_eq!(trace.data().peaked, Bytes::mib(300));
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// # Errors
/// Returns the same errors as [`memory_reserved`]. Nothing is reset then.
#[doc(alias("torch.cuda.reset_peak_memory_stats", "torch.cuda.reset_max_memory_allocated"))]
pub fn reset_peak_memory_stats(id: impl Into<Option<u32>>) -> Result<()> {
    InterceptedDevice::on(id.into())?.reset_peaks()
}

/// Returns all statistics of a device: bytes and blocks that are allocated now, at the peak, ever allocated and ever freed, in total and
/// for each kind of memory.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # gpumem::torch::memory_allocated(0)?;
/// # use gpumem::Bytes;
/// # let block = gpu.alloc(Bytes::mib(320))?;
/// let stats = gpumem::torch::memory_stats(0)?;
/// assert_eq!((stats.all.bytes.current, stats.kinds.device.blocks.allocated), (Bytes::mib(320), 1));
/// println!("{stats}"); // allocated_bytes.all.current: 335544320, and 50 lines more
/// # assert!(stats.to_string().starts_with("allocated_bytes.all.current: 335544320\n"), "{stats}");
/// # drop(block);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// # Errors
/// Returns the same errors as [`memory_allocated`].
#[doc(alias("torch.cuda.memory_stats", "torch.cuda.memory_stats_as_nested_dict"))]
pub fn memory_stats(id: impl Into<Option<u32>>) -> Result<MemoryStats> {
    Ok(InterceptedDevice::on(id.into())?.stats())
}

/// Returns [`memory_stats`] as a table with PyTorch's layout.
///
/// ```
/// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// println!("{}", gpumem::torch::memory_summary(0)?);
/// # assert!(gpumem::torch::memory_summary(0)?.to_string().contains("Cur Usage"));
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// # Errors
/// Returns the same errors as [`memory_allocated`].
#[doc(alias = "torch.cuda.memory_summary")]
pub fn memory_summary(id: impl Into<Option<u32>>) -> Result<MemorySummary> {
    Ok(memory_stats(id)?.into())
}

/// Returns every live allocation of this process on all devices, the largest first, with its size, kind and source
/// location.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::{Bytes, GpuMemTrace};
/// let weights = GpuMemTrace::scope("load", |_| gpu.alloc(Bytes::mib(256)))?;
/// let blocks = gpumem::torch::memory_snapshot()?;
/// assert_eq!((blocks.len(), blocks[0].bytes, blocks[0].kind), (1, Bytes::mib(256), gpumem::report::MemKind::Device));
/// assert_eq!(blocks[0].path, ["load"]);
/// assert_eq!(blocks[0].id, weights.address());
/// # drop(weights);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// Other threads continue during the call: each block was live at some moment during it.
///
/// # Errors
/// Returns the same errors as [`memory_allocated`].
#[doc(alias = "torch.cuda.memory_snapshot")]
pub fn memory_snapshot() -> Result<Vec<LiveBlock>> {
    live_blocks()
}

//! What this process has allocated, as PyTorch's allocator tells it of itself.

use crate::{
    error::Result,
    model::Bytes,
    report::{LiveBlock, MemoryStats, MemorySummary, PeakBounds},
    session::statistics::{Heard, live_blocks},
};

/// What this process has allocated on a device and not freed, to the byte as it was asked for: on the one with this CUDA
/// ordinal, or with `None` on the calling thread's current one.
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
/// *Allocated* is what the program asked for. *Reserved* ([`memory_reserved`]) is what the driver took from the device for that: a
/// stream-ordered pool takes 32 MiB at a time and keeps them after a free. *Used*, as NVML and `nvidia-smi` show it
/// ([`gpu_mem_get_used`](crate::gpu_mem_get_used)), is of the whole card: pages of 2 MiB instead of bytes, the CUDA context (about
/// half a GiB), kernels, and all other processes. A framework that has an allocator of its own (burn's, PyTorch's) asks for large
/// blocks and hands out parts: what it asked for is allocated here.
///
/// It counts what traces count: memory that is on the device for certain. Counting begins with the first trace,
/// [`subscribe`](crate::intercept::subscribe), [`preload`](crate::preload) or the first call of one of these functions; older blocks are not
/// in it.
///
/// # Errors
/// When there is no such device, and when allocations cannot be intercepted: a sampled figure would be of the whole card.
#[doc(alias = "torch.cuda.memory_allocated")]
pub fn memory_allocated(id: impl Into<Option<u32>>) -> Result<Bytes> {
    let (all, _) = Heard::on(id.into())?.allocated();
    Ok(all.bytes.current)
}

/// The most that [`memory_allocated`] ever was, however short, since counting began or
/// [`reset_peak_memory_stats`] was called.
///
/// # Errors
/// As [`memory_allocated`].
#[doc(alias = "torch.cuda.max_memory_allocated")]
pub fn max_memory_allocated(id: impl Into<Option<u32>>) -> Result<Bytes> {
    let (all, _) = Heard::on(id.into())?.allocated();
    Ok(all.bytes.peak)
}

/// What the driver holds of a device for this process's allocations, in use or kept for later:
///
/// - the backing of the device's current stream-ordered pool, as the driver tells it
///   ([`empty_cache`](crate::torch::empty_cache) has it give back what is unused);
/// - `cuMemAlloc`, arrays and `cuMemCreate` as they were asked for. The driver rounds them up to pages of 2 MiB, which small
///   blocks share; how, it does not tell, so that is not in it.
///
/// Of pools that the program made itself the driver tells nothing without their handles: they count as what is live in them, and
/// only where that is more than the backing of the current pool.
///
/// # Errors
/// As [`memory_allocated`], and when the pool cannot be read. A device without pools is no error.
#[doc(alias("torch.cuda.memory_reserved", "torch.cuda.memory_cached", "CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT"))]
pub fn memory_reserved(id: impl Into<Option<u32>>) -> Result<Bytes> {
    Ok(Heard::on(id.into())?.reserved()?.current)
}

/// The most that [`memory_reserved`] was, as far as that is known.
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
/// The pool keeps its own mark, and gpumem one for each other kind of memory: they are of different moments. The peak lies between
/// the highest of them and their sum; it is exact where a program uses one kind only, as with cudarc's streams. The pool's mark
/// counts since the pool came to be, or since [`reset_peak_memory_stats`].
///
/// # Errors
/// As [`memory_reserved`].
#[doc(alias("torch.cuda.max_memory_reserved", "torch.cuda.max_memory_cached", "CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH"))]
pub fn max_memory_reserved(id: impl Into<Option<u32>>) -> Result<PeakBounds> {
    Ok(Heard::on(id.into())?.reserved()?.peak)
}

/// Has the peaks of these statistics begin anew from what is in use: of bytes and blocks of each kind, and of what is reserved. The
/// peak of no trace begins anew. A program that reads `CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH` itself sees the reset.
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
/// As [`memory_reserved`]; nothing begins anew then.
#[doc(alias("torch.cuda.reset_peak_memory_stats", "torch.cuda.reset_max_memory_allocated"))]
pub fn reset_peak_memory_stats(id: impl Into<Option<u32>>) -> Result<()> {
    Heard::on(id.into())?.reset_peaks()
}

/// All that is counted of a device: bytes and blocks, now, at most, ever allocated and ever freed, in all and for each kind of memory.
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
/// As [`memory_allocated`].
#[doc(alias("torch.cuda.memory_stats", "torch.cuda.memory_stats_as_nested_dict"))]
pub fn memory_stats(id: impl Into<Option<u32>>) -> Result<MemoryStats> {
    Ok(Heard::on(id.into())?.stats())
}

/// [`memory_stats`] as a table for people, laid out as PyTorch's.
///
/// # Errors
/// As [`memory_allocated`].
#[doc(alias = "torch.cuda.memory_summary")]
pub fn memory_summary(id: impl Into<Option<u32>>) -> Result<MemorySummary> {
    Ok(memory_stats(id)?.into())
}

/// Every live allocation of this process on all devices, the largest first: how large it is, where it came from, of what kind it is.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::{Bytes, GpuMemTrace};
/// let weights = GpuMemTrace::scope("load", |_| gpu.alloc(Bytes::mib(256)))?;
/// let blocks = gpumem::torch::memory_snapshot()?;
/// assert_eq!((blocks.len(), blocks[0].bytes, blocks[0].kind), (1, Bytes::mib(256), gpumem::report::MemKind::Device));
/// assert_eq!(blocks[0].path, ["load"]);
/// assert_eq!(blocks[0].key, weights.address());
/// # drop(weights);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// While it is taken other threads go on: each block was live at some moment of the call.
///
/// # Errors
/// As [`memory_allocated`].
#[doc(alias = "torch.cuda.memory_snapshot")]
pub fn memory_snapshot() -> Result<Vec<LiveBlock>> {
    live_blocks()
}

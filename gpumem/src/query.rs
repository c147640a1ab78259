//! `gpu_mem_get` and its family, with fastai's names and contracts. Each has a `try_` variant that returns a `Result`.
//!
//! Only [`preload`] creates a CUDA context, and only the `no_cache` functions wait for the device.

use crate::{
    error::Result,
    model::{Bytes, GpuMemory, GpuProcess},
    session::{self, current},
    source::Devices,
};

/// A device for [`gpu_mem_get_used_fast`], to avoid looking it up each time.
#[derive(Clone, Copy)]
pub struct GpuHandle {
    devices: &'static dyn Devices,
    ordinal: u32,
}

impl GpuHandle {
    /// Finds the device with this CUDA ordinal, or with `None` the calling thread's current one.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// use gpumem::GpuHandle;
    ///
    /// assert_eq!(GpuHandle::new(0)?.ordinal(), 0);
    /// assert!(GpuHandle::new(99).unwrap_err().is_unknown_device());
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if there is no driver, or if there is no such device.
    pub fn new(id: impl Into<Option<u32>>) -> Result<Self> {
        let handle = device(id.into())?;
        handle.memory()?;
        Ok(handle)
    }

    /// Returns the CUDA ordinal of the device.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    pub(crate) fn memory(self) -> Result<GpuMemory> {
        session::alive()?;
        self.devices.read(self.ordinal)
    }

    fn memory_no_cache(self) -> Result<GpuMemory> {
        self.trim()?;
        self.memory()
    }

    pub(crate) fn trim(self) -> Result<()> {
        session::alive()?;
        self.devices.trim(self.ordinal)
    }

    pub(crate) fn processes(self) -> Result<Vec<GpuProcess>> {
        session::alive()?;
        self.devices.processes(self.ordinal)
    }
}

impl std::fmt::Debug for GpuHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GpuHandle").field("ordinal", &self.ordinal).finish_non_exhaustive()
    }
}

pub(crate) fn device(id: Option<u32>) -> Result<GpuHandle> {
    let devices = current().devices()?;
    Ok(GpuHandle { devices, ordinal: devices.device(id)?.ordinal })
}

/// Returns total, free and used memory of one device: the one with this CUDA ordinal, or with `None` the calling thread's current
/// one. Like fastai's function, this returns zeros without a GPU, for a device that cannot be read, and for a device that does
/// not exist. [`try_gpu_mem_get`] returns an error instead.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::mib(4096))?;
/// # let block = gpu.alloc(gpumem::Bytes::mib(160))?;
/// use gpumem::{GpuMemory, gpu_mem_get};
///
/// println!("{}", gpu_mem_get(None)); // GPUMemory(total=4096, free=3936, used=160)
/// assert_eq!(gpu_mem_get(99), GpuMemory::default());
/// # assert_eq!(gpu_mem_get(0).to_string(), "GPUMemory(total=4096, free=3936, used=160)");
/// # Ok::<(), gpumem::Error>(())
/// ```
#[doc(alias("nvmlDeviceGetMemoryInfo_v2", "cuMemGetInfo", "nvidia-smi"))]
pub fn gpu_mem_get(id: impl Into<Option<u32>>) -> GpuMemory {
    try_gpu_mem_get(id).unwrap_or_default()
}

/// Like [`gpu_mem_get`], but returns a `Result`.
///
/// # Errors
/// Returns an error if there is no such device, or it cannot be read.
pub fn try_gpu_mem_get(id: impl Into<Option<u32>>) -> Result<GpuMemory> {
    device(id.into())?.memory()
}

/// Returns [`gpu_mem_get`] of each device that this process sees, by CUDA ordinal. Empty without a GPU. The values of a device
/// that cannot be read are zeros.
///
/// ```
/// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// for (id, memory) in gpumem::gpu_mem_get_all().iter().enumerate() {
///     println!("device {id}: {} of {} are free", memory.free, memory.total); // device 0: 16 GiB of 16 GiB are free
/// }
/// # assert_eq!(gpumem::gpu_mem_get_all().len(), 1);
/// # Ok::<(), gpumem::Error>(())
/// ```
pub fn gpu_mem_get_all() -> Vec<GpuMemory> {
    (0..device_count().unwrap_or(0)).map(gpu_mem_get).collect()
}

/// Like [`gpu_mem_get_all`], but returns a `Result`.
///
/// # Errors
/// Returns an error if there is no driver, or if one of the devices cannot be read.
pub fn try_gpu_mem_get_all() -> Result<Vec<GpuMemory>> {
    (0..device_count()?).map(try_gpu_mem_get).collect()
}

/// Returns the free memory of the current device, without trimming pools. Zero without a GPU.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// let block = gpu.alloc(gpumem::Bytes::gib(4))?;
/// assert_eq!(gpumem::gpu_mem_get_free().to_string(), "12 GiB");
/// assert_eq!(gpumem::try_gpu_mem_get_free()?, gpumem::Bytes::gib(12)); // or an error
/// # drop(block);
/// # Ok::<(), gpumem::Error>(())
/// ```
pub fn gpu_mem_get_free() -> Bytes {
    try_gpu_mem_get_free().unwrap_or_default()
}

/// Like [`gpu_mem_get_free`], but returns a `Result`.
///
/// # Errors
/// Returns an error if the device cannot be read.
pub fn try_gpu_mem_get_free() -> Result<Bytes> {
    Ok(device(None)?.memory()?.free)
}

/// Returns the free memory of the current device without the caches of its stream-ordered pools: waits for the device, trims the
/// pools, then reads. Zero without a GPU. Do not call it while a stream is being captured: this breaks the capture.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::{Bytes, gpu_mem_get_free, gpu_mem_get_free_no_cache};
/// drop(gpu.alloc_async(Bytes::gib(4))?);
/// assert_eq!(gpu_mem_get_free(), Bytes::gib(12)); // the pool keeps 4 GiB
/// assert_eq!(gpu_mem_get_free_no_cache(), Bytes::gib(16));
/// assert_eq!(gpumem::try_gpu_mem_get_free_no_cache()?, Bytes::gib(16)); // or an error
/// # Ok::<(), gpumem::Error>(())
/// ```
#[doc(alias("cuMemPoolTrimTo", "empty_cache"))]
pub fn gpu_mem_get_free_no_cache() -> Bytes {
    try_gpu_mem_get_free_no_cache().unwrap_or_default()
}

/// Like [`gpu_mem_get_free_no_cache`], but returns a `Result`.
///
/// # Errors
/// Returns an error if the device cannot be read, waited for or trimmed, or while a stream is being captured.
pub fn try_gpu_mem_get_free_no_cache() -> Result<Bytes> {
    Ok(device(None)?.memory_no_cache()?.free)
}

/// Returns the used memory of the current device, by all processes, without trimming pools. Zero without a GPU.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// let block = gpu.alloc(gpumem::Bytes::gib(4))?;
/// assert_eq!(gpumem::gpu_mem_get_used().to_string(), "4 GiB");
/// assert_eq!(gpumem::try_gpu_mem_get_used()?, gpumem::Bytes::gib(4)); // or an error
/// # drop(block);
/// # Ok::<(), gpumem::Error>(())
/// ```
pub fn gpu_mem_get_used() -> Bytes {
    try_gpu_mem_get_used().unwrap_or_default()
}

/// Like [`gpu_mem_get_used`], but returns a `Result`.
///
/// # Errors
/// Returns an error if the device cannot be read.
pub fn try_gpu_mem_get_used() -> Result<Bytes> {
    Ok(device(None)?.memory()?.used)
}

/// Returns the used memory of the current device without the caches of its stream-ordered pools: waits for the device, trims the
/// pools, then reads. Zero without a GPU. Do not call it while a stream is being captured: this breaks the capture.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::{Bytes, gpu_mem_get_used, gpu_mem_get_used_no_cache};
/// drop(gpu.alloc_async(Bytes::gib(4))?);
/// assert_eq!(gpu_mem_get_used(), Bytes::gib(4)); // the pool keeps it
/// assert_eq!(gpu_mem_get_used_no_cache(), Bytes::ZERO);
/// assert_eq!(gpumem::try_gpu_mem_get_used_no_cache()?, Bytes::ZERO); // or an error
/// # Ok::<(), gpumem::Error>(())
/// ```
#[doc(alias("cuMemPoolTrimTo", "empty_cache"))]
pub fn gpu_mem_get_used_no_cache() -> Bytes {
    try_gpu_mem_get_used_no_cache().unwrap_or_default()
}

/// Like [`gpu_mem_get_used_no_cache`], but returns a `Result`.
///
/// # Errors
/// Returns an error if the device cannot be read, waited for or trimmed, or while a stream is being captured.
pub fn try_gpu_mem_get_used_no_cache() -> Result<Bytes> {
    Ok(device(None)?.memory_no_cache()?.used)
}

/// Returns the used memory of this handle's device. Zero if it cannot be read.
///
/// ```
/// # gpumem::sim::SimGpu::install(gpumem::Bytes::mib(4096))?;
/// use gpumem::{GpuHandle, gpu_mem_get_used_fast};
///
/// let handle = GpuHandle::new(0)?;
/// assert_eq!(gpu_mem_get_used_fast(&handle).mb(), 0);
/// # Ok::<(), gpumem::Error>(())
/// ```
pub fn gpu_mem_get_used_fast(handle: &GpuHandle) -> Bytes {
    try_gpu_mem_get_used_fast(handle).unwrap_or_default()
}

/// Like [`gpu_mem_get_used_fast`], but returns a `Result`.
///
/// # Errors
/// Returns an error if the device cannot be read.
pub fn try_gpu_mem_get_used_fast(handle: &GpuHandle) -> Result<Bytes> {
    Ok(handle.memory()?.used)
}

/// Returns the device with the most free memory (the first one of a tie) and its free bytes. `(None, 0)` without a GPU. Devices
/// that cannot be read are skipped.
///
/// ```
/// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(24))?;
/// if let (Some(id), free) = gpumem::gpu_with_max_free_mem() {
///     println!("device {id} has {free} free"); // device 1 has 24 GiB free
/// }
/// # assert_eq!(gpumem::gpu_with_max_free_mem(), (Some(1), gpumem::Bytes::gib(24)));
/// # Ok::<(), gpumem::Error>(())
/// ```
pub fn gpu_with_max_free_mem() -> (Option<u32>, Bytes) {
    let count = device_count().unwrap_or(0);
    let best = most_free((0..count).filter_map(|id| try_gpu_mem_get(id).ok().map(|memory| (id, memory.free))));
    best.map_or((None, Bytes::ZERO), |(id, free)| (Some(id), free))
}

/// Like [`gpu_with_max_free_mem`], but returns a `Result`; `None` when the process sees no device.
///
/// # Errors
/// Returns an error if there is no driver, or if one of the devices cannot be read.
pub fn try_gpu_with_max_free_mem() -> Result<Option<(u32, Bytes)>> {
    Ok(most_free((0..).zip(try_gpu_mem_get_all()?).map(|(id, memory)| (id, memory.free))))
}

fn most_free(devices: impl IntoIterator<Item = (u32, Bytes)>) -> Option<(u32, Bytes)> {
    devices.into_iter().reduce(|best, device| if device.1 > best.1 { device } else { best })
}

/// Creates the CUDA context of the current device, if it does not exist, and keeps it for the life of the process. A context
/// takes about half a GiB, which the first sampled trace would otherwise count as used. Does nothing without a GPU.
///
/// If exact traces are possible, this also starts to intercept allocations, as [`subscribe`](crate::intercept::subscribe) does,
/// so that gpumem knows the blocks that are allocated before the first trace. The calling thread's current context does not
/// change.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// gpumem::preload(); // before the first allocation
/// let weights = gpu.alloc(gpumem::Bytes::mib(256))?;
/// assert_eq!(gpumem::status().events, 1); // the allocation is known, although no trace has started
/// # drop(weights);
/// # Ok::<(), gpumem::Error>(())
/// ```
#[doc(alias("cuDevicePrimaryCtxRetain", "preload_pytorch"))]
pub fn preload() {
    let _ = try_preload();
}

/// Like [`preload`], but returns a `Result`.
///
/// # Errors
/// Returns an error if there is no GPU, or if the context cannot be created.
pub fn try_preload() -> Result<()> {
    let GpuHandle { devices, ordinal } = device(None)?;
    devices.preload(ordinal)?;
    current().prepare(devices);
    Ok(())
}

/// Returns bytes as whole MB (2^20), rounded down.
///
/// ```
/// assert_eq!(gpumem::b2mb(161_u64 * 1024 * 1024 + 5), 161);
/// ```
pub fn b2mb(bytes: impl Into<Bytes>) -> u64 {
    bytes.into().mb()
}

/// Returns whether there is a device to measure, real or simulated.
///
/// ```
/// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// if !gpumem::is_available() {
///     println!("no GPU: the figures will be zeros");
/// }
/// # assert!(gpumem::is_available());
/// # Ok::<(), gpumem::Error>(())
/// ```
#[doc(alias = "torch.cuda.is_available")]
pub fn is_available() -> bool {
    device_count().is_ok_and(|count| count > 0)
}

/// Returns the number of devices that this process sees.
///
/// ```
/// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// assert_eq!(gpumem::device::count()?, 1);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// # Errors
/// Returns an error if there is no driver, or if it cannot be initialized.
#[doc(alias("cuDeviceGetCount", "torch.cuda.device_count"))]
pub fn device_count() -> Result<u32> {
    current().devices()?.count()
}

/// Returns the CUDA ordinal of the calling thread's current device. 0 if the thread has not chosen one.
///
/// ```
/// # let first = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # let second = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// first.make_current(); // as `cudaSetDevice` does
/// assert_eq!(gpumem::device::current()?, 0);
/// second.make_current();
/// assert_eq!(gpumem::device::current()?, 1);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// # Errors
/// Returns an error if there is no driver, or if it cannot be initialized.
#[doc(alias("cuCtxGetDevice", "torch.cuda.current_device"))]
pub fn current_device() -> Result<u32> {
    current().devices()?.current()
}

/// Returns the name of a device, such as `NVIDIA H200`: the one with this CUDA ordinal, or with `None` the calling
/// thread's current one.
///
/// ```
/// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// println!("{}", gpumem::device::name(0)?); // NVIDIA H200, or here: simulated GPU (16 GiB)
/// # assert_eq!(gpumem::device::name(0)?, "simulated GPU (16 GiB)");
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// # Errors
/// Returns an error if there is no driver, or if there is no such device.
#[doc(alias("cuDeviceGetName", "torch.cuda.get_device_name"))]
pub fn device_name(id: impl Into<Option<u32>>) -> Result<String> {
    let GpuHandle { devices, ordinal } = device(id.into())?;
    devices.name(ordinal)
}

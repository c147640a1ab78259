//! The functions of `torch.cuda` under PyTorch's names: device queries, and the statistics of the allocator. They return an error if a
//! value is not known.

mod statistics;

use std::fmt;

pub use self::statistics::{
    max_memory_allocated, max_memory_reserved, memory_allocated, memory_reserved, memory_snapshot, memory_stats,
    memory_summary, reset_peak_memory_stats,
};
pub use crate::query::{current_device, device_count, is_available};
use crate::{
    error::Result,
    model::{Bytes, GpuProcess, ProcessKind},
    query,
};

/// Returns the free and total memory of a device. `id` is its CUDA ordinal; `None` is the calling thread's current device. The total
/// does not include the memory that the driver keeps for itself, if this is known.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # let block = gpu.alloc(gpumem::Bytes::gib(4))?;
/// let (free, total) = gpumem::torch::mem_get_info(None)?;
/// println!("{free} of {total} are free"); // 12 GiB of 16 GiB are free
/// # assert_eq!(format!("{free} of {total} are free"), "12 GiB of 16 GiB are free");
/// # drop(block);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// PyTorch creates a CUDA context for this; gpumem does not.
///
/// # Errors
/// Returns an error if there is no such device, or it cannot be read.
#[doc(alias("cudaMemGetInfo", "cuMemGetInfo", "torch.cuda.mem_get_info"))]
pub fn mem_get_info(id: impl Into<Option<u32>>) -> Result<(Bytes, Bytes)> {
    let memory = query::device(id.into())?.memory()?;
    let reserved = memory.reserved.unwrap_or_default();
    Ok((memory.free, memory.total.checked_sub(reserved).unwrap_or(memory.total)))
}

/// Frees the unused memory of the stream-ordered pools of all devices: waits for each device on which this process has a context, then
/// trims its pools. Caches of a framework's own allocator are not affected.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::{Bytes, gpu_mem_get_used};
/// drop(gpu.alloc_async(Bytes::mib(64))?);
/// assert_eq!(gpu_mem_get_used().mb(), 64); // the pool keeps it
/// gpumem::torch::empty_cache()?;
/// assert_eq!(gpu_mem_get_used().mb(), 0);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// # Errors
/// Returns an error if there is no driver, if a device cannot be waited for or trimmed, or while a stream is being captured, because
/// it would break the capture.
#[doc(alias("cuMemPoolTrimTo", "torch.cuda.empty_cache"))]
pub fn empty_cache() -> Result<()> {
    (0..query::device_count()?).try_for_each(|id| query::device(Some(id))?.trim())
}

/// Returns the processes that use a device, and how much memory each uses. `id` is the device's CUDA ordinal; `None` is the calling
/// thread's current device. `Display` is PyTorch's text.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # let block = gpu.alloc(gpumem::Bytes::mib(538))?;
/// let processes = gpumem::torch::list_gpu_processes(0)?;
/// println!("{processes}");
/// // GPU:0
/// // process       1234 uses      538.000 MB GPU memory
/// # let pid = std::process::id();
/// # assert_eq!(processes.to_string(), format!("GPU:0\nprocess {pid:>10} uses      538.000 MB GPU memory"));
/// # drop(block);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// In a container the driver may list no processes, or list them with their process ids outside the container.
///
/// # Errors
/// Returns an error if there is no such device, if it cannot be read, or if NVML is missing.
#[doc(alias("nvmlDeviceGetComputeRunningProcesses", "nvidia-smi", "torch.cuda.list_gpu_processes"))]
pub fn list_gpu_processes(id: impl Into<Option<u32>>) -> Result<GpuProcesses> {
    let handle = query::device(id.into())?;
    Ok(GpuProcesses { device: handle.ordinal(), processes: handle.processes()? })
}

/// Returns the name of a device, like [`device::name`](crate::device::name).
///
/// ```
/// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// assert_eq!(gpumem::torch::get_device_name(0)?, "simulated GPU (16 GiB)");
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// # Errors
/// Returns an error if there is no driver, or if there is no such device.
#[doc(alias("cuDeviceGetName", "torch.cuda.get_device_name"))]
pub fn get_device_name(id: impl Into<Option<u32>>) -> Result<String> {
    query::device_name(id)
}

/// The processes that use a device, from [`list_gpu_processes`].
///
/// `Display` is PyTorch's text: only processes that compute, and `N/A` for unknown amounts.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuProcesses {
    /// The device's CUDA ordinal.
    pub device: u32,
    /// The processes by pid. Includes those that only draw.
    pub processes: Vec<GpuProcess>,
}

impl fmt::Display for GpuProcesses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU:{}", self.device)?;
        let mut computing = self.processes.iter().filter(|process| process.kind != ProcessKind::Graphics).peekable();
        if computing.peek().is_none() {
            f.write_str("\nno processes are running")?;
        }
        for GpuProcess { pid, used, .. } in computing {
            #[expect(clippy::cast_precision_loss, reason = "the device has less than 2^53 bytes")]
            let used =
                used.map_or_else(|| "N/A".to_owned(), |used| format!("{:.3}", used.get() as f64 / f64::from(1 << 20)));
            write!(f, "\nprocess {pid:>10} uses {used:>12} MB GPU memory")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, used: Option<u64>, kind: ProcessKind) -> GpuProcess {
        let mut process = GpuProcess::new(pid, kind);
        process.used = used.map(Bytes::new);
        process
    }

    /// The format of `torch.cuda.list_gpu_processes` is `{pid:>10d} uses {mem:>12.3f} MB GPU memory`.
    #[test]
    fn processes_print_as_in_pytorch() {
        let text = |processes| GpuProcesses { device: 1, processes }.to_string();
        assert_eq!(text(vec![]), "GPU:1\nno processes are running");
        assert_eq!(text(vec![process(5, Some(1 << 20), ProcessKind::Graphics)]), "GPU:1\nno processes are running");
        let processes = vec![
            process(1234, Some(538 << 20), ProcessKind::Compute),
            process(4_000_000_000, Some((81_920 << 20) + 1_000), ProcessKind::Both),
            process(7, None, ProcessKind::Compute),
        ];
        let expected = "GPU:1
process       1234 uses      538.000 MB GPU memory
process 4000000000 uses    81920.001 MB GPU memory
process          7 uses          N/A MB GPU memory";
        assert_eq!(text(processes), expected);
    }
}

//! Reads the GPUs of a machine with NVML alone, as the command shows them, including those that `CUDA_VISIBLE_DEVICES` hides. CUDA is
//! loaded only for its ordinals, and for a GPU whose memory NVML cannot read. The driver is initialised then, and no context is
//! created.

use std::collections::HashMap;

use super::{
    cuda::{machine_memory, read_by_nvml},
    processes,
};
pub use crate::sys::nvml::file as nvml_file;
use crate::{
    error::Result,
    model::{GpuMemory, GpuProcess},
    sys::{cuda, nvml},
};

/// NVML's data of the machine.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The version of the driver, such as `580.159.04`.
    pub driver: Result<String>,
    /// NVML's own version.
    pub nvml: Result<String>,
    /// The newest version of CUDA that the driver supports: major and minor.
    pub cuda: Result<(i32, i32)>,
    /// The GPUs by NVML's numbers, which are those of `nvidia-smi`. The error of one does not hide the others.
    pub gpus: Vec<Result<Gpu>>,
}

/// A GPU, or a MIG slice of one.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// The name, such as `NVIDIA H200`.
    pub name: Result<String>,
    /// The UUID, as `nvidia-smi -L` prints it: `GPU-…`, or `MIG-…` for a slice.
    pub uuid: String,
    /// One reading.
    pub memory: Result<GpuMemory>,
    /// True if it has no memory of its own and NVML has no figures of it: the figures are those of the machine's
    /// memory.
    pub is_memory_of_machine: bool,
    /// The slices, if it is in MIG mode; `None` if not.
    pub slices: Result<Option<Vec<Self>>>,
}

impl Gpu {
    fn of(handle: &nvml::Handle, index: u32, slices: Result<Option<Vec<Self>>>) -> Self {
        let (memory, is_memory_of_machine) = match read_by_nvml(handle, index) {
            Err(why) if why.is_unavailable() && is_integrated(&handle.uuid) => (machine_memory().ok_or(why), true),
            memory => (memory, false),
        };
        Self { name: handle.name(index), uuid: handle.uuid.clone(), memory, is_memory_of_machine, slices }
    }
}

/// Returns whether CUDA's device with this UUID has no memory of its own. It initialises the driver.
fn is_integrated(uuid: &str) -> bool {
    let uuid = uuid.split_once('-').map_or(uuid, |(_, uuid)| uuid);
    let device = cuda::devices().ok().and_then(|devices| devices.iter().find(|device| device.uuid() == uuid));
    device.is_some_and(|device| cuda::is_integrated(device.ordinal))
}

/// Reads all GPUs.
///
/// # Errors
/// Returns an error if NVML cannot be loaded or initialised, or does not know how many GPUs there are.
pub fn machine() -> Result<Machine> {
    let gpus = (0..nvml::count()?).map(gpu).collect();
    Ok(Machine { driver: nvml::driver_version(), nvml: nvml::version(), cuda: nvml::cuda_version(), gpus })
}

fn gpu(index: u32) -> Result<Gpu> {
    let handle = nvml::device_by_index(index)?;
    let slices = handle.mig_mode(index).and_then(|mode| {
        let is_on = mode == Some(true);
        let slices = || Ok(handle.slices(index)?.iter().map(|slice| Gpu::of(slice, index, Ok(None))).collect());
        is_on.then(slices).transpose()
    });
    Ok(Gpu::of(&handle, index, slices))
}

/// Returns the processes that use the GPU with this number of NVML's, by pid.
///
/// # Errors
/// Returns an error if NVML or the GPU cannot be read.
pub fn processes_on(index: u32) -> Result<Vec<GpuProcess>> {
    processes::on(&nvml::device_by_index(index)?, index)
}

/// Returns the peak of each of these processes on the GPU with this number of NVML's, in bytes. Empty unless the driver's
/// accounting is enabled.
pub fn accounted_peaks(index: u32, pids: impl Iterator<Item = u32>) -> HashMap<u32, u64> {
    let Some(handle) = nvml::device_by_index(index).ok().filter(nvml::Handle::keeps_accounts) else {
        return HashMap::new();
    };
    pids.filter_map(|pid| Some((pid, handle.accounted_peak(pid)?))).collect()
}

/// A device of CUDA's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaDevice {
    /// The UUID without `GPU-` or `MIG-`, because the driver does not say which.
    pub uuid: String,
    /// The name, such as `NVIDIA H200`.
    pub name: Result<String>,
}

/// Returns the devices that a process with this environment sees, by CUDA's ordinal. It initialises the driver, and creates
/// no context.
///
/// # Errors
/// Returns an error if there is no driver, or if it cannot be initialised.
pub fn cuda_devices() -> Result<Vec<CudaDevice>> {
    let devices = cuda::devices()?.iter();
    Ok(devices.map(|device| CudaDevice { uuid: device.uuid(), name: device.name() }).collect())
}

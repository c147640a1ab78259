//! Reads the GPUs of a machine with NVML, for the command, including GPUs that `CUDA_VISIBLE_DEVICES` hides. CUDA is loaded only for its
//! ordinals, and for a GPU whose memory NVML cannot read. That initializes the driver, but does not create a context.

use std::collections::HashMap;

use super::{cuda::machine_memory, processes, readings::read_by_nvml};
pub use crate::sys::nvml::file as nvml_file;
use crate::{
    error::Result,
    model::{GpuMemory, GpuProcess},
    sys::{cuda, nvml},
};

/// NVML's data about the machine.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The version of the driver, such as `580.159.04`.
    pub driver: Result<String>,
    /// The NVML version.
    pub nvml: Result<String>,
    /// The latest CUDA version that the driver supports: major and minor.
    pub cuda: Result<(i32, i32)>,
    /// The GPUs by NVML's index, which `nvidia-smi` uses as well. An error for one GPU does not hide the others.
    pub gpus: Vec<Result<Gpu>>,
}

/// A GPU, or a MIG slice of a GPU.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// The name, such as `NVIDIA H200`.
    pub name: Result<String>,
    /// The UUID, as `nvidia-smi -L` prints it: `GPU-…`, or `MIG-…` for a slice.
    pub uuid: String,
    /// A reading of the memory.
    pub memory: Result<GpuMemory>,
    /// True if the GPU is integrated and NVML cannot read its memory. The values then describe the machine's memory.
    pub is_memory_of_machine: bool,
    /// The slices, if the GPU is in MIG mode; `None` if it is not.
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

/// Returns whether the CUDA device with this UUID is integrated. Initializes the driver.
fn is_integrated(uuid: &str) -> bool {
    let uuid = uuid.split_once('-').map_or(uuid, |(_, uuid)| uuid);
    let device = cuda::devices().ok().and_then(|devices| devices.iter().find(|device| device.uuid() == uuid));
    device.is_some_and(|device| cuda::is_integrated(device.ordinal))
}

/// Reads all GPUs.
///
/// # Errors
/// Returns an error if NVML cannot be loaded or initialized, or cannot count the GPUs.
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

/// Returns the processes that use the GPU with this NVML index, by pid.
///
/// # Errors
/// Returns an error if NVML or the GPU cannot be read.
pub fn processes_on(index: u32) -> Result<Vec<GpuProcess>> {
    processes::on(&nvml::device_by_index(index)?, index)
}

/// Returns the peak of each of these processes, in bytes, on the GPU with this NVML index. Empty unless the driver's accounting is enabled.
pub fn accounted_peaks(index: u32, pids: impl Iterator<Item = u32>) -> HashMap<u32, u64> {
    let Some(handle) = nvml::device_by_index(index).ok().filter(nvml::Handle::keeps_accounts) else {
        return HashMap::new();
    };
    pids.filter_map(|pid| Some((pid, handle.accounted_peak(pid)?))).collect()
}

/// A CUDA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaDevice {
    /// The UUID without `GPU-` or `MIG-`, because the driver does not tell which of the two it is.
    pub uuid: String,
    /// The name, such as `NVIDIA H200`.
    pub name: Result<String>,
}

/// Returns the devices that a process with this environment sees, by CUDA ordinal. Initializes the driver, but does not create a context.
///
/// # Errors
/// Returns an error if there is no driver or it cannot be initialized.
pub fn cuda_devices() -> Result<Vec<CudaDevice>> {
    let devices = cuda::devices()?.iter();
    Ok(devices.map(|device| CudaDevice { uuid: device.uuid(), name: device.name() }).collect())
}

//! Reads the memory of CUDA's devices by NVML, which finds a device by its UUID.

use once_cell::sync::OnceCell;

use super::cards;
use crate::{
    error::{Error, Kind, Result},
    model::GpuMemory,
    sys::{
        cuda::{self, CudaDevice},
        nvml,
    },
};

pub(super) fn device(ordinal: u32) -> Result<CudaDevice> {
    let devices = cuda::devices()?;
    devices.get(ordinal as usize).copied().ok_or_else(|| {
        let count = u32::try_from(devices.len()).unwrap_or(u32::MAX);
        Kind::NoDevice { ordinal, count, simulated: false }.into()
    })
}

/// Returns NVML's handle of this device, which is looked up only once.
pub(super) fn handle(device: CudaDevice) -> Result<&'static nvml::Handle> {
    static HANDLES: OnceCell<Vec<OnceCell<nvml::Handle>>> = OnceCell::new();
    let handles =
        HANDLES.get_or_try_init(|| Ok::<_, Error>(cuda::devices()?.iter().map(|_| OnceCell::new()).collect()))?;
    handles[device.ordinal as usize].get_or_try_init(|| nvml::device_by_uuid(&device.uuid(), device.ordinal))
}

pub(super) fn by_nvml(device: CudaDevice) -> Result<GpuMemory> {
    read_by_nvml(handle(device)?, device.ordinal)
}

/// NVML's list of the compute processes on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ListedMemory {
    /// The bytes of this process; `None` if it is not listed, as without a context and in some containers, or if its memory is not known.
    pub(super) own: Option<u64>,
    /// The number of other processes.
    pub(super) others: usize,
}

/// Returns the memory of this process on a device by NVML's list of processes.
pub(super) fn listed_memory(ordinal: u32) -> Option<ListedMemory> {
    let listed = handle(device(ordinal).ok()?).ok()?.compute_processes(ordinal).ok()?;
    let is_own = |pid: u32| pid == std::process::id();
    // A process has one entry for each MIG slice.
    let own: Vec<_> = listed.iter().filter(|(pid, _)| is_own(*pid)).map(|(_, bytes)| *bytes).collect();
    let own_bytes = own.iter().copied().sum::<Option<u64>>().filter(|_| !own.is_empty());
    Some(ListedMemory { own: own_bytes, others: listed.len() - own.len() })
}

/// Returns the memory of a device that is in use, in bytes, by NVML.
pub(super) fn device_memory(ordinal: u32) -> Option<u64> {
    by_nvml(device(ordinal).ok()?).ok().map(|memory| memory.used.get())
}

/// Returns whether NVML shows the memory of this process. Of simulated GPUs it shows nothing, and if the GPUs only have another size, only its
/// list of processes is real.
pub(super) fn lists_processes() -> bool {
    has_nvml() || has_only_list()
}

/// Returns whether only NVML's list of processes is real.
pub(super) fn has_only_list() -> bool {
    cards::have_real_drivers_memory()
}

/// Returns whether NVML can be used: it does not know the simulated GPUs of a dry run.
pub(super) fn has_nvml() -> bool {
    cards::replaced_cards().is_none()
}

/// Reads the memory of the device behind this NVML handle. Errors name the device by `number`.
pub(super) fn read_by_nvml(handle: &nvml::Handle, number: u32) -> Result<GpuMemory> {
    let memory = handle.memory(number)?;
    // If a value is not available, NVML returns u64::MAX, or 0 for the total.
    let total = memory.total;
    if [0, u64::MAX].contains(&total.get()) || memory.free > total || memory.used > total {
        return Err(Kind::NoMemoryInfo { source: "NVML", device: number }.into());
    }
    Ok(memory)
}

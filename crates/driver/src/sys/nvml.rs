//! NVML through `nvml-wrapper`: device memory by UUID.

use std::{
    ffi::OsStr,
    mem::MaybeUninit,
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use nvml_wrapper::{
    Device, Nvml,
    enums::device::UsedGpuMemory,
    error::{NvmlError, nvml_try},
    struct_wrappers::device::ProcessInfo,
};
use once_cell::sync::OnceCell;

use super::loader;
use crate::{
    error::{Error, Kind},
    model::{Bytes, GpuMemory},
};

const LIBRARY: &str = "libnvidia-ml";

/// The names of the library. The driver installs the name with `.1`. Only the toolkit adds the name without it, which is the only one that
/// nvml-wrapper tries.
const NAMES: &[&str] = if cfg!(windows) { &["nvml.dll"] } else { &["libnvidia-ml.so.1", "libnvidia-ml.so"] };

/// A device as NVML knows it.
#[derive(Debug)]
pub(crate) struct Handle {
    device: Device<'static>,
    /// The UUID, as `nvidia-smi -L` prints it: `GPU-…`, or `MIG-…` for a slice.
    pub(crate) uuid: String,
}

/// A process in one of NVML's lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ListedProcess {
    pub(crate) pid: u32,
    /// The memory in bytes; `None` if it is not available.
    pub(crate) used: Option<u64>,
    pub(crate) graphics: bool,
    /// The GPU instance and the compute instance in MIG mode.
    pub(crate) slice: (Option<u32>, Option<u32>),
}

/// Returns NVML, initialized once per process. A failure is kept as well, because each attempt looks up every symbol.
fn nvml() -> Result<&'static Nvml, Error> {
    static NVML: OnceCell<Result<Nvml, Error>> = OnceCell::new();
    NVML.get_or_init(init).as_ref().map_err(Clone::clone)
}

fn init() -> Result<Nvml, Error> {
    let open = |name: &&str| Nvml::builder().lib_path(OsStr::new(name)).init();
    let unloadable = |found: &Result<Nvml, NvmlError>| matches!(found, Err(NvmlError::LibloadingError(_)));
    let found = NAMES.iter().map(open).find(|found| !unloadable(found));
    found.unwrap_or_else(|| open(&NAMES[0])).map_err(failed("nvmlInit_v2", None))
}

/// True while a thread is in [`open_all`].
static IS_OPENING: AtomicBool = AtomicBool::new(false);

/// Loads NVML and opens each GPU, which takes about 15 ms. Later calls find them open.
pub(crate) fn open_all() {
    IS_OPENING.store(true, Relaxed);
    for index in 0..count().unwrap_or(0) {
        let _ = device_by_index(index);
    }
    IS_OPENING.store(false, Relaxed);
}

/// Returns whether a thread is in [`open_all`], so that a reading would wait for it.
pub(crate) fn is_opening() -> bool {
    IS_OPENING.load(Relaxed)
}

/// Returns the path of the NVML library that a process with this environment loads.
///
/// # Errors
/// Returns an error if NVML cannot be loaded or initialized.
pub fn file() -> Result<PathBuf, Error> {
    let function = nvml()?.lib().nvmlInit_v2.as_ref().map(|function| *function as usize);
    let found = function.ok().and_then(loader::file_of);
    found.ok_or_else(|| Kind::NoSymbol { library: LIBRARY, symbol: "nvmlInit_v2".to_owned() }.into())
}

/// Returns the device with this UUID: a whole GPU, or a MIG slice.
#[doc(alias = "nvmlDeviceGetHandleByUUID")]
pub(crate) fn device_by_uuid(uuid: &str, ordinal: u32) -> Result<Handle, Error> {
    let nvml = nvml()?;
    let find = |prefix: &str| {
        let uuid = format!("{prefix}-{uuid}");
        nvml.device_by_uuid(uuid.as_str()).map(|device| Handle { device, uuid })
    };
    match find("GPU") {
        Ok(whole) => Ok(whole),
        Err(whole) => match find("MIG") {
            Ok(slice) => Ok(slice),
            // A driver without MIG rejects this form, so the error for the whole GPU is returned.
            Err(_) => Err(call_failed("nvmlDeviceGetHandleByUUID", whole, Some(ordinal))),
        },
    }
}

/// Returns the version of the driver, such as `580.159.04`.
#[doc(alias = "nvmlSystemGetDriverVersion")]
pub(crate) fn driver_version() -> Result<String, Error> {
    nvml()?.sys_driver_version().map_err(failed("nvmlSystemGetDriverVersion", None))
}

/// Returns the NVML version.
#[doc(alias = "nvmlSystemGetNVMLVersion")]
pub(crate) fn version() -> Result<String, Error> {
    nvml()?.sys_nvml_version().map_err(failed("nvmlSystemGetNVMLVersion", None))
}

/// Returns the latest CUDA version that the driver supports: major and minor.
#[doc(alias = "nvmlSystemGetCudaDriverVersion_v2")]
pub(crate) fn cuda_version() -> Result<(i32, i32), Error> {
    let version = nvml()?.sys_cuda_driver_version().map_err(failed("nvmlSystemGetCudaDriverVersion_v2", None))?;
    Ok((version / 1000, version % 1000 / 10))
}

/// Returns the number of GPUs. `CUDA_VISIBLE_DEVICES` does not affect it.
#[doc(alias = "nvmlDeviceGetCount_v2")]
pub(crate) fn count() -> Result<u32, Error> {
    nvml()?.device_count().map_err(failed("nvmlDeviceGetCount_v2", None))
}

/// Returns the GPU with this NVML index.
#[doc(alias("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"))]
pub(crate) fn device_by_index(index: u32) -> Result<Handle, Error> {
    let device = nvml()?.device_by_index(index).map_err(failed("nvmlDeviceGetHandleByIndex_v2", Some(index)))?;
    with_uuid(device, index)
}

fn with_uuid(device: Device<'static>, index: u32) -> Result<Handle, Error> {
    let uuid = device.uuid().map_err(failed("nvmlDeviceGetUUID", Some(index)))?;
    Ok(Handle { device, uuid })
}

impl Handle {
    /// Returns the name, such as `NVIDIA H200`.
    #[doc(alias = "nvmlDeviceGetName")]
    pub(crate) fn name(&self, index: u32) -> Result<String, Error> {
        self.device.name().map_err(failed("nvmlDeviceGetName", Some(index)))
    }

    /// Returns whether the GPU is in MIG mode, or `None` if it does not support MIG or the driver is too old for it.
    #[doc(alias = "nvmlDeviceGetMigMode")]
    pub(crate) fn mig_mode(&self, index: u32) -> Result<Option<bool>, Error> {
        match self.device.mig_mode() {
            Ok(mode) => Ok(Some(mode.current == 1)),
            Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound) => Ok(None),
            Err(error) => Err(call_failed("nvmlDeviceGetMigMode", error, Some(index))),
        }
    }

    /// Returns the MIG slices of the GPU.
    #[doc(alias("nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex"))]
    pub(crate) fn slices(&self, index: u32) -> Result<Vec<Self>, Error> {
        let most = self.device.mig_device_count().map_err(failed("nvmlDeviceGetMaxMigDeviceCount", Some(index)))?;
        let mut slices = Vec::new();
        for slice in 0..most {
            match self.device.mig_device_by_index(slice) {
                Ok(device) => slices.push(with_uuid(device, index)?),
                // There may be slices after an index without one.
                Err(NvmlError::NotFound | NvmlError::InvalidArg) => {}
                Err(error) => return Err(call_failed("nvmlDeviceGetMigDeviceHandleByIndex", error, Some(index))),
            }
        }
        Ok(slices)
    }

    /// Reads the device's memory.
    #[doc(alias = "nvmlDeviceGetMemoryInfo_v2")]
    pub(crate) fn memory(&self, ordinal: u32) -> Result<GpuMemory, Error> {
        match self.device.memory_info() {
            Ok(info) => {
                let [total, free, used, reserved] = [info.total, info.free, info.used, info.reserved].map(Bytes::new);
                Ok(GpuMemory::new(total, free, used, Some(reserved)))
            }
            Err(NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound) => {
                self.memory_v1().map_err(failed("nvmlDeviceGetMemoryInfo", Some(ordinal)))
            }
            Err(error) => Err(call_failed("nvmlDeviceGetMemoryInfo_v2", error, Some(ordinal))),
        }
    }

    /// Returns the processes with a compute or a graphics context on the device. A process may be listed more than once.
    #[doc(alias("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"))]
    pub(crate) fn processes(&self, ordinal: u32) -> Result<Vec<ListedProcess>, Error> {
        let device = &self.device;
        let older = |found: Result<Vec<ProcessInfo>, NvmlError>, older: &dyn Fn() -> Result<_, NvmlError>| match found {
            Err(NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound) => older(),
            found => found,
        };
        let compute = older(device.running_compute_processes(), &|| device.running_compute_processes_v2())
            .map_err(failed("nvmlDeviceGetComputeRunningProcesses_v3", Some(ordinal)))?;
        let graphics = older(device.running_graphics_processes(), &|| device.running_graphics_processes_v2())
            .map_err(failed("nvmlDeviceGetGraphicsRunningProcesses_v3", Some(ordinal)));
        let of_mps = device
            .mps_running_compute_processes()
            .map_err(failed("nvmlDeviceGetMPSComputeRunningProcesses_v3", Some(ordinal)));
        // Some devices and drivers do not have these two lists, which then count as empty.
        let if_available = |list: Result<_, Error>| match list {
            Err(error) if error.is_unavailable() => Ok(Vec::new()),
            list => list,
        };
        let listed = |graphics| {
            move |process: ProcessInfo| ListedProcess {
                pid: process.pid,
                used: match process.used_gpu_memory {
                    UsedGpuMemory::Used(bytes) => Some(bytes),
                    UsedGpuMemory::Unavailable => None,
                },
                graphics,
                slice: (process.gpu_instance_id, process.compute_instance_id),
            }
        };
        let computing = compute.into_iter().chain(if_available(of_mps)?).map(listed(false));
        Ok(computing.chain(if_available(graphics)?.into_iter().map(listed(true))).collect())
    }

    /// Returns the compute processes on the device, each with its memory in bytes, or `None` if that is not available. Unlike
    /// [`processes`](Self::processes), this makes one call of NVML, because it is made around calls of the program.
    #[doc(alias = "nvmlDeviceGetComputeRunningProcesses_v3")]
    pub(crate) fn compute_processes(&self, ordinal: u32) -> Result<Vec<(u32, Option<u64>)>, Error> {
        /// More processes than any device has.
        const MOST: u32 = 1 << 12;
        const CALL: &str = "nvmlDeviceGetComputeRunningProcesses_v3";
        let Ok(call) = &self.device.nvml().lib().nvmlDeviceGetComputeRunningProcesses_v3 else {
            return Err(Kind::NoSymbol { library: LIBRARY, symbol: CALL.to_owned() }.into());
        };
        let mut room = 32;
        loop {
            let mut processes = Vec::with_capacity(room as usize);
            let mut count = room;
            // SAFETY: the function pointer is the library's own and has this signature. The library stays loaded, because `Nvml` is
            // `'static`, and the handle came from it. The call writes at most `count` structs, for which the vector has room, and the
            // number of them to `count`.
            let answer = unsafe { nvml_try(call(self.device.handle(), &raw mut count, processes.as_mut_ptr())) };
            match answer {
                Ok(()) => {
                    // SAFETY: the call succeeded, so it has written `count` structs, which is at most `room`.
                    unsafe { processes.set_len(count.min(room) as usize) };
                    let memory = |bytes| Some(bytes).filter(|bytes| *bytes != u64::MAX);
                    return Ok(processes.iter().map(|process| (process.pid, memory(process.usedGpuMemory))).collect());
                }
                Err(NvmlError::InsufficientSize(_)) if room < MOST => room *= 8,
                Err(error) => return Err(call_failed(CALL, error, Some(ordinal))),
            }
        }
    }

    /// Returns whether the driver keeps accounts of the peak memory of each process. This is off unless an administrator turns it on.
    #[doc(alias = "nvmlDeviceGetAccountingMode")]
    pub(crate) fn keeps_accounts(&self) -> bool {
        self.device.is_accounting_enabled().unwrap_or(false)
    }

    /// Returns the peak of a process in bytes, if the driver's accounting is enabled and knows the process.
    #[doc(alias = "nvmlDeviceGetAccountingStats")]
    pub(crate) fn accounted_peak(&self, pid: u32) -> Option<u64> {
        self.device.accounting_stats_for(pid).ok()?.max_memory_usage
    }

    /// Calls the function of drivers older than 510, which `nvml-wrapper` no longer wraps.
    fn memory_v1(&self) -> Result<GpuMemory, NvmlError> {
        let call = match &self.device.nvml().lib().nvmlDeviceGetMemoryInfo {
            Ok(call) => call,
            Err(error) => return Err(NvmlError::FailedToLoadSymbol(error.to_string())),
        };
        let mut info = MaybeUninit::uninit();
        // SAFETY: the function pointer is the library's own `nvmlDeviceGetMemoryInfo`, and the binding has its C signature. The
        // library stays loaded as long as the `'static` Nvml behind `self.0`. The handle came from the same library. The
        // out-parameter is a live `nvmlMemory_t`, which the call fills if it succeeds; it is read only in that case.
        let info = unsafe {
            nvml_try(call(self.device.handle(), info.as_mut_ptr()))?;
            info.assume_init()
        };
        let [total, free, used] = [info.total, info.free, info.used].map(Bytes::new);
        Ok(GpuMemory::new(total, free, used, None))
    }
}

/// Returns the command with which a process was started, if NVML returns it.
#[doc(alias = "nvmlSystemGetProcessName")]
pub(crate) fn process_name(pid: u32) -> Option<String> {
    const LONGEST: usize = 1024;
    let name = nvml().ok()?.sys_process_name(pid, LONGEST).ok()?;
    Some(name).filter(|name| !name.is_empty())
}

/// The values of `nvmlReturn_t`, with their names, and whether each means that nothing can be read on this machine.
const RETURNS: &[(u32, &str, bool)] = &[
    (1, "NVML_ERROR_UNINITIALIZED", true),
    (2, "NVML_ERROR_INVALID_ARGUMENT", false),
    (3, "NVML_ERROR_NOT_SUPPORTED", true),
    (4, "NVML_ERROR_NO_PERMISSION", true),
    (6, "NVML_ERROR_NOT_FOUND", false),
    (7, "NVML_ERROR_INSUFFICIENT_SIZE", false),
    (8, "NVML_ERROR_INSUFFICIENT_POWER", false),
    (9, "NVML_ERROR_DRIVER_NOT_LOADED", true),
    (10, "NVML_ERROR_TIMEOUT", false),
    (11, "NVML_ERROR_IRQ_ISSUE", false),
    (12, "NVML_ERROR_LIBRARY_NOT_FOUND", true),
    (13, "NVML_ERROR_FUNCTION_NOT_FOUND", true),
    (15, "NVML_ERROR_GPU_IS_LOST", false),
    (16, "NVML_ERROR_RESET_REQUIRED", false),
    (17, "NVML_ERROR_OPERATING_SYSTEM", false),
    (18, "NVML_ERROR_LIB_RM_VERSION_MISMATCH", true),
    (19, "NVML_ERROR_IN_USE", false),
    (20, "NVML_ERROR_MEMORY", false),
    (21, "NVML_ERROR_NO_DATA", false),
    (999, "NVML_ERROR_UNKNOWN", false),
];

fn failed(call: &'static str, device: Option<u32>) -> impl Fn(NvmlError) -> Error {
    move |error| call_failed(call, error, device)
}

fn call_failed(call: &'static str, error: NvmlError, device: Option<u32>) -> Error {
    match error {
        NvmlError::LibloadingError(error) => {
            Error::from(Kind::NoLibrary { library: LIBRARY, detail: error.to_string() }).because(error)
        }
        NvmlError::FailedToLoadSymbol(_) => Kind::NoSymbol { library: LIBRARY, symbol: call.to_owned() }.into(),
        error => {
            let code = u32::from(error);
            let known = RETURNS.iter().find(|(number, ..)| *number == code);
            let (name, fatal) = known.map_or(("an NVML error unknown here", false), |(_, name, fatal)| (*name, *fatal));
            Kind::Call { library: LIBRARY, call, code, name: name.to_owned(), device, fatal }.into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_keep_their_number_and_name() {
        for (code, name, fatal) in RETURNS {
            let error = call_failed("nvmlInit_v2", NvmlError::from(*code), Some(1));
            assert_eq!(error.code(), Some((*code, *name)));
            assert_eq!(error.is_unavailable(), *fatal);
            assert!(error.to_string().starts_with("libnvidia-ml: nvmlInit_v2 for device 1 failed with NVML_ERROR_"));
        }
        assert_eq!(
            call_failed("nvmlInit_v2", NvmlError::from(77), None).code(),
            Some((77, "an NVML error unknown here"))
        );
    }
}

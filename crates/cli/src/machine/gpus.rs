//! The GPUs and their memory.

use std::env;

use gpumem::{Error, GpuMemory};
use gpumem_driver::source::machine::{self as library, CudaDevice};
use serde::Serialize;

use crate::failure::Failure;

/// The GPUs of the machine. The field names are those in JSON. A value that could not be read is `None`; `not_read`
/// contains the reason.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Machine {
    pub(crate) driver_version: Option<String>,
    pub(crate) nvml_version: Option<String>,
    /// The latest CUDA version that the driver supports.
    pub(crate) cuda_version: Option<String>,
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) not_read: Vec<NotRead>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Gpu {
    /// NVML's index, which `nvidia-smi` shows.
    pub(crate) index: Option<u32>,
    /// CUDA's ordinal in a program with this environment.
    pub(crate) cuda_ordinal: Option<u32>,
    pub(crate) name: Option<String>,
    pub(crate) uuid: Option<String>,
    #[serde(flatten)]
    pub(crate) memory: Memory,
    /// True if the GPU is in MIG mode. `None` also if that is not known.
    pub(crate) mig: Option<bool>,
    pub(crate) mig_devices: Vec<Slice>,
}

/// A MIG slice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Slice {
    pub(crate) cuda_ordinal: Option<u32>,
    pub(crate) name: Option<String>,
    pub(crate) uuid: String,
    #[serde(flatten)]
    pub(crate) memory: Memory,
}

#[expect(clippy::struct_field_names, reason = "as in JSON")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Memory {
    pub(crate) total_bytes: Option<u64>,
    pub(crate) used_bytes: Option<u64>,
    pub(crate) free_bytes: Option<u64>,
    /// The bytes that the driver reserves for itself.
    pub(crate) reserved_bytes: Option<u64>,
}

/// A value that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct NotRead {
    pub(crate) what: String,
    pub(crate) why: String,
    /// True if a call failed. False if a setting prevents the reading, or if the driver cannot know the value.
    pub(crate) is_error: bool,
}

impl NotRead {
    pub(crate) fn error(what: impl Into<String>, why: &impl ToString) -> Self {
        Self { what: what.into(), why: why.to_string(), is_error: true }
    }

    fn remark(what: impl Into<String>, why: &str) -> Self {
        Self { what: what.into(), why: why.to_owned(), is_error: false }
    }
}

impl Memory {
    fn of(memory: GpuMemory) -> Self {
        Self {
            total_bytes: Some(memory.total.get()),
            used_bytes: Some(memory.used.get()),
            free_bytes: Some(memory.free.get()),
            reserved_bytes: memory.reserved.map(gpumem::Bytes::get),
        }
    }
}

const ORDINALS: &str = "CUDA's ordinals";

impl Machine {
    /// Reads all GPUs with NVML only. The error is NVML's.
    pub(crate) fn read() -> Result<Self, Error> {
        let library::Machine { driver, nvml, cuda, gpus } = library::machine()?;
        let mut machine = Self::default();
        machine.driver_version = machine.known("the version of the driver", driver);
        machine.nvml_version = machine.known("the NVML version", nvml);
        machine.cuda_version = machine.known("the CUDA version", cuda).map(|(major, minor)| format!("{major}.{minor}"));
        for (index, gpu) in (0..).zip(gpus) {
            let gpu = match machine.known(format!("GPU {index}"), gpu) {
                Some(gpu) => machine.gpu(index, gpu),
                None => Gpu { index: Some(index), ..Gpu::default() },
            };
            machine.gpus.push(gpu);
        }
        Ok(machine)
    }

    /// Reads all GPUs, with CUDA's ordinals. Without NVML, they get the values that CUDA reports without a context.
    pub(crate) fn read_with_cuda() -> Result<Self, Failure> {
        let cuda = library::cuda_devices();
        match Self::read() {
            Ok(mut machine) => {
                machine.add_ordinals(cuda);
                Ok(machine)
            }
            Err(why) => match cuda {
                Ok(devices) if !devices.is_empty() => Ok(Self::of_cuda(devices, &why)),
                _ => Err(Failure::new("GPUs cannot be read", why, "")),
            },
        }
    }

    fn known<T>(&mut self, what: impl Into<String>, read: Result<T, Error>) -> Option<T> {
        read.map_err(|why| self.not_read.push(NotRead::error(what, &why))).ok()
    }

    fn memory(&mut self, of: &str, memory: Result<GpuMemory, Error>, is_of_machine: bool) -> Memory {
        if is_of_machine && memory.is_ok() {
            let why = "it has no separate memory, and NVML reports no values: these are the values of the machine's memory, and pinned and managed \
                       memory counts as memory of the GPU";
            self.not_read.push(NotRead::remark(format!("the memory of {of}"), why));
            return memory.map(Memory::of).unwrap_or_default();
        }
        let memory = self.known(format!("the memory of {of}"), memory).map(Memory::of).unwrap_or_default();
        if memory.used_bytes.is_some() && memory.reserved_bytes.is_none() {
            let why = "a driver before 510 counts it as used";
            self.not_read.push(NotRead::remark(format!("the reserved memory of {of}"), why));
        }
        memory
    }

    fn gpu(&mut self, index: u32, gpu: library::Gpu) -> Gpu {
        let words = format!("GPU {index}");
        let slices = self.known(format!("MIG of {words}"), gpu.slices);
        let mig_devices =
            slices.clone().flatten().unwrap_or_default().into_iter().enumerate().map(|(slice, of)| Slice {
                cuda_ordinal: None,
                name: self.known(format!("the name of slice {slice} of {words}"), of.name),
                uuid: of.uuid,
                memory: self.memory(&format!("slice {slice} of {words}"), of.memory, of.is_memory_of_machine),
            });
        let mig_devices = mig_devices.collect();
        Gpu {
            index: Some(index),
            cuda_ordinal: None,
            name: self.known(format!("the name of {words}"), gpu.name),
            uuid: Some(gpu.uuid),
            memory: self.memory(&words, gpu.memory, gpu.is_memory_of_machine),
            mig: slices.map(|slices| slices.is_some()),
            mig_devices,
        }
    }

    /// Adds CUDA's ordinals. Devices with the same UUID are the same.
    fn add_ordinals(&mut self, cuda: Result<Vec<CudaDevice>, Error>) {
        let Some(devices) = self.known(ORDINALS, cuda) else { return };
        let ordinal = |uuid: &str| {
            let uuid = uuid.split_once('-').map_or(uuid, |(_, uuid)| uuid);
            (0..).zip(&devices).find(|(_, device)| device.uuid == uuid).map(|(ordinal, _)| ordinal)
        };
        let mut hidden = Vec::new();
        for gpu in &mut self.gpus {
            gpu.cuda_ordinal = gpu.uuid.as_deref().and_then(ordinal);
            for slice in &mut gpu.mig_devices {
                slice.cuda_ordinal = ordinal(&slice.uuid);
            }
            let is_seen =
                gpu.cuda_ordinal.is_some() || gpu.mig_devices.iter().any(|slice| slice.cuda_ordinal.is_some());
            if let Some(index) = gpu.index.filter(|_| !is_seen && gpu.uuid.is_some()) {
                hidden.push(index.to_string());
            }
        }
        if !hidden.is_empty() {
            let what = format!("CUDA's ordinal of GPU {}", hidden.join(", "));
            let why = if env::var_os("CUDA_VISIBLE_DEVICES").is_some() {
                "CUDA_VISIBLE_DEVICES hides it"
            } else {
                "CUDA does not show it in this environment"
            };
            self.not_read.push(NotRead::remark(what, why));
        }
    }

    fn of_cuda(devices: Vec<CudaDevice>, why: &Error) -> Self {
        let mut machine = Self::default();
        machine.not_read.push(NotRead::error("memory and versions", why));
        for (ordinal, device) in (0..).zip(devices) {
            let name = machine.known(format!("the name of CUDA's device {ordinal}"), device.name);
            let uuid = Some(device.uuid);
            machine.gpus.push(Gpu { cuda_ordinal: Some(ordinal), name, uuid, ..Gpu::default() });
        }
        machine
    }
}

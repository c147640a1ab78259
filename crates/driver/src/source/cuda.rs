//! CUDA's devices. Ordinals and contexts come from the driver. The memory is read by NVML, which finds the device by its UUID. If NVML
//! cannot read it, it comes from `cuMemGetInfo`. NVML cannot read an integrated device; its values describe the machine's memory.

use once_cell::sync::OnceCell;

use super::cards;
use super::devices::{Devices, Interception, Selection};
use super::driver;
use super::processes;
use super::readings::{by_nvml, device, handle, has_nvml};
use crate::{
    error::{Error, Kind, Result},
    model::{Bytes, Family, GpuMemory, GpuProcess, PoolUsage, Source},
    settings::settings,
    sys::{
        cuda::{self, CudaDevice},
        dispatch,
    },
};

#[derive(Debug)]
struct Cuda;

#[expect(clippy::unnecessary_wraps, reason = "all families have one signature")]
pub(super) fn select() -> Selection {
    static REPLACED: OnceCell<Result<()>> = OnceCell::new();
    let replaced = REPLACED.get_or_init(|| settings().card()?.map_or(Ok(()), cards::replace));
    Some(replaced.clone().map(|()| &Cuda as &dyn Devices))
}

impl Devices for Cuda {
    fn family(&self) -> Family {
        Family::Cuda
    }

    fn count(&self) -> Result<u32> {
        cuda::devices().map(|devices| u32::try_from(devices.len()).unwrap_or(u32::MAX))
    }

    fn current(&self) -> Result<u32> {
        // If there are no devices, none is current.
        device(0)?;
        Ok(cuda::current()?.unwrap_or(0))
    }

    fn check(&self, ordinal: u32) -> Result<()> {
        device(ordinal).map(|_| ())
    }

    fn name(&self, ordinal: u32) -> Result<String> {
        device(ordinal)?.name()
    }

    fn uuid(&self, ordinal: u32) -> Option<String> {
        let device = device(ordinal).ok()?;
        if let Ok(handle) = handle(device) {
            return Some(handle.uuid.clone());
        }
        Some(device.uuid())
    }

    fn read(&self, ordinal: u32) -> Result<GpuMemory> {
        let device = device(ordinal)?;
        let by_nvml = if has_nvml() {
            by_nvml(device)
        } else {
            Err(Kind::NoMemoryInfo { source: "NVML", device: ordinal }.into())
        };
        by_nvml.or_else(|why| by_driver(device, why))
    }

    fn is_integrated(&self, ordinal: u32) -> bool {
        device(ordinal).is_ok() && cuda::is_integrated(ordinal)
    }

    fn processes(&self, ordinal: u32) -> Result<Vec<GpuProcess>> {
        processes::on(handle(device(ordinal)?)?, ordinal)
    }

    fn read_pool(&self, ordinal: u32) -> Result<Option<PoolUsage>> {
        device(ordinal)?.read_pool()
    }

    fn reset_pool_reserved(&self, ordinal: u32) -> Result<()> {
        device(ordinal)?.reset_pool_reserved()
    }

    fn trim(&self, ordinal: u32) -> Result<()> {
        device(ordinal)?.trim()
    }

    fn preload(&self, ordinal: u32) -> Result<()> {
        device(ordinal)?.preload()
    }

    fn subscribe(&self, requested: Option<Source>) -> Result<Interception> {
        driver::subscribe(requested)
    }

    fn can_subscribe(&self, requested: Option<Source>) -> Result<Source> {
        driver::can_subscribe(requested)
    }

    fn unsubscribe(&self) {
        driver::unsubscribe();
    }

    fn subscribed(&self) -> Option<Interception> {
        driver::subscribed()
    }

    fn poll(&self, ordinal: u32) {
        driver::poll(ordinal);
    }

    fn compare(&self, ordinal: u32) {
        driver::compare(ordinal);
    }

    fn displaced(&self) -> u128 {
        dispatch::displaced()
    }
}

/// Reads the memory through the driver, if that is possible without creating a context. `why` is NVML's error.
fn by_driver(device: CudaDevice, why: Error) -> Result<GpuMemory> {
    // If the device is lost, the driver has lost it as well, and a call may hang.
    let ordinal = device.ordinal;
    let worth_asking = why.is_unavailable() || matches!(why.code(), Some((_, "NVML_ERROR_NOT_FOUND")));
    if !worth_asking {
        return Err(why);
    }
    // `cuMemGetInfo` is not used here: it needs a context, and does not count the memory that the kernel can release from its caches as
    // free.
    if cuda::is_integrated(ordinal)
        && let Some(memory) = machine_memory()
    {
        return Ok(memory);
    }
    let Some((free, total)) = device.mem_get_info()? else {
        return Err(Kind::NoContext { ordinal, why: Box::new(why) }.into());
    };
    if total == 0 || total == u64::MAX || free > total {
        return Err(Kind::NoMemoryInfo { source: "cuMemGetInfo", device: ordinal }.into());
    }
    let (total, free) = (Bytes::new(total), Bytes::new(free));
    Ok(GpuMemory::new(total, free, total.checked_sub(free).unwrap_or_default(), None))
}

/// Reads the memory of the machine. Memory that programs can get without swapping counts as free. Returns `None` if the kernel does not
/// report it.
#[doc(alias = "MemAvailable")]
pub(super) fn machine_memory() -> Option<GpuMemory> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    memory_of(&text)
}

/// Parses the text of `/proc/meminfo`, which has lines such as `MemTotal: 16384 kB`.
fn memory_of(text: &str) -> Option<GpuMemory> {
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    let (total, free) = (value("MemTotal")?, value("MemAvailable")?);
    let used = total.checked_sub(free).filter(|_| total > 0)?;
    Some(GpuMemory::new(Bytes::new(total), Bytes::new(free), Bytes::new(used), None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_the_machine() {
        let text =
            "MemTotal:       125829120 kB\nMemFree:         1048576 kB\nMemAvailable:   62914560 kB\nBuffers: 7 kB\n";
        let memory = memory_of(text).unwrap();
        assert_eq!([memory.total, memory.free, memory.used], [120, 60, 60].map(Bytes::gib));
        assert_eq!(memory.reserved, None);
        for damaged in [
            "",
            "MemTotal: 8 kB\n",
            "MemTotal: 8 kB\nMemAvailable: 9 kB\n",
            "MemTotal: 8\nMemAvailable: 4 kB\n",
            "MemTotal: 0 kB\nMemAvailable: 0 kB\n",
            "MemTotal: 18446744073709551615 kB\nMemAvailable: 4 kB\n",
        ] {
            assert_eq!(memory_of(damaged), None, "{damaged}");
        }
    }
}

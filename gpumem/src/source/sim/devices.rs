//! What simulated devices answer.

use std::sync::PoisonError;

use super::{CURRENT, DeviceModel, GPUS, SimGpu, from_environment};
use crate::{
    error::{Kind, Result},
    model::{Bytes, Family, GpuMemory, GpuProcess, PoolUsage, ProcessKind, Source},
    source::devices::{Devices, Interception, Selection},
};

const SIMULATION: Interception = Interception { source: Source::Simulation, library: "the simulated device" };

/// A simulated device has one pool.
fn usage_of(memory: &DeviceModel) -> PoolUsage {
    PoolUsage {
        pool: 0,
        used: Bytes::new(memory.pool_used()),
        used_high: Bytes::new(memory.pool_used_high()),
        reserved: Bytes::new(memory.pool_reserved()),
        reserved_high: Bytes::new(memory.pool_reserved_high()),
    }
}

#[derive(Debug)]
struct Simulated;

pub(in crate::source) fn select() -> Selection {
    match count() {
        Ok(0) => None,
        Ok(_) => Some(Ok(&Simulated)),
        Err(error) => Some(Err(error)),
    }
}

fn count() -> Result<u32> {
    from_environment()?;
    let gpus = GPUS.read().unwrap_or_else(PoisonError::into_inner);
    Ok(u32::try_from(gpus.len()).unwrap_or(u32::MAX))
}

fn gpu(ordinal: u32) -> Result<SimGpu> {
    let gpus = GPUS.read().unwrap_or_else(PoisonError::into_inner);
    gpus.get(ordinal as usize).cloned().ok_or_else(|| {
        let count = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
        Kind::NoDevice { ordinal, count, simulated: true }.into()
    })
}

impl Devices for Simulated {
    fn family(&self) -> Family {
        Family::Simulated
    }

    fn count(&self) -> Result<u32> {
        count()
    }

    fn current(&self) -> Result<u32> {
        Ok(CURRENT.get())
    }

    fn check(&self, ordinal: u32) -> Result<()> {
        gpu(ordinal).map(|_| ())
    }

    fn name(&self, ordinal: u32) -> Result<String> {
        let total = Bytes::new(gpu(ordinal)?.state().memory.total());
        Ok(format!("simulated GPU ({total})"))
    }

    fn read(&self, ordinal: u32) -> Result<GpuMemory> {
        let gpu = gpu(ordinal)?;
        let memory = &gpu.readable()?.memory;
        Ok(GpuMemory {
            total: Bytes::new(memory.total()),
            free: Bytes::new(memory.free()),
            used: Bytes::new(memory.used()),
            reserved: Some(Bytes::new(memory.reserved())),
        })
    }

    /// This process is the only one that uses the device.
    fn processes(&self, ordinal: u32) -> Result<Vec<GpuProcess>> {
        let used = Bytes::new(gpu(ordinal)?.readable()?.memory.used());
        let pid = std::process::id();
        let name = std::env::current_exe().ok().map(|program| program.to_string_lossy().into_owned());
        Ok(vec![GpuProcess { pid, name, used: Some(used), kind: ProcessKind::Compute }])
    }

    fn read_pool(&self, ordinal: u32) -> Result<PoolUsage> {
        gpu(ordinal)?.readable().map(|state| usage_of(&state.memory))
    }

    fn reset_pool(&self, ordinal: u32) -> Result<PoolUsage> {
        let gpu = gpu(ordinal)?;
        let memory = &mut gpu.readable()?.memory;
        let usage = usage_of(memory);
        memory.reset_pool_used_high();
        Ok(usage)
    }

    fn reset_pool_reserved(&self, ordinal: u32) -> Result<()> {
        gpu(ordinal)?.readable()?.memory.reset_pool_reserved_high();
        Ok(())
    }

    fn trim(&self, ordinal: u32) -> Result<()> {
        let gpu = gpu(ordinal)?;
        let memory = &mut gpu.state().memory;
        memory.synchronize();
        memory.trim_to(0);
        Ok(())
    }

    fn preload(&self, ordinal: u32) -> Result<()> {
        self.check(ordinal)
    }

    /// Allocations on simulated devices are always recorded.
    fn subscribe(&self, _: Option<Source>) -> Result<Interception> {
        Ok(SIMULATION)
    }

    fn can_subscribe(&self, _: Option<Source>) -> Result<Source> {
        Ok(SIMULATION.source)
    }

    fn unsubscribe(&self) {}

    fn subscribed(&self) -> Option<Interception> {
        Some(SIMULATION)
    }
}

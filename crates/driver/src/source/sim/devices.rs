//! The simulated devices of a session, and their answers.

use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use once_cell::sync::OnceCell;

use super::gpu::{CURRENT, Destination, PIECES, RecordSimulated, SimGpu, SimState, pieces_of};
use crate::{
    device_model::DeviceModel,
    error::{Kind, Result},
    model::{Bytes, Family, GpuMemory, GpuProcess, PoolUsage, ProcessKind, Source},
    settings::settings,
    source::{
        ask_for_each_trace,
        devices::{Devices, Interception, Selection},
    },
    sys::process,
};

const SIMULATION: Interception = Interception { source: Source::Simulation, library: "the simulated device" };

/// Returns the use of a device's pool. A simulated device has one pool.
fn usage_of(memory: &DeviceModel) -> PoolUsage {
    PoolUsage {
        pool: 0,
        used: Bytes::new(memory.pool_used()),
        used_high: Bytes::new(memory.pool_used_high()),
        reserved: Bytes::new(memory.pool_reserved()),
        reserved_high: Bytes::new(memory.pool_reserved_high()),
    }
}

/// The simulated devices of a session.
pub struct SimDevices {
    gpus: RwLock<Vec<SimGpu>>,
    to: Destination,
}

/// The simulated devices of the process.
static OF_PROCESS: SimDevices = SimDevices { gpus: RwLock::new(Vec::new()), to: None };

pub(in crate::source) fn select() -> Selection {
    match OF_PROCESS.count() {
        Ok(0) => None,
        Ok(_) => Some(Ok(&OF_PROCESS)),
        Err(error) => Some(Err(error)),
    }
}

impl SimDevices {
    /// Creates the devices of a session that is not the process's own.
    pub fn new(to: &'static dyn RecordSimulated) -> Self {
        Self { gpus: RwLock::new(Vec::new()), to: Some(to) }
    }

    /// Adds a device with this much memory.
    ///
    /// # Errors
    /// Returns an error if the device would have more than 16384 TiB, or if there are no addresses left for it.
    pub fn add(&self, total: Bytes) -> Result<SimGpu> {
        process::notice_forks();
        ask_for_each_trace();
        let mut gpus = self.gpus.write().unwrap_or_else(PoisonError::into_inner);
        let ordinal = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
        let misuse = |detail| Err(Kind::SimulatedMisuse { device: ordinal, detail }.into());
        if total.get() > DeviceModel::LARGEST {
            return misuse("it would have memory without an address; a simulated device may have up to 16384 TiB");
        }
        let memory = DeviceModel::new(total.get());
        let piece = gpus.last().map_or(0, |last| last.piece + pieces_of(&last.state().memory));
        if piece + pieces_of(&memory) > PIECES {
            return misuse(
                "there are no addresses left for it: a process can have 512 simulated devices of up to 36 TiB, or fewer large ones",
            );
        }
        let state = SimState { memory, lost: false };
        let gpu = SimGpu { ordinal, piece, model: Arc::new(Mutex::new(state)), to: self.to };
        gpus.push(gpu.clone());
        Ok(gpu)
    }

    /// Returns all devices, by ordinal.
    fn all(&self) -> Vec<SimGpu> {
        self.lock().clone()
    }

    fn lock(&self) -> RwLockReadGuard<'_, Vec<SimGpu>> {
        self.gpus.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn gpu(&self, ordinal: u32) -> Result<SimGpu> {
        let gpus = self.lock();
        gpus.get(ordinal as usize).cloned().ok_or_else(|| {
            let count = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
            Kind::NoDevice { ordinal, count, simulated: true }.into()
        })
    }
}

impl SimGpu {
    /// Adds a simulated device with this much memory, and makes it the calling thread's current device. The first one is device 0, unless
    /// `GPUMEM_SIM` has added some already. Like with CUDA, other threads use device 0 until they choose another one
    /// ([`make_current`](Self::make_current)).
    ///
    /// ```
    /// use gpumem::{Bytes, GpuMemTrace, sim::SimGpu};
    ///
    /// SimGpu::install(Bytes::gib(16))?; // device 0
    /// SimGpu::install(Bytes::gib(8))?; // device 1
    /// assert_eq!(gpumem::gpu_mem_get(1).total, Bytes::gib(8));
    /// assert_eq!(GpuMemTrace::new().data().device, 1);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if `GPUMEM_SIM` is set and not valid, if `total` is more than 16384 TiB, or if there are no addresses left: a
    /// process can have 512 devices of up to 36 TiB, or fewer large ones.
    pub fn install(total: Bytes) -> Result<Self> {
        from_environment()?;
        OF_PROCESS.add(total).inspect(Self::make_current)
    }

    /// Returns the simulated devices of this process, by ordinal.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// let gpus = gpumem::sim::SimGpu::all()?;
    /// assert_eq!(gpus.len(), 2);
    /// assert_eq!(gpus[1].ordinal(), 1);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if `GPUMEM_SIM` is set and not valid.
    pub fn all() -> Result<Vec<Self>> {
        from_environment()?;
        Ok(OF_PROCESS.all())
    }
}

/// Adds the devices of `GPUMEM_SIM`. Only the first call has an effect.
fn from_environment() -> Result<()> {
    static READ: OnceCell<Result<()>> = OnceCell::new();
    // In the child process of a fork, the locks may be held by threads that do not exist there.
    if process::is_forked() {
        return Err(Kind::Forked.into());
    }
    let read = READ.get_or_init(|| settings().sim()?.iter().try_for_each(|total| OF_PROCESS.add(*total).map(|_| ())));
    read.clone()
}

impl Devices for SimDevices {
    fn family(&self) -> Family {
        Family::Simulated
    }

    fn count(&self) -> Result<u32> {
        // The environment may add devices to the process's.
        if self.to.is_none() {
            from_environment()?;
        }
        Ok(u32::try_from(self.lock().len()).unwrap_or(u32::MAX))
    }

    fn current(&self) -> Result<u32> {
        Ok(CURRENT.get())
    }

    fn check(&self, ordinal: u32) -> Result<()> {
        self.gpu(ordinal).map(|_| ())
    }

    fn name(&self, ordinal: u32) -> Result<String> {
        let total = Bytes::new(self.gpu(ordinal)?.state().memory.total());
        Ok(format!("simulated GPU ({total})"))
    }

    fn read(&self, ordinal: u32) -> Result<GpuMemory> {
        let gpu = self.gpu(ordinal)?;
        let memory = &gpu.readable()?.memory;
        let [total, free, used, reserved] =
            [memory.total(), memory.free(), memory.used(), memory.reserved()].map(Bytes::new);
        Ok(GpuMemory::new(total, free, used, Some(reserved)))
    }

    /// Returns this process, because no other one uses a simulated device.
    fn processes(&self, ordinal: u32) -> Result<Vec<GpuProcess>> {
        let used = Bytes::new(self.gpu(ordinal)?.readable()?.memory.used());
        let pid = std::process::id();
        let name = std::env::current_exe().ok().map(|program| program.to_string_lossy().into_owned());
        let mut process = GpuProcess::new(pid, ProcessKind::Compute);
        (process.name, process.used) = (name, Some(used));
        Ok(vec![process])
    }

    fn read_pool(&self, ordinal: u32) -> Result<Option<PoolUsage>> {
        self.gpu(ordinal)?.readable().map(|state| Some(usage_of(&state.memory)))
    }

    fn reset_pool_reserved(&self, ordinal: u32) -> Result<()> {
        self.gpu(ordinal)?.readable()?.memory.reset_pool_reserved_high();
        Ok(())
    }

    fn trim(&self, ordinal: u32) -> Result<()> {
        let gpu = self.gpu(ordinal)?;
        let memory = &mut gpu.state().memory;
        memory.synchronize();
        memory.trim_to(0);
        Ok(())
    }

    fn preload(&self, ordinal: u32) -> Result<()> {
        self.check(ordinal)
    }

    /// Does nothing, because allocations on simulated devices are always recorded.
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

//! Simulated devices: GPU memory where there is no GPU, with every allocation heard.
//!
//! A process gets simulated devices by [`SimGpu::install`] or by `GPUMEM_SIM=16GiB` (several: `GPUMEM_SIM=16GiB,8GiB`).
//! From then on the device numbers of this crate are theirs: CUDA's devices are not looked at. A line on stderr says so.
//!
//! ```
//! use gpumem::{Bytes, GpuMemTrace, sim::SimGpu};
//!
//! let gpu = SimGpu::install(Bytes::gib(16))?;
//! let trace = GpuMemTrace::new();
//! let block = gpu.alloc(Bytes::mib(256))?;
//! drop(gpu.alloc_async(Bytes::mib(64))?);
//! assert_eq!(trace.data().used.mb(), 256);
//! assert_eq!(trace.data().peaked.mb(), 64);
//! # drop(block);
//! # Ok::<(), gpumem::Error>(())
//! ```

use std::{
    cell::Cell,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
};

use once_cell::sync::OnceCell;

use super::{Chosen, Devices, Interception, obtained, refused, stacks, tell};
use crate::{
    device_model::{DeviceModel, ModelError},
    error::{Error, Kind, Result},
    model::{
        Block, Bytes, Device, EventKind, Family, GpuMemory, GpuProcess, Key, MemKind, PoolUsage, ProcessKind, Source,
        Space,
    },
    settings::settings,
    sys::process,
};

/// A simulated device: memory that can be given out, from the device or from its stream-ordered pool.
///
/// Cheap to clone; all clones are the same device. It lasts as long as the process, as a real one does.
#[derive(Clone)]
pub struct SimGpu {
    ordinal: u32,
    model: Arc<Mutex<State>>,
}

struct State {
    memory: DeviceModel,
    /// Readings fail, as those of a GPU that fell off the bus.
    lost: bool,
}

/// The model's addresses are below 2^48, and a key has room for 2^9 devices above.
const ADDRESS_BITS: u32 = 48;
const SIMULATION: Interception = Interception { source: Source::Simulation, library: "the simulated device" };
const MOST_DEVICES: usize = 1 << 9;

static GPUS: RwLock<Vec<SimGpu>> = RwLock::new(Vec::new());

thread_local! {
    static CURRENT: Cell<u32> = const { Cell::new(0) };
}

impl SimGpu {
    /// Adds a simulated device with so much memory. The first is device 0, unless `GPUMEM_SIM` names some already.
    ///
    /// # Errors
    /// When `GPUMEM_SIM` is set and cannot be understood, and when there are 512 already.
    pub fn install(total: Bytes) -> Result<Self> {
        from_environment()?;
        add(total)
    }

    /// The simulated devices of this process, by number.
    ///
    /// # Errors
    /// When `GPUMEM_SIM` is set and cannot be understood.
    pub fn all() -> Result<Vec<Self>> {
        from_environment()?;
        Ok(GPUS.read().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Its device number.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Makes it the calling thread's current device, as `cudaSetDevice` does.
    pub fn make_current(&self) {
        CURRENT.set(self.ordinal);
    }

    /// Gives out memory, as `cuMemAlloc` does. It is given back when the block is dropped.
    ///
    /// # Errors
    /// When the device is full ([`Error::is_out_of_memory`]), or when nothing is asked for.
    pub fn alloc(&self, bytes: Bytes) -> Result<SimBlock> {
        self.give(bytes, MemKind::Device)
    }

    /// Gives out memory of the stream-ordered pool, as `cuMemAllocAsync` does. The pool takes memory from the device in
    /// steps of 32 MiB and keeps it until [`synchronize`](Self::synchronize).
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_async(&self, bytes: Bytes) -> Result<SimBlock> {
        self.give(bytes, MemKind::Pool)
    }

    /// Lets the pool give back what is unused, as a synchronisation of the device does.
    pub fn synchronize(&self) {
        if !process::is_forked() {
            self.state().memory.synchronize();
        }
    }

    /// From now on (or no longer) every reading fails, as those of a GPU that fell off the bus.
    pub fn set_lost(&self, lost: bool) {
        if !process::is_forked() {
            self.state().lost = lost;
        }
    }

    fn give(&self, bytes: Bytes, kind: MemKind) -> Result<SimBlock> {
        if process::is_forked() {
            return Err(Kind::Forked.into());
        }
        let given = {
            let memory = &mut self.state().memory;
            let given = match kind {
                MemKind::Pool => memory.alloc_async(bytes.get()),
                _ => memory.alloc(bytes.get()),
            };
            given.map_err(|error| self.refused(error, bytes, memory))
        };
        let device = Device { family: Family::Simulated, ordinal: self.ordinal };
        let address = given.inspect_err(|error| {
            if error.is_out_of_memory() {
                refused(Some(device), bytes, kind);
            }
        })?;
        // Each device counts its addresses from the same start.
        let key = Key::new(Space::Address, address + (u64::from(self.ordinal) << ADDRESS_BITS));
        let block = Block { stack: stacks::here(bytes.get()), ..Block::new(device, bytes, kind) };
        tell(&EventKind::Alloc { key, block });
        obtained(&block);
        Ok(SimBlock { gpu: self.clone(), address, key, block })
    }

    fn refused(&self, error: ModelError, asked: Bytes, memory: &DeviceModel) -> Error {
        let device = self.ordinal;
        match error {
            ModelError::OutOfMemory => Kind::SimulatedOutOfMemory {
                device,
                asked: asked.to_string(),
                free: Bytes::new(memory.free()).to_string(),
                total: Bytes::new(memory.total()).to_string(),
            },
            _ => Kind::SimulatedMisuse { device, detail: "an allocation of 0 bytes, which CUDA refuses; ask for more" },
        }
        .into()
    }

    /// What can be read, unless it was told to fail.
    fn readable(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.state();
        if state.lost {
            let detail = "it was told to fail its readings (SimGpu::set_lost)";
            return Err(Kind::SimulatedMisuse { device: self.ordinal, detail }.into());
        }
        Ok(state)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for SimGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimGpu").field("ordinal", &self.ordinal).finish_non_exhaustive()
    }
}

/// Memory of a simulated device, given back on drop.
#[must_use = "dropping it gives the memory back at once"]
pub struct SimBlock {
    gpu: SimGpu,
    address: u64,
    key: Key,
    block: Block,
}

impl SimBlock {
    /// How much was asked for.
    pub fn bytes(&self) -> Bytes {
        self.block.bytes
    }

    /// Its address on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn key(&self) -> Key {
        self.key
    }
}

impl Drop for SimBlock {
    fn drop(&mut self) {
        // The child of a fork has a copy of the model, whose lock may be held for ever.
        if process::is_forked() {
            return;
        }
        // Told first: once the model has it back, another thread may be given the same address.
        tell(&EventKind::Free { key: self.key, block: Some(self.block) });
        let memory = &mut self.gpu.state().memory;
        let freed = match self.block.kind {
            MemKind::Pool => memory.free_async(self.address),
            _ => memory.free_block(self.address),
        };
        debug_assert!(freed.is_ok(), "a block of the model is given back once");
    }
}

impl fmt::Debug for SimBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimBlock({:#x}, {})", self.address, self.block.bytes)
    }
}

fn add(total: Bytes) -> Result<SimGpu> {
    process::notice_forks();
    let mut gpus = GPUS.write().unwrap_or_else(PoisonError::into_inner);
    let ordinal = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
    if gpus.len() == MOST_DEVICES {
        return Err(
            Kind::SimulatedMisuse { device: ordinal, detail: "a process can have 512 of them; use fewer" }.into()
        );
    }
    let state = State { memory: DeviceModel::new(total.get()), lost: false };
    let gpu = SimGpu { ordinal, model: Arc::new(Mutex::new(state)) };
    gpus.push(gpu.clone());
    Ok(gpu)
}

/// Adds the devices of `GPUMEM_SIM`, once.
fn from_environment() -> Result<()> {
    static READ: OnceCell<Result<()>> = OnceCell::new();
    // A thread that is not in the child of a fork may hold the locks.
    if process::is_forked() {
        return Err(Kind::Forked.into());
    }
    let read = READ.get_or_init(|| settings().sim()?.iter().try_for_each(|total| add(*total).map(|_| ())));
    read.clone()
}

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

pub(super) fn chosen() -> Chosen {
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

    /// This process, which alone has it.
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

    /// Simulated devices always report.
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

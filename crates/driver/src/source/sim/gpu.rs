//! One simulated device, and its blocks.

use std::{
    cell::Cell,
    fmt,
    panic::RefUnwindSafe,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::super::{
    recorder::{self, record},
    rejections, stacks,
};
use crate::{
    device_model::{DeviceModel, ModelError},
    error::{Error, Kind, Result},
    model::{Block, Bytes, Device, EventKind, Family, Key, Label, MemKind, Space, StackId},
    sys::process,
};

/// A simulated device. Blocks are allocated from the device itself, or from its stream-ordered pool.
///
/// A `SimGpu` is cheap to clone, and all clones are the same device. Like a real device, it exists until the process ends.
///
/// ```
/// use gpumem::{Bytes, sim::SimGpu};
///
/// let gpu = SimGpu::install(Bytes::gib(16))?;
/// let block = gpu.alloc(Bytes::gib(4))?;
/// assert_eq!(gpumem::gpu_mem_get_free(), Bytes::gib(12));
/// # drop(block);
/// # Ok::<(), gpumem::Error>(())
/// ```
#[derive(Clone)]
pub struct SimGpu {
    pub(super) ordinal: u32,
    /// The index of the device's first piece of addresses. The models of all devices use the same addresses, so the address of a block also
    /// contains this index.
    pub(super) piece: u64,
    pub(super) model: Arc<Mutex<SimState>>,
    pub(super) to: Destination,
}

/// The session that receives the events of simulated devices: `None` for the process's own.
pub(super) type Destination = Option<&'static dyn RecordSimulated>;

/// Receives the events of simulated devices, for a session that is not the process's own.
pub trait RecordSimulated: Send + Sync + RefUnwindSafe {
    /// Records an event.
    fn record(&self, event: &EventKind);

    /// Returns the id of the calling thread's stack, if stacks are recorded for blocks of this size.
    fn stack_for(&self, bytes: u64) -> StackId;

    /// Reports that an allocation failed.
    fn rejected(&'static self, device: Device, bytes: Bytes, kind: MemKind);

    /// Reports that a block was allocated.
    fn allocated(&self, block: &Block);
}

pub(super) struct SimState {
    pub(super) memory: DeviceModel,
    /// True if all readings fail, as with a GPU that has fallen off the bus.
    pub(super) lost: bool,
}

/// The number of bits of the addresses in a piece. Keys can hold 2^57 addresses, which are divided into 2^9 pieces. A device needs one
/// piece, or several if it is very large.
const PIECE_BITS: u32 = 48;
pub(super) const PIECES: u64 = 1 << 9;

/// Returns how many pieces the addresses of this device need.
pub(super) fn pieces_of(memory: &DeviceModel) -> u64 {
    memory.addresses_end().div_ceil(1 << PIECE_BITS)
}

thread_local! {
    pub(super) static CURRENT: Cell<u32> = const { Cell::new(0) };
}

impl SimGpu {
    /// Returns the device's ordinal.
    ///
    /// ```
    /// # use gpumem::{Bytes, sim::SimGpu};
    /// let first = SimGpu::install(Bytes::gib(16))?;
    /// let second = SimGpu::install(Bytes::gib(16))?;
    /// assert_eq!((first.ordinal(), second.ordinal()), (0, 1));
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Makes this the calling thread's current device, like `cudaSetDevice`.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # let second = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// second.make_current();
    /// let trace = gpumem::GpuMemTrace::new();
    /// assert_eq!(trace.data().device, 1);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn make_current(&self) {
        CURRENT.set(self.ordinal);
    }

    /// Allocates memory, like `cuMemAlloc`. Dropping the block frees it.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::Bytes;
    /// let block = gpu.alloc(Bytes::mib(256))?;
    /// let error = gpu.alloc(Bytes::gib(16)).unwrap_err();
    /// assert!(error.is_out_of_memory());
    /// drop(block); // frees it
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the device is full ([`Error::is_out_of_memory`]), or if `bytes` is 0.
    pub fn alloc(&self, bytes: Bytes) -> Result<SimBlock> {
        self.allocate(bytes, MemKind::Device)
    }

    /// Allocates memory from the stream-ordered pool, like `cuMemAllocAsync`. The pool reserves memory on the device in steps of 32 MiB and
    /// keeps it until [`synchronize`](Self::synchronize) is called.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::{Bytes, gpu_mem_get_used};
    /// drop(gpu.alloc_async(Bytes::mib(40))?);
    /// assert_eq!(gpu_mem_get_used(), Bytes::mib(64)); // the pool keeps 2 times 32 MiB
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`alloc`](Self::alloc).
    pub fn alloc_async(&self, bytes: Bytes) -> Result<SimBlock> {
        self.allocate(bytes, MemKind::Pool)
    }

    /// Releases the unused memory of the pool, like a synchronization of the device.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::{Bytes, gpu_mem_get_used};
    /// drop(gpu.alloc_async(Bytes::mib(40))?);
    /// gpu.synchronize();
    /// assert_eq!(gpu_mem_get_used(), Bytes::ZERO);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn synchronize(&self) {
        if !process::is_forked() {
            self.state().memory.synchronize();
        }
    }

    /// Makes every reading fail, or succeed again. This simulates a GPU that has fallen off the bus.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// let trace = gpumem::GpuMemTrace::builder().gauge(gpumem::Gauge::Sampled).start()?;
    /// gpu.set_lost(true);
    /// assert!(gpumem::try_gpu_mem_get(0).is_err());
    /// assert!(trace.data().stale); // the figures come from the last reading
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn set_lost(&self, lost: bool) {
        if !process::is_forked() {
            self.state().lost = lost;
        }
    }

    fn allocate(&self, bytes: Bytes, kind: MemKind) -> Result<SimBlock> {
        if process::is_forked() {
            return Err(Kind::Forked.into());
        }
        let allocated = {
            let memory = &mut self.state().memory;
            let address = match kind {
                MemKind::Pool => memory.alloc_async(bytes.get()),
                _ => memory.alloc(bytes.get()),
            };
            address.map_err(|error| self.error_of(error, bytes, memory))
        };
        let device = Device { family: Family::Simulated, ordinal: self.ordinal };
        let address = allocated.inspect_err(|error| {
            if error.is_out_of_memory() {
                match self.to {
                    None => rejections::rejected(Some(device), bytes, kind),
                    Some(to) => to.rejected(device, bytes, kind),
                }
            }
        })?;
        let key = Key::new(Space::Address, address + (self.piece << PIECE_BITS));
        let stack = self.to.map_or_else(|| stacks::stack_for(bytes.get()), |to| to.stack_for(bytes.get()));
        let block = Block { stack, ..Block::new(device, bytes, kind) };
        self.record(&EventKind::Alloc { key, block });
        match self.to {
            None => rejections::allocated(&block),
            Some(to) => to.allocated(&block),
        }
        Ok(SimBlock { gpu: self.clone(), address, key, block })
    }

    fn error_of(&self, error: ModelError, requested: Bytes, memory: &DeviceModel) -> Error {
        let device = self.ordinal;
        match error {
            ModelError::OutOfMemory => Kind::SimulatedOutOfMemory {
                device,
                requested: requested.to_string(),
                free: Bytes::new(memory.free()).to_string(),
                total: Bytes::new(memory.total()).to_string(),
            },
            _ => Kind::SimulatedMisuse { device, detail: "CUDA rejects an allocation of 0 bytes; request more" },
        }
        .into()
    }

    fn record(&self, event: &EventKind) {
        match self.to {
            None => _ = record(event),
            Some(to) => to.record(event),
        }
    }

    /// Returns the state for a reading, or an error after [`set_lost`](Self::set_lost).
    pub(super) fn readable(&self) -> Result<MutexGuard<'_, SimState>> {
        let state = self.state();
        if state.lost {
            let detail = "its readings were made to fail (SimGpu::set_lost)";
            return Err(Kind::SimulatedMisuse { device: self.ordinal, detail }.into());
        }
        Ok(state)
    }

    pub(super) fn state(&self) -> MutexGuard<'_, SimState> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for SimGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimGpu").field("ordinal", &self.ordinal).finish_non_exhaustive()
    }
}

/// Memory of a simulated device. Dropping it frees the memory.
///
/// Example: see [`SimGpu::alloc`].
#[must_use = "dropping it frees the memory at once"]
pub struct SimBlock {
    gpu: SimGpu,
    /// The address on the device.
    address: u64,
    key: Key,
    block: Block,
}

impl SimBlock {
    /// Returns the size that was requested.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::Bytes;
    /// let block = gpu.alloc(Bytes::new(1_000))?;
    /// assert_eq!(block.bytes(), 1_000); // not the pages that the device takes for it
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn bytes(&self) -> Bytes {
        self.block.bytes
    }

    /// Returns the address. No live block of another simulated device has the same address.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::Bytes;
    /// # let trace = gpumem::GpuMemTrace::new();
    /// let block = gpu.alloc(Bytes::mib(1))?;
    /// gpumem::tracker::label("weights", &[512, 512], "f32", block.address())?;
    /// # drop(trace);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn address(&self) -> u64 {
        self.key.address()
    }

    /// Labels the block with a name, a shape and an element type, which `gpumem::tracker::MemTracker` prints.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # let mut tracker = gpumem::tracker::MemTracker::new();
    /// # let block = gpu.alloc(gpumem::Bytes::mib(9))?;
    /// block.label("conv1.weight", &[512, 512, 3, 3], "f32")?;
    /// assert_eq!(tracker.track().changes.unwrap()[0].names[0].0, "conv1.weight");
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the block is older than the first trace.
    pub fn label(&self, name: impl Into<String>, shape: &[usize], dtype: impl Into<String>) -> Result<()> {
        let label = Label { name: name.into(), shape: shape.to_vec(), dtype: dtype.into() };
        recorder::label(self.key, &label, self.address())
    }
}

impl Drop for SimBlock {
    fn drop(&mut self) {
        // In the child process of a fork, the lock of the model may be held by a thread that does not exist there.
        if process::is_forked() {
            return;
        }
        // The free is recorded first. As soon as the model has freed the block, another thread may get the same address.
        self.gpu.record(&EventKind::Free { key: self.key, block: Some(self.block) });
        let memory = &mut self.gpu.state().memory;
        let freed = match self.block.kind {
            MemKind::Pool => memory.free_async(self.address),
            _ => memory.free_block(self.address),
        };
        debug_assert!(freed.is_ok(), "a block of the model is freed once");
    }
}

impl fmt::Debug for SimBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimBlock({:#x}, {})", self.address(), self.block.bytes)
    }
}

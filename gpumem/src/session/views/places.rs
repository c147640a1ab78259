//! The holders of memory, and the names for the ledger's ids.

use std::{
    collections::{BTreeSet, HashMap},
    env,
    panic::catch_unwind,
    sync::{MutexGuard, PoisonError, atomic::Ordering::Relaxed},
};

use once_cell::sync::Lazy;

use super::status::NewTrace;
use crate::session::{Session, current};
use crate::{
    derive::{self, Callsite, Names, Snapshot, Stack, short_names},
    error::Result,
    inbox::LedgerView,
    ledger::ScopePeriod,
    model::{Bytes, CallsiteId, Device, EventKind, PoolId, StackId},
    own_threads,
    report::{Breakdown, DeviceReading, DriverMemory, Summary},
    source::{self, Devices},
};

/// Returns the memory in use and the peak of each scope, by device and path of nested scopes. All openings of a scope count together.
///
/// A block belongs to the innermost scope of its thread, and to the scopes around it. For other threads and tasks see
/// [`GpuMemTrace::handle`](crate::session::GpuMemTrace::handle). Only intercepted allocations count, as in exact traces.
///
/// In the printed table, more than 16 names that differ only in numbers are one row, such as `request #`; their peak is at least that of the
/// row. If a source line uses more than 1,024 names, the later ones are one scope, such as `(more names like request #)`, whose peak is
/// that of all their memory together.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// use gpumem::{Bytes, GpuMemTrace};
///
/// let weights = GpuMemTrace::scope("load", |_| gpu.alloc(Bytes::mib(256)))?;
/// let summary = gpumem::summary();
/// let load = summary.scopes.iter().find(|scope| scope.path == ["load"]).unwrap();
/// assert_eq!((load.calls, load.used), (1, Bytes::mib(256)));
/// println!("{summary}");
/// # drop(weights);
/// # Ok::<(), gpumem::Error>(())
/// ```
pub fn summary() -> Summary {
    let session = current();
    let now = NewTrace::find(session);
    let not_intercepted = if now.is_intercepted(session) { None } else { now.why_not_exact.map(|why| why.to_string()) };
    if !session.is_started() {
        return Summary::of(Vec::new(), 0, 0, not_intercepted);
    }
    derive::summary(&session.inbox, session, session.next_scope(), not_intercepted)
}

/// Returns the same as [`summary`], and then resets it, for an epoch: calls, allocations and peaks restart. The memory in use stays. An
/// open scope counts as newly opened, but its `device_peak` counts from its actual start.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// use gpumem::{Bytes, GpuMemTrace};
///
/// let weights = GpuMemTrace::scope("load", |_| gpu.alloc(Bytes::mib(256)))?;
/// println!("{}", gpumem::summary_n_reset());
/// let load = &gpumem::summary().scopes[1];
/// assert_eq!((load.calls, load.used), (0, Bytes::mib(256)));
/// # drop(weights);
/// # Ok::<(), gpumem::Error>(())
/// ```
pub fn summary_n_reset() -> Summary {
    let (summary, session) = (summary(), current());
    if session.is_started() {
        session.inbox.post(&EventKind::ResetSummary);
    }
    summary
}

/// Returns the holders of the device's memory: other processes, and this process by scope, by library and by purpose. `None` is
/// the calling thread's current device.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::{Bytes, GpuMemTrace};
/// # let trace = GpuMemTrace::with_ctx("train");
/// # let weights = gpu.alloc(Bytes::mib(256))?;
/// let breakdown = gpumem::breakdown(None)?;
/// println!("{breakdown}");
/// let sum: Bytes = breakdown.parts.iter().map(|part| part.bytes).sum();
/// assert_eq!(sum, breakdown.memory.used);
/// # drop(weights);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// The scopes and libraries of allocations are known from the first trace or [`subscribe`](crate::session::subscribe) on.
///
/// # Errors
/// Returns an error if there is no such device, or it cannot be read.
#[doc(alias = "nvidia-smi")]
pub fn breakdown(device: impl Into<Option<u32>>) -> Result<Breakdown> {
    let session = current();
    let devices = session.devices()?;
    let device = devices.device(device.into())?;
    // The breakdown has a separate part for memory that was not intercepted.
    session.prepare(devices);
    devices.compare(device.ordinal);
    let reading = read(session, devices, device)?;
    let live = Snapshot::now(&session.inbox, session, device).groups(|stack| session.stack(stack));
    Ok(Breakdown::of(&reading, std::process::id(), &live))
}

/// Returns a device's memory as the driver and NVML report it.
pub(in crate::session) fn read(session: &Session, devices: &dyn Devices, device: Device) -> Result<DeviceReading> {
    let ordinal = device.ordinal;
    let rounding = session.inbox.rounding(device).map(|bytes| DriverMemory::rounding(Bytes::new(bytes)));
    let taken = session.driver_memory(Some(device), None);
    let measured = session.inbox.stats().into_iter().find(|stats| stats.device == device);
    Ok(DeviceReading {
        device,
        memory: devices.read(ordinal)?,
        name: devices.name(ordinal).ok(),
        processes: devices.processes(ordinal).ok(),
        pool: devices.read_pool(ordinal).ok().flatten(),
        driver_gauge: measured.and_then(|stats| stats.driver_measured_by),
        taken: if taken.is_empty() { taken } else { taken.into_iter().chain(rounding).collect() },
    })
}

impl Session {
    /// Returns what the driver took for itself and has not returned, the largest first.
    pub(in crate::session) fn driver_memory(
        &self,
        device: Option<Device>,
        within: Option<&ScopePeriod>,
    ) -> Vec<DriverMemory> {
        derive::driver_memory(&self.inbox, self, device, within, |blocks| self.labels().of_blocks(&self.inbox, blocks))
    }
}

/// Returns the names of the calling thread's open scopes.
pub(in crate::session) fn path_of_this_thread(session: &Session) -> Vec<String> {
    short_names(&session.inbox, session, &session.inbox.path_of_this_thread())
}

/// The line of a stack that is not looked up yet.
const NOT_LOOKED_UP: &str = "(line not looked up yet)";

/// The largest number of stacks whose descriptions are kept.
const MAX_STACKS: usize = 1 << 12;

impl Names for Session {
    fn callsite(&self, id: CallsiteId) -> Callsite {
        self.callsites.get(id)
    }

    fn pool(&self, id: PoolId) -> String {
        self.pools.name(id)
    }

    /// Describes a stack. Each stack is resolved only once, because this reads files.
    fn stack(&self, id: StackId) -> Stack {
        if id == StackId::NONE {
            return Stack::default();
        }
        if let Some(stack) = self.stack_texts().get(&id) {
            return stack.clone();
        }
        // No lock is held here, so that allocations do not wait.
        let stack = Stack::new(&source::frames(&self.stacks.get(id)), folder(), source::own_module().as_deref());
        let mut texts = self.stack_texts();
        // A description is much larger than the addresses, and can be derived again.
        if texts.len() >= MAX_STACKS {
            texts.clear();
        }
        texts.insert(id, stack.clone());
        stack
    }
}

impl Session {
    fn stack_texts(&self) -> MutexGuard<'_, HashMap<StackId, Stack>> {
        self.stack_texts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Describes a stack without reading files: its line may be missing until [`look_up`](Self::look_up) has found it.
    pub(super) fn stack_so_far(&self, id: StackId) -> Stack {
        if self.is_resolved(id) {
            return Names::stack(self, id);
        }
        let stack = Stack::new(&source::modules(&self.stacks.get(id)), folder(), source::own_module().as_deref());
        // Without a known line, the place would be the module.
        Stack { line: stack.line.filter(|_| stack.is_place).or_else(|| Some(NOT_LOOKED_UP.to_owned())), ..stack }
    }

    /// Finds the lines of these stacks on a separate thread, because this can take a second.
    pub(super) fn look_up(&'static self, stacks: impl Iterator<Item = StackId>) {
        let unknown: BTreeSet<_> = stacks.filter(|stack| !self.is_resolved(*stack)).collect();
        if unknown.is_empty() || self.is_looking_up.swap(true, Relaxed) {
            return;
        }
        let body = move || {
            for stack in unknown {
                _ = catch_unwind(|| Names::stack(self, stack));
            }
            self.is_looking_up.store(false, Relaxed);
        };
        if own_threads::spawn("lines", body).is_err() {
            self.is_looking_up.store(false, Relaxed);
        }
    }

    /// Returns whether the stack can be described without reading files.
    pub(in crate::session) fn is_resolved(&self, id: StackId) -> bool {
        id == StackId::NONE || self.stack_texts().contains_key(&id)
    }
}

/// Returns the working directory at the time of the first call. Paths of files in it are shown relative to it.
pub(in crate::session) fn folder() -> &'static str {
    static FOLDER: Lazy<String> = Lazy::new(|| env::current_dir().unwrap_or_default().to_string_lossy().into_owned());
    &FOLDER
}

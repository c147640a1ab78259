//! Where memory is, and the names of what the ledger knows by number.

use std::{
    collections::HashMap,
    env,
    sync::{Mutex, MutexGuard, PoisonError},
};

use once_cell::sync::Lazy;

use super::{Session, begun, callsites, devices, prepare, status::Now};
use crate::{
    derive::{self, Callsite, Names, Snapshot, Stack},
    error::Result,
    model::{CallsiteId, Device, Family, StackId},
    report::{Breakdown, Known, Summary},
    source::{self, Devices},
};

/// What each scope holds, and held at most: by device and path of nested scopes, over all times that it was open.
///
/// A scope holds what was allocated while it was the innermost one on its thread, or inside of such a scope; see
/// [`GpuMemTrace::handle`](super::GpuMemTrace::handle) for other threads and for tasks. Only what is intercepted counts, which is
/// what exact traces count.
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
    let now = Now::find();
    let unheard = if now.is_intercepted() { None } else { now.why_not_exact.map(|why| why.to_string()) };
    let Some(session) = begun() else { return Summary::of(Vec::new(), 0, 0, unheard) };
    derive::summary(&session.inbox, &SessionNames, session.next_scope(), unheard)
}

/// Where the device's memory went: other processes, this one by scope, by library, by what the driver keeps it for. With
/// `None` the calling thread's current device.
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
/// Allocations are told apart from the first trace on (or [`subscribe`](super::subscribe)).
///
/// # Errors
/// When there is no such device, or it cannot be read.
#[doc(alias = "nvidia-smi")]
pub fn breakdown(device: impl Into<Option<u32>>) -> Result<Breakdown> {
    let devices = devices()?;
    let device = devices.device(device.into())?;
    // What cannot be heard is a part of the rest, which says so.
    prepare(devices);
    let live =
        begun().map(|session| Snapshot::now(&session.inbox, &SessionNames, device).groups(stack)).unwrap_or_default();
    Ok(Breakdown::of(&Known { live, ..read(devices, device)? }))
}

/// What is known of a device's memory, without what is live.
pub(super) fn read(devices: &dyn Devices, device: Device) -> Result<Known> {
    let ordinal = device.ordinal;
    let memory = devices.read(ordinal)?;
    let simulated = device.family == Family::Simulated;
    Ok(Known {
        device: ordinal,
        name: devices.name(ordinal).ok(),
        simulated,
        memory,
        processes: devices.processes(ordinal).ok(),
        own_pid: std::process::id(),
        pool: devices.read_pool(ordinal).ok(),
        live: Vec::new(),
    })
}

/// The path of scopes that the calling thread is in.
pub(super) fn path_of_this_thread(session: &Session) -> Vec<String> {
    session.inbox.path_of_this_thread().into_iter().map(|callsite| callsites::callsite(callsite).to_string()).collect()
}

/// Names from the tables of the session.
pub(super) struct SessionNames;

impl Names for SessionNames {
    fn callsite(&self, id: CallsiteId) -> Callsite {
        callsites::callsite(id)
    }

    fn stack(&self, id: StackId) -> Stack {
        stack(id)
    }
}

/// So many stacks are remembered in words.
const MOST_STACKS: usize = 1 << 12;

/// What stacks say, as far as that was asked.
fn known() -> MutexGuard<'static, HashMap<StackId, Stack>> {
    static KNOWN: Lazy<Mutex<HashMap<StackId, Stack>>> = Lazy::new(Mutex::default);
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether no file has to be read for it.
pub(super) fn is_resolved(number: StackId) -> bool {
    number == StackId::NONE || known().contains_key(&number)
}

/// What a stack says; found out once, since that reads files.
pub(super) fn stack(number: StackId) -> Stack {
    if number == StackId::NONE {
        return Stack::default();
    }
    if let Some(stack) = known().get(&number) {
        return stack.clone();
    }
    let stack = Stack::new(&source::frames(number), folder(), source::own_module().as_deref());
    let mut known = known();
    // Its text takes much more room than its addresses, and can be found out again.
    if known.len() >= MOST_STACKS {
        known.clear();
    }
    known.insert(number, stack.clone());
    stack
}

/// The folder that the program was in when this was first asked: files below it are named from there.
fn folder() -> &'static str {
    static FOLDER: Lazy<String> = Lazy::new(|| env::current_dir().unwrap_or_default().to_string_lossy().into_owned());
    &FOLDER
}

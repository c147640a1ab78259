//! Where memory is: what the fold knows by number, under its names.

use std::{
    cmp::Reverse,
    collections::HashMap,
    env,
    sync::{Mutex, MutexGuard, PoisonError},
};

use once_cell::sync::Lazy;

use super::{KeptPeak, Session, begun, callsites, devices, prepare, status::Now};
use crate::{
    error::Result,
    ledger::{AtPeak, GroupUsage, KnownBlock, ScopeNode, Within},
    model::{Bytes, CallsiteId, Device, Family, Frame, StackId, library, of_program, users_line},
    report::{Breakdown, Group, Known, LiveBlock, Path, ScopeSummary, Summary, place_in_words},
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
    let counts = session.inbox.counts();
    let mut paths = Paths::now(session);
    paths.find_peaks(session);
    Summary::of(paths.all, counts.untracked, counts.lost, unheard)
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
    let live = begun().map(|session| Snapshot::now(session, device).groups(stack)).unwrap_or_default();
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

/// What is live in a device's memory at one moment, and the paths of scopes.
pub(super) struct Snapshot {
    live: Vec<GroupUsage>,
    paths: Paths,
}

impl Snapshot {
    pub(super) fn now(session: &Session, device: Device) -> Self {
        // First, so that none is of a path that is newer.
        let mut live = session.inbox.groups();
        live.retain(|live| live.device == device && live.group.kind.is_on_device());
        Self { live, paths: Paths::now(session) }
    }

    /// What is live, by where it comes from.
    pub(super) fn groups(&self, stack: impl Fn(StackId) -> Stack) -> Vec<Group> {
        let group = |live: &GroupUsage| {
            let scope = self.paths.of(live.group.node);
            let stack = stack(live.group.stack);
            Group {
                path: scope.map(|scope| scope.path.clone()).unwrap_or_default(),
                library: stack.library,
                place: place_in_words(stack.line.as_deref(), scope.and_then(|scope| scope.place.as_deref())),
                caller: stack.caller,
                blocks: live.blocks,
                bytes: live.bytes,
            }
        };
        self.live.iter().map(group).collect()
    }

    /// No file has to be read to say what the stacks mean.
    pub(super) fn is_resolved(&self) -> bool {
        self.live.iter().all(|live| is_resolved(live.group.stack))
    }
}

/// Live blocks with the names of where they come from, the largest first: all, or what was allocated in one scope.
pub(super) fn live_blocks(session: &Session, within: Option<&Within>) -> Vec<LiveBlock> {
    let held = session.inbox.blocks(within);
    let paths = Paths::now(session);
    let mut blocks: Vec<_> = held.iter().map(|held| live_block(held, &paths)).collect();
    blocks.sort_by(|a, b| {
        let order = |block: &LiveBlock| (Reverse(block.bytes), block.time);
        order(a).cmp(&order(b)).then_with(|| a.path.cmp(&b.path))
    });
    blocks
}

fn live_block(held: &KnownBlock, paths: &Paths) -> LiveBlock {
    let scope = paths.of(held.group.node);
    let stack = stack(held.group.stack);
    LiveBlock {
        key: held.key.get(),
        device: held.device.ordinal,
        simulated: held.device.family == Family::Simulated,
        bytes: held.bytes,
        kind: held.group.kind.name(),
        path: scope.map(|scope| scope.path.clone()).unwrap_or_default(),
        scope_place: scope.and_then(|scope| scope.place.clone()),
        line: stack.line,
        caller: stack.caller,
        library: stack.library,
        backtrace: stack.frames,
        thread: held.thread.0,
        time: held.time,
    }
}

/// The path of scopes that the calling thread is in.
pub(super) fn path_of_this_thread(session: &Session) -> Vec<String> {
    session.inbox.path_of_this_thread().into_iter().map(|callsite| callsites::callsite(callsite).to_string()).collect()
}

/// All paths of scopes.
pub(super) struct Paths {
    all: Vec<Path>,
    /// The outermost of each device.
    roots: Vec<(Device, usize)>,
    /// By the number of the node. Nowhere has none.
    at: Vec<Option<usize>>,
}

impl Paths {
    pub(super) fn now(session: &Session) -> Self {
        let nodes = session.inbox.nodes();
        let mut paths: Vec<Path> = Vec::with_capacity(nodes.len());
        let mut at: Vec<Option<usize>> = Vec::with_capacity(nodes.len());
        let mut roots = Vec::new();
        for (device, node) in &nodes {
            at.push(device.map(|device| {
                let parent = at[node.parent.0 as usize];
                let outer = parent.map(|parent: usize| paths[parent].own.path.as_slice()).unwrap_or_default();
                let own = own(device, node, outer);
                if parent.is_none() {
                    roots.push((device, paths.len()));
                }
                paths.push(Path { parent, own });
                paths.len() - 1
            }));
        }
        Self { all: paths, roots, at }
    }

    /// Fills in what each path, without the paths inside it, had in use at the peak of its device.
    fn find_peaks(&mut self, session: &Session) {
        for (device, root) in &self.roots {
            let Some((peak, groups)) = KeptPeak::of_device(session, *device).and_then(|kept| kept.groups(session))
            else {
                continue;
            };
            // Both of one moment: it may have risen since the paths were read.
            self.all[*root].own.peak = peak;
            self.all[*root].own.device_peak = peak;
            for AtPeak { group, bytes } in groups {
                // In scopes that are newer than the paths, it is of the process at least.
                let at = self.at.get(group.node.0 as usize).copied().flatten().unwrap_or(*root);
                let own = &mut self.all[at].own;
                own.at_peak = own.at_peak + Bytes::new(bytes.get().max(0).unsigned_abs());
            }
        }
    }

    /// `None` for a path that is newer than this.
    pub(super) fn of(&self, node: crate::ledger::NodeId) -> Option<&ScopeSummary> {
        let at = self.at.get(node.0 as usize).copied().flatten()?;
        Some(&self.all[at].own)
    }
}

fn own(device: Device, node: &ScopeNode, outer: &[String]) -> ScopeSummary {
    let callsite = callsites::callsite(node.callsite);
    let is_root = node.callsite == CallsiteId::NONE;
    let amount = |bytes: i64| Bytes::new(bytes.max(0).unsigned_abs());
    ScopeSummary {
        path: outer.iter().cloned().chain((!is_root).then(|| callsite.to_string())).collect(),
        place: callsite.place(),
        device: device.ordinal,
        simulated: device.family == Family::Simulated,
        calls: node.calls,
        used: amount(node.in_use),
        peak: amount(node.peak),
        // Of the root, and where the scope was not opened for this device, its own peak is all that is known. Where it was handed to
        // other threads, they may have gone on in it after it was closed.
        device_peak: amount(node.device_peak.max(node.peak)),
        at_peak: Bytes::ZERO,
        allocated: Bytes::new(node.allocated),
        allocations: node.allocations,
    }
}

/// What a stack says.
#[derive(Clone, Debug, Default)]
pub(super) struct Stack {
    /// Unless that is the program.
    pub(super) library: Option<String>,
    pub(super) line: Option<String>,
    pub(super) caller: Option<String>,
    frames: Vec<String>,
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
    let frames = source::frames(number);
    let here = env::current_dir().unwrap_or_default().to_string_lossy().into_owned();
    let seen = |frame: &Frame| frame.seen_from(&here).to_string();
    let (line, caller) = users_line(&frames).map_or((None, None), |(line, caller)| (Some(line), caller));
    let stack = Stack {
        library: library(&frames)
            .filter(|library| Some(*library) != source::own_module().as_deref())
            .map(str::to_owned),
        line: line.map(seen),
        caller: caller.map(seen),
        frames: of_program(&frames).iter().map(|frame| frame.seen_from(&here).in_words()).collect(),
    };
    let mut known = known();
    // Its text takes much more room than its addresses, and can be found out again.
    if known.len() >= MOST_STACKS {
        known.clear();
    }
    known.insert(number, stack.clone());
    stack
}

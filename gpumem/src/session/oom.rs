//! Out of memory: who holds it, said when an allocation is refused.

use std::{
    cell::Cell,
    convert::identity,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use crossbeam::channel;

use super::{KeptPeak, begun, devices, notice::say, places, prepare, sink};
use crate::{
    error::{Kind, Result},
    model::{Bytes, Device, MemKind},
    report::OutOfMemory,
    source::{self, Devices},
    sys::process,
};

/// How long the asking program waits for the driver to say where the memory is, which is a matter of milliseconds.
const FOR_THE_DRIVER: Duration = Duration::from_secs(2);

/// How long it waits for the lines that hold the memory: large programs have much debug information to read.
const FOR_LINES: Duration = Duration::from_secs(20);

/// So many reports are printed: who tries again and again would fill the screen.
const MOST: u64 = 3;

type Hook = Arc<dyn Fn(&OutOfMemory) + Send + Sync>;

static HOOK: RwLock<Option<Hook>> = RwLock::new(None);
static PRINTED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// This thread is telling of one: what is refused meanwhile is not told of.
    static TELLING: Cell<bool> = const { Cell::new(false) };
    /// What this thread is refused is tried again.
    static TRYING: Cell<bool> = const { Cell::new(false) };
    /// How many allocations this thread was refused.
    static REFUSED: Cell<u64> = const { Cell::new(0) };
}

/// Has a function called whenever an allocation is refused for want of memory, on the thread that asked, before the call
/// that asked returns. It replaces the function before it. A panic that unwinds from it is caught. It may free what can be
/// spared, but the driver's call is not over yet: it must not wait for other threads that call CUDA.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # let trace = gpumem::GpuMemTrace::new();
/// # use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
/// static ASKED: AtomicU64 = AtomicU64::new(0);
/// gpumem::on_oom(|oom| ASKED.store(oom.asked.get(), Relaxed));
/// assert!(gpu.alloc(gpumem::Bytes::gib(17)).is_err());
/// assert_eq!(ASKED.load(Relaxed), 17 << 30);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// Whether there is one or not, the first three refusals are reported on stderr: what was asked for, where the device's
/// memory is ([`breakdown`](crate::breakdown)), the scopes and lines that hold most of it, and what
/// [`empty_cache`](crate::empty_cache) would give back. Only what is intercepted is reported: the first trace must have started.
pub fn on_oom(hook: impl Fn(&OutOfMemory) + Send + Sync + 'static) {
    // The child of a fork has no GPU, and a thread that is not there may hold the lock for ever.
    if process::is_forked() {
        return;
    }
    let hook: Hook = Arc::new(hook);
    let replaced = HOOK.write().unwrap_or_else(PoisonError::into_inner).replace(hook);
    // Not under the lock: what it owns may itself set another.
    drop(replaced);
}

/// Runs `attempt`, and once more if it fails for want of memory, after the stream-ordered pools gave back what they do not
/// use. The first failure is not reported.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::Bytes;
/// drop(gpu.alloc_async(Bytes::gib(10))?); // the pool keeps it
/// let block = gpumem::retry_after_trim(|| gpu.alloc(Bytes::gib(10)))?;
/// # drop(block);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// Whether memory ran out is known from the calls that were intercepted on this thread. If allocations are not intercepted, any
/// error counts as want of memory.
///
/// # Errors
/// The second attempt's, or the first one's if that was of another kind. Waits for the devices on which this process
/// has a context; not while a stream is being captured.
pub fn retry_after_trim<T, E>(mut attempt: impl FnMut() -> std::result::Result<T, E>) -> std::result::Result<T, E> {
    let Ok(devices) = devices() else { return attempt() };
    prepare(devices);
    let is_heard = devices.subscribed().is_some();
    let before = REFUSED.get();
    let outer = TRYING.replace(true);
    let _restored = Restored(outer);
    let first = attempt();
    TRYING.set(outer);
    if first.is_ok() || is_heard && REFUSED.get() == before {
        return first;
    }
    trim(devices);
    attempt()
}

/// Also when the attempt panics.
struct Restored(bool);

impl Drop for Restored {
    fn drop(&mut self) {
        TRYING.set(self.0);
    }
}

/// As far as that works: where nothing is given back, it is the second attempt that says so.
fn trim(devices: &dyn Devices) {
    for ordinal in 0..devices.count().unwrap_or(0) {
        let _ = devices.trim(ordinal);
    }
}

/// An allocation was refused.
pub(super) fn refused(device: Device, bytes: Bytes, kind: MemKind) {
    REFUSED.set(REFUSED.get() + 1);
    // Of the host's memory nothing is known here.
    if kind == MemKind::PinnedHost || TRYING.get() || TELLING.replace(true) {
        return;
    }
    // The panic hook has spoken; the allocation's caller is to get its error.
    let _ = catch_unwind(AssertUnwindSafe(|| tell(device, bytes, kind)));
    TELLING.set(false);
}

fn tell(device: Device, bytes: Bytes, kind: MemKind) {
    let hook = HOOK.read().unwrap_or_else(PoisonError::into_inner).clone();
    let print = !sink::is_off() && PRINTED.load(Relaxed) < MOST;
    if hook.is_none() && !print {
        return;
    }
    let Some(oom) = look(device, bytes, kind) else { return };
    if print {
        let before = PRINTED.fetch_add(1, Relaxed);
        let last = if before + 1 == MOST { "gpumem: more of them are not reported\n" } else { "" };
        if before < MOST {
            say(&format_args!("gpumem: {oom}{last}"));
        }
    }
    if let Some(hook) = hook {
        hook(&oom);
    }
}

fn look(device: Device, asked: Bytes, kind: MemKind) -> Option<OutOfMemory> {
    let session = begun()?;
    let path = places::path_of_this_thread(session);
    let stack = source::here();
    // Not here: this may be a callback, in which neither the loader nor the driver is to be asked. One after the other: who holds
    // the memory is known also where the driver does not answer.
    let known = elsewhere(FOR_LINES, move || {
        let peak = KeptPeak::of_device(session, device).and_then(|peak| peak.holders(session));
        (places::stack(stack).line, places::groups(session, device), peak)
    });
    let breakdown = known.clone().and_then(|(_, groups, _)| {
        elsewhere(FOR_THE_DRIVER, move || places::of_device(devices()?, device, groups)).and_then(identity)
    });
    let (line, groups, peak) = known.unwrap_or_default();
    let (scopes, places) = (Vec::new(), Vec::new());
    let oom =
        OutOfMemory { device: device.ordinal, asked, kind: kind.name(), path, line, breakdown, scopes, places, peak };
    Some(oom.with_holders(&groups))
}

/// Does it on a thread of its own, and waits, but not for ever.
fn elsewhere<T: Send + 'static>(patience: Duration, work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let (done, result) = channel::bounded(1);
    let body = move || {
        let _ = done.send(work());
    };
    let thread = thread::Builder::new().name("gpumem-oom".to_owned());
    thread.spawn(body).map_err(|error| Kind::NoThread { detail: error.to_string() })?;
    result.recv_timeout(patience).map_err(|_| Kind::NoAnswer { seconds: patience.as_secs() }.into())
}

/// `GPUMEM_LEAKS=1`: says at the end of the process what was not freed.
pub(super) fn report_leaks() {
    let is_wanted = std::env::var_os("GPUMEM_LEAKS").is_some_and(|text| !text.is_empty() && text != "0");
    let Some(session) = begun().filter(|_| is_wanted) else { return };
    let blocks = places::live_blocks(session, None);
    let leaks = crate::report::Leaks::of(&blocks);
    let unheard = !super::status::Now::find().is_intercepted();
    let gone = match session.inbox.counts().gone {
        0 => String::new(),
        count => format!("gpumem: blocks that went with their CUDA context, freed by nobody: {count}\n"),
    };
    let doubt = if unheard { "gpumem: allocations were not heard; there may be more\n" } else { "" };
    let pid = std::process::id();
    say(&format_args!("gpumem: process {pid} ends, and {leaks}{gone}{doubt}"));
}

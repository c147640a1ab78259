//! Out of memory: who holds it, said when an allocation is refused.

use std::{
    cell::Cell,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use crossbeam_channel::{self as channel, Sender};

use crate::session::{
    Session, current,
    views::{self, Now},
};
use crate::{
    derive::{self, KeptPeak, Names, Snapshot, Stack},
    error::{Error, Kind, Result},
    model::{Bytes, Device, MemKind, StackId},
    report::{Breakdown, Content, Known, OutOfMemory},
    source::{self, Devices},
    sys::process,
};
#[cfg(feature = "capture")]
use gpumem_core::capture::DeviceReading;

/// How long the thread waits that was refused.
const FOR_THE_THREAD: Duration = Duration::from_millis(50);

/// How long a report waits for the driver to say where the memory is, which is a matter of milliseconds.
const FOR_THE_DRIVER: Duration = Duration::from_secs(2);

/// How long the end of the process waits for reports: large programs have much debug information to read.
const AT_THE_END: Duration = Duration::from_secs(5);

/// What is obtained so soon is not reported: allocators that keep a cache empty it when they are refused, and ask again.
const SOON: Duration = Duration::from_secs(1);

/// So many reports are printed: who tries again and again would fill the screen.
const MOST: u64 = 3;

/// So many refusals wait at most to be reported.
const MOST_PENDING: usize = 32;

/// So many threads wait for the driver at most, should it never answer.
const MOST_ASKING: usize = 4;

type Hook = Arc<dyn Fn(&OutOfMemory) + Send + Sync>;

/// The refused allocations of a session: the program's function, and the reports.
#[derive(Default)]
pub(in crate::session) struct Refusals {
    hook: RwLock<Option<Hook>>,
    /// How many reports were printed.
    printed: AtomicU64,
    reporter: Mutex<Reporter>,
    /// What is pending has changed.
    changed: Condvar,
    /// How many threads wait for the driver.
    asking: AtomicUsize,
}

impl Refusals {
    fn reporter(&self) -> MutexGuard<'_, Reporter> {
        self.reporter.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

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
/// It is called for each refusal, at most 50 ms later; what was not found out by then is missing from what it is told, such as
/// lines whose debug information was not read before.
///
/// Whether there is one or not, refusals are reported on stderr: what was asked for, where the device's memory is
/// ([`breakdown`](crate::breakdown)), the scopes and lines that hold most of it, and what [`empty_cache`](crate::empty_cache)
/// would give back. A refusal is not reported if the same thread is given so much memory of that device within a second, as
/// happens where an allocator empties its cache and asks again. A thread that asks for the same again meanwhile is reported once.
/// Three are reported in all. A report that waits is printed when the
/// process exits; if it is aborted, it is lost. Only what is intercepted is reported: the first trace must have started.
pub fn on_oom(hook: impl Fn(&OutOfMemory) + Send + Sync + 'static) {
    // The child of a fork has no GPU, and a thread that is not there may hold the lock for ever.
    if process::is_forked() {
        return;
    }
    let hook: Hook = Arc::new(hook);
    let replaced = current().refusals.hook.write().unwrap_or_else(PoisonError::into_inner).replace(hook);
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
    let session = current();
    let Ok(devices) = session.devices() else { return attempt() };
    session.prepare(devices);
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

/// An allocation was refused. Of the host's memory nothing is known here, nor of pools of which it is not known where they are.
pub(in crate::session) fn refused(session: &'static Session, device: Option<Device>, bytes: Bytes, kind: MemKind) {
    REFUSED.set(REFUSED.get() + 1);
    let Some(device) = device.filter(|_| kind != MemKind::PinnedHost) else { return };
    if process::is_forked() || TRYING.get() || TELLING.replace(true) {
        return;
    }
    // The panic hook has spoken; the allocation's caller is to get its error.
    let _ = catch_unwind(AssertUnwindSafe(|| report(session, device, bytes, kind)));
    TELLING.set(false);
}

/// This thread, which was refused something, was given so much.
pub(in crate::session) fn obtained(session: &Session, device: Device, bytes: Bytes) {
    let thread = thread::current().id();
    let mut reporter = session.refusals.reporter();
    reporter.pending.retain(|pending| {
        let Pending { refusal, .. } = pending;
        (refusal.thread, refusal.device) != (thread, device) || refusal.asked > bytes
    });
    source::watch_allocations(reporter.pending.iter().any(|pending| pending.refusal.thread == thread));
}

fn report(session: &'static Session, device: Device, asked: Bytes, kind: MemKind) {
    let hook = session.refusals.hook.read().unwrap_or_else(PoisonError::into_inner).clone();
    let print = !session.is_silent() && session.refusals.printed.load(Relaxed) < MOST;
    if !session.is_begun() || hook.is_none() && !print {
        return;
    }
    let until = Instant::now() + FOR_THE_THREAD;
    let refusal = Refusal { thread: thread::current().id(), device, asked, kind, stack: session.stack_here() };
    let mut oom = refusal.told(views::path_of_this_thread(session));
    let (reply, replies) = channel::unbounded();
    if let Err(error) = look(session, refusal, &oom, print, reply) {
        oom.breakdown = Err(error);
    }
    // Without a function, until the driver has said where the memory is now: an error of this thread may set it free.
    let enough = if hook.is_some() { Stage::All } else { Stage::Read };
    while let Ok(found) = replies.recv_deadline(until) {
        oom = found.oom;
        if found.stage >= enough {
            break;
        }
    }
    if let Some(hook) = hook {
        hook(&oom);
    }
}

/// Which allocation was refused, to whom.
#[derive(Clone, Copy, Debug)]
struct Refusal {
    thread: ThreadId,
    device: Device,
    asked: Bytes,
    kind: MemKind,
    stack: StackId,
}

impl Refusal {
    /// What is known at once.
    fn told(&self, path: Vec<String>) -> OutOfMemory {
        let Self { device, asked, kind, .. } = *self;
        OutOfMemory {
            device: device.ordinal,
            asked,
            kind,
            path,
            line: None,
            breakdown: Err(no_answer(FOR_THE_THREAD)),
            scopes: Vec::new(),
            places: Vec::new(),
            peak: None,
        }
    }
}

fn no_answer(within: Duration) -> Error {
    Kind::NoAnswer { within }.into()
}

/// How much was found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// Which scopes hold the memory.
    Live,
    /// And what the driver says.
    Read,
    /// And on which lines.
    All,
}

struct Found {
    oom: OutOfMemory,
    stage: Stage,
}

/// What was live when an allocation was refused, and what the driver said of the device.
struct Seen {
    snapshot: Snapshot,
    peak: Option<KeptPeak<'static>>,
    known: Result<Known>,
}

impl Seen {
    /// All that can be known. Reads files, unless that was done before.
    fn resolved(self, session: &Session, oom: OutOfMemory, refusal: &Refusal) -> OutOfMemory {
        let groups = self.snapshot.groups(|stack| session.stack(stack));
        let line = session.stack(refusal.stack).line;
        let peak = self.peak.and_then(|peak| peak.holders(session));
        let oom = OutOfMemory { line, peak, ..oom }.with_holders(&groups);
        let breakdown = self.known.map(|known| Breakdown::of(&Known { live: groups, ..known }));
        OutOfMemory { breakdown, ..oom }
    }
}

/// A refusal that is to be looked into, or to be reported.
struct Pending {
    number: u64,
    refusal: Refusal,
    /// Where the thread that was refused waits.
    reply: Sender<Found>,
    /// What the report says, as far as it is known.
    oom: OutOfMemory,
    /// What is to be resolved.
    seen: Option<Seen>,
    /// When the driver is not waited for any more.
    patience: Instant,
    is_found: bool,
    /// When it is printed; not at all where only the program's own function is told.
    due: Option<Instant>,
    /// What the driver said, for a recording.
    #[cfg(feature = "capture")]
    reading: Option<std::result::Result<DeviceReading, String>>,
}

/// Refusals, and the thread that finds out about lines and prints reports. It runs only while there is something to do.
#[derive(Default)]
struct Reporter {
    pending: Vec<Pending>,
    next: u64,
    is_running: bool,
    /// One that is pending no more is being printed.
    is_printing: bool,
    /// The process ends.
    is_over: bool,
}

impl Reporter {
    fn find(&mut self, number: u64) -> Option<&mut Pending> {
        self.pending.iter_mut().find(|pending| pending.number == number)
    }

    /// When a refusal is to be reported. One that is tried again is reported once, with who holds the memory at the last: that is
    /// what no cache gave back.
    fn take_due_of(&mut self, refusal: &Refusal, print: bool) -> Option<Instant> {
        let is_again = |pending: &Pending| {
            let Refusal { thread, device, asked, .. } = pending.refusal;
            pending.due.is_some() && (thread, device, asked) == (refusal.thread, refusal.device, refusal.asked)
        };
        if let Some(at) = self.pending.iter().position(is_again) {
            return self.pending.remove(at).due;
        }
        (print && self.pending.len() < MOST_PENDING).then(|| Instant::now() + SOON)
    }

    /// One whose lines can be looked up, or of which no more will be known.
    fn take_seen(&mut self) -> Option<(u64, Refusal, OutOfMemory, Option<Seen>)> {
        let now = Instant::now();
        let is_ready =
            |pending: &&mut Pending| !pending.is_found && (pending.seen.is_some() || pending.patience <= now);
        let pending = self.pending.iter_mut().find(is_ready)?;
        pending.is_found = true;
        Some((pending.number, pending.refusal, pending.oom.clone(), pending.seen.take()))
    }

    /// One whose time has come.
    fn take_due(&mut self) -> Option<Pending> {
        let now = Instant::now();
        let is_due = |pending: &Pending| pending.due.is_some_and(|due| due <= now || self.is_over);
        let at = self.pending.iter().position(|pending| pending.is_found && is_due(pending))?;
        Some(self.pending.remove(at))
    }

    /// The thread will print one, or is at it.
    fn will_print(&self) -> bool {
        self.is_printing || self.is_running && self.pending.iter().any(|pending| pending.due.is_some())
    }

    /// When one will be ready or due.
    fn next_moment(&self) -> Option<Instant> {
        let moment = |pending: &Pending| if pending.is_found { pending.due } else { Some(pending.patience) };
        self.pending.iter().filter_map(moment).min()
    }
}

/// Has it found out who holds the memory. Not by the thread that was refused: it may be in a callback, in which neither the loader
/// nor the driver is to be asked.
fn look(
    session: &'static Session,
    refusal: Refusal,
    oom: &OutOfMemory,
    print: bool,
    reply: Sender<Found>,
) -> Result<()> {
    let spawn = |body: Box<dyn FnOnce() + Send>| {
        let thread = thread::Builder::new().name("gpumem-oom".to_owned());
        thread.spawn(body).map_err(|error| Error::from(Kind::NoThread { detail: error.to_string() }).because(error))
    };
    let Refusals { asking, changed, .. } = &session.refusals;
    let mut reporter = session.refusals.reporter();
    let mut started = Ok(());
    if !reporter.is_running {
        started = spawn(Box::new(move || run(session))).map(|_| ());
        reporter.is_running = started.is_ok();
    }
    let due = reporter.take_due_of(&refusal, print);
    if due.is_some() {
        source::watch_allocations(true);
    }
    let number = reporter.next;
    reporter.next += 1;
    // The driver may never answer, so it is asked on a thread of its own, and not by many.
    let mut patience = Instant::now();
    let may_ask = asking.fetch_add(1, Relaxed) < MOST_ASKING;
    let ask = {
        let (oom, reply) = (oom.clone(), reply.clone());
        move || {
            let _ = catch_unwind(AssertUnwindSafe(|| see(session, number, &refusal, &oom, &reply)));
            asking.fetch_sub(1, Relaxed);
        }
    };
    if may_ask && spawn(Box::new(ask)).is_ok() {
        patience += FOR_THE_DRIVER;
    } else {
        asking.fetch_sub(1, Relaxed);
    }
    // Without the thread, it waits for the next one that starts, or the end of the process.
    if started.is_ok() || due.is_some() {
        let oom = oom.clone();
        reporter.pending.push(Pending {
            number,
            refusal,
            reply,
            oom,
            seen: None,
            patience,
            is_found: false,
            due,
            #[cfg(feature = "capture")]
            reading: None,
        });
        changed.notify_all();
    }
    started
}

/// Finds out what takes little time, unless the driver takes its.
fn see(session: &'static Session, number: u64, refusal: &Refusal, oom: &OutOfMemory, reply: &Sender<Found>) {
    let device = refusal.device;
    record_refusal(session, number, refusal, oom);
    let snapshot = Snapshot::now(&session.inbox, session, device);
    let peak = KeptPeak::of_device(&session.inbox, device, session.next_scope());
    let is_resolved = snapshot.stacks().all(|stack| session.is_resolved(stack));
    let groups = snapshot.groups(|stack| if is_resolved { session.stack(stack) } else { Stack::default() });
    let mut soon = oom.clone().with_holders(&groups);
    if !is_resolved {
        soon.places.clear();
    }
    let note = |soon: &OutOfMemory, stage| {
        if let Some(pending) = session.refusals.reporter().find(number).filter(|pending| !pending.is_found) {
            pending.oom = soon.clone();
        }
        let _ = reply.send(Found { oom: soon.clone(), stage });
    };
    note(&soon, Stage::Live);
    let known = session.devices().and_then(|devices| views::read(devices, device));
    // Libraries are not told apart before their stacks are resolved.
    if is_resolved {
        let live = groups;
        soon.breakdown = known.clone().map(|known| Breakdown::of(&Known { live, ..known }));
    }
    note(&soon, Stage::Read);
    if let Some(pending) = session.refusals.reporter().find(number).filter(|pending| !pending.is_found) {
        pending.seen = Some(Seen { snapshot, peak, known });
        session.refusals.changed.notify_all();
    }
}

/// What is live now is what the report of the refusal says.
#[cfg_attr(not(feature = "capture"), expect(unused_variables, reason = "nothing is recorded"))]
fn record_refusal(session: &Session, number: u64, refusal: &Refusal, oom: &OutOfMemory) {
    record_request!(
        session,
        Refused {
            refusal: number,
            device: refusal.device,
            asked: refusal.asked,
            kind: refusal.kind,
            stack: refusal.stack,
            path: oom.path.clone(),
        }
    );
}

/// Until nothing is pending any more.
fn run(session: &'static Session) {
    let (refusals, changed) = (&session.refusals, &session.refusals.changed);
    let mut reporter = refusals.reporter();
    loop {
        if let Some((number, refusal, oom, seen)) = reporter.take_seen() {
            drop(reporter);
            let unanswered = || {
                record_refusal(session, number, &refusal, &oom);
                Seen {
                    snapshot: Snapshot::now(&session.inbox, session, refusal.device),
                    peak: KeptPeak::of_device(&session.inbox, refusal.device, session.next_scope()),
                    known: Err(no_answer(FOR_THE_DRIVER)),
                }
            };
            let seen = seen.unwrap_or_else(unanswered);
            #[cfg(feature = "capture")]
            let reading = match &seen.known {
                Ok(known) => Ok(DeviceReading::new(refusal.device, known)),
                Err(error) => Err(error.to_string()),
            };
            let found = catch_unwind(AssertUnwindSafe(|| seen.resolved(session, oom, &refusal))).ok();
            reporter = refusals.reporter();
            if let (Some(pending), Some(oom)) = (reporter.find(number), found) {
                #[cfg(feature = "capture")]
                (pending.reading = Some(reading));
                pending.oom = oom.clone();
                let _ = pending.reply.send(Found { oom, stage: Stage::All });
            }
            reporter.pending.retain(|pending| !pending.is_found || pending.due.is_some());
        } else if let Some(pending) = reporter.take_due() {
            reporter.is_printing = true;
            drop(reporter);
            print(session, pending);
            reporter = refusals.reporter();
            reporter.is_printing = false;
            changed.notify_all();
        } else if let Some(moment) = reporter.next_moment() {
            let wait = moment.saturating_duration_since(Instant::now());
            (reporter, _) = changed.wait_timeout(reporter, wait).unwrap_or_else(PoisonError::into_inner);
        } else {
            reporter.is_running = false;
            return;
        }
    }
}

fn print(session: &Session, pending: Pending) {
    if session.is_silent() {
        return;
    }
    let Pending { oom, .. } = pending;
    let before = session.refusals.printed.fetch_add(1, Relaxed);
    if before < MOST {
        #[cfg(feature = "capture")]
        if let Some(reading) = pending.reading {
            record_request!(session, OutOfMemory { refusal: pending.number, reading });
        }
        session.print(Content::OutOfMemory(Box::new(oom)));
    }
    if before + 1 == MOST {
        session.print(Content::Notice("more allocations that are refused are not reported".to_owned()));
    }
}

/// The process ends: who was refused is given nothing any more.
pub(in crate::session) fn report_pending(session: &Session) {
    let changed = &session.refusals.changed;
    let mut reporter = session.refusals.reporter();
    reporter.is_over = true;
    changed.notify_all();
    let will_print = |reporter: &mut Reporter| reporter.will_print();
    (reporter, _) =
        changed.wait_timeout_while(reporter, AT_THE_END, will_print).unwrap_or_else(PoisonError::into_inner);
    let rest = mem::take(&mut reporter.pending);
    drop(reporter);
    rest.into_iter().filter(|pending| pending.due.is_some()).for_each(|pending| print(session, pending));
}

/// `GPUMEM_LEAKS=1`: says at the end of the process what was not freed.
pub(in crate::session) fn report_leaks(session: &'static Session) {
    if !session.settings.leaks || !session.is_begun() {
        return;
    }
    let is_intercepted = Now::find(session).is_intercepted(session);
    record_request!(session, Leaks { is_intercepted });
    session.print(Content::Leaks(derive::leaks(&session.inbox, session, is_intercepted)));
}

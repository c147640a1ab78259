//! The running thing of a process: the sources in use, the inbox, the sampler.

mod baseline;
mod body;
mod budget;
mod callsites;
mod handle;
mod labels;
mod notice;
mod oom;
mod peaks;
mod places;
mod pools;
mod sampler;
mod sink;
pub(crate) mod statistics;
mod status;
mod task;
#[cfg(feature = "sim")]
mod testing;
mod trace;
mod tracker;

use std::{
    cell::Cell,
    collections::HashMap,
    convert::Infallible,
    panic::{AssertUnwindSafe, Location, catch_unwind},
    sync::{
        Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use crate::inbox::{Readings, Subscription};
use once_cell::{race::OnceBox, sync::OnceCell};

pub(crate) use self::notice::Notice;
pub use self::{
    body::{BodyGuard, End, Lines, TraceSpec},
    budget::Budget,
    handle::{Entered, InScope, ScopeHandle},
    labels::label,
    oom::{on_oom, retry_after_trim},
    places::{breakdown, summary},
    sink::{Sink, set_sink},
    status::{LiveMemory, Status, status},
    task::Traced,
    trace::{GpuMemTrace, GpuMemTraceBuilder},
    tracker::{MemTracker, MemTrackerBuilder},
};
#[cfg(feature = "sim")]
pub use self::{budget::simulated_gpu, testing::TestSession};
use self::{callsites::CallsiteTable, notice::Notices, oom::Refusals, pools::Pools, sampler::Sampler};
pub(crate) use crate::inbox::Inbox;
pub use crate::report::{Figure, Relation};
#[cfg(all(feature = "bench", feature = "backtrace"))]
pub(crate) use crate::source::WAYS_TO_A_STACK;
#[cfg(all(feature = "bench", feature = "cupti", feature = "dispatch"))]
pub use crate::source::calls_of_both_sources;
use crate::{
    derive::{KeptPeak, Labels, Stack},
    error::{Error, Kind, Result},
    ledger::ScopePeriod,
    model::{
        Answer, Bytes, Device, EventKind, Family, Gauge, Key, MemKind, ScopeId, ScopeSpec, Source, StackId, Tag, Trace,
    },
    settings::{self, Settings},
    source::{self, Devices, RecordEvents, StackTable},
    sys::process,
};

const UNSUBSCRIBED: &str = "gpumem::unsubscribe() was called; call gpumem::subscribe()";

/// The session of the process.
static SESSION: OnceBox<Session> = OnceBox::new();

thread_local! {
    /// The session that a test put in the place of the process's, on this thread.
    static OVERRIDE: Cell<Option<&'static Session>> = const { Cell::new(None) };
}

/// Everything that a run of gpumem owns. The process has one; tests make their own.
pub(crate) struct Session {
    settings: &'static Settings,
    inbox: Inbox,
    callsites: CallsiteTable,
    stacks: StackTable,
    /// What stacks mean, as far as that was asked.
    stack_texts: Mutex<HashMap<StackId, Stack>>,
    labels: Mutex<Labels>,
    sink: RwLock<Option<Sink>>,
    notices: Notices,
    refusals: Refusals,
    sampler: Sampler,
    readings: Readings,
    pools: Pools,
    /// The next number for a scope or a kept peak.
    scopes: AtomicU64,
    subscription: Subscription<Error>,
    /// CUPTI was subscribed to at some time.
    is_cupti_heard: AtomicBool,
    /// Which functions other tools had replaced at the last look.
    displaced: Mutex<u128>,
    /// There was one.
    is_displaced: AtomicBool,
    /// Set when the sources post to it.
    begun: OnceCell<()>,
    /// Its own devices. A session without them uses the process's.
    devices: OnceCell<&'static dyn Devices>,
}

impl Session {
    fn new(settings: &'static Settings) -> Self {
        Self {
            settings,
            inbox: Inbox::new(),
            callsites: CallsiteTable::default(),
            stacks: StackTable::default(),
            stack_texts: Mutex::default(),
            labels: Mutex::default(),
            sink: RwLock::new(None),
            notices: Notices::default(),
            refusals: Refusals::default(),
            sampler: Sampler::default(),
            readings: Readings::new(),
            pools: Pools::default(),
            scopes: AtomicU64::new(0),
            subscription: Subscription::new(),
            is_cupti_heard: AtomicBool::new(false),
            displaced: Mutex::new(0),
            is_displaced: AtomicBool::new(false),
            begun: OnceCell::new(),
            devices: OnceCell::new(),
        }
    }

    /// The session, to which the sources of its devices post from now on.
    fn begun(&'static self) -> &'static Self {
        self.begun.get_or_init(|| {
            // Another session has devices of its own, which post to it by themselves.
            if self.devices.get().is_none() {
                source::record_to::<ToSession>(source::min_bytes_of(self.settings));
                source::handle_refusals(source::RefusalHandler { refused, obtained });
                process::at_exit(at_exit);
            }
        });
        self
    }

    /// Whether the sources post to it.
    fn is_begun(&self) -> bool {
        self.begun.get().is_some()
    }

    /// Its devices, announced where they are simulated.
    pub(crate) fn devices(&self) -> Result<&'static dyn Devices> {
        alive()?;
        process::notice_forks();
        self.settings();
        let devices = self.devices.get().map_or_else(source::devices, |own| Ok(*own))?;
        if devices.family() == Family::Simulated {
            let text = "figures are those of a simulated GPU (GPUMEM_SIM or SimGpu::install), not of a real one";
            self.notify(Notice::Simulated, &text);
        }
        Ok(devices)
    }

    /// The number of the calling thread's stack.
    #[cfg_attr(
        not(feature = "sim"),
        expect(clippy::unused_self, reason = "only simulated devices have other sessions")
    )]
    fn stack_here(&self) -> StackId {
        #[cfg(feature = "sim")]
        if self.devices.get().is_some() {
            return source::uncached_stack(|addresses| self.stacks.number(addresses));
        }
        source::current_stack()
    }

    /// Begins to intercept allocations if traces will want that; if it fails, they will say why.
    pub(crate) fn prepare(&'static self, devices: &dyn Devices) {
        if matches!(self.settings().gauge(), Ok(None | Some(Gauge::Exact))) {
            let _ = self.subscribe(devices, None, false);
        }
    }

    /// A number for a scope, or for a peak that is kept.
    fn next_scope(&self) -> ScopeId {
        ScopeId(self.scopes.fetch_add(1, Relaxed))
    }

    /// Intercepts allocations from now on, unless that was given up: through the wanted source, else through that of
    /// `GPUMEM_SOURCE`, else through the best. If it is needed, a `GPUMEM_SOURCE` that means nothing is passed over.
    fn subscribe(&'static self, devices: &dyn Devices, wanted: Option<Source>, is_needed: bool) -> Result<Source> {
        self.begin(devices, wanted, is_needed, false)
    }

    /// The same, `anew` also if it was given up.
    fn begin(
        &'static self,
        devices: &dyn Devices,
        wanted: Option<Source>,
        is_needed: bool,
        anew: bool,
    ) -> Result<Source> {
        let subscribed = self.begun().subscription.begin(anew, given_up, || {
            // Whichever source is in use serves who wants none in particular.
            if let (None, Some(live)) = (wanted, devices.subscribed()) {
                return Ok(live);
            }
            let wanted = wanted.map_or_else(|| self.settings().source(), |wanted| Ok(Some(wanted)));
            let subscribed = devices.subscribe(unless_needed(wanted, is_needed)?)?;
            if subscribed.source == Source::Cupti && !self.is_cupti_heard.swap(true, Relaxed) {
                // libcupti began now. Its subscription has to end before it is torn down.
                process::at_exit(at_exit);
            }
            Ok(subscribed)
        });
        subscribed.map(|interception| interception.source)
    }

    /// What can only be asked: what graphs of the device hold, and functions that other tools have taken from us, of which calls
    /// may be missed.
    fn post_asked(&self, device: Device, devices: &dyn Devices) {
        devices.poll(device.ordinal);
        if devices.displaced() == 0 && !self.is_displaced.load(Relaxed) {
            return;
        }
        // Locked from the look to the fold: an older look must not be folded after a newer one.
        let mut before = self.displaced.lock().unwrap_or_else(PoisonError::into_inner);
        let now = devices.displaced();
        if now != *before {
            let more = (now & !*before).count_ones().into();
            self.inbox.post(&EventKind::Displaced { now: now.count_ones().into(), more });
            *before = now;
            self.is_displaced.store(now != 0, Relaxed);
        }
    }
}

fn given_up() -> Error {
    Kind::NoGauge { gauge: "exact", why: UNSUBSCRIBED }.into()
}

/// Intercepts every allocation from now on: through the source that `GPUMEM_SOURCE` names, else through the driver's dispatch
/// table, else through CUPTI. The first exact trace does this by itself; a program that allocates before its first trace calls
/// this (or [`preload`](crate::preload)) first, so that these blocks are known.
///
/// # Errors
/// When allocations cannot be intercepted: there is no driver; or the dispatch table cannot be used, and CUPTI is not installed
/// or another tool has its one subscription ([`Error::is_busy`]).
#[doc(alias = "cuptiSubscribe")]
pub fn subscribe() -> Result<()> {
    let session = current();
    session.begin(session.devices()?, None, false, true).map(|_| ())
}

/// Intercepts no allocations until [`subscribe`] is called: the driver's own pointers are put back into its dispatch table, or
/// CUPTI's one subscription is given up, so that another tool can have it. What is known of live blocks is kept; traces that are
/// open are told that events were lost ([`Trace::lost`]), and new ones are sampled. Simulated devices report their allocations
/// themselves, and go on.
#[doc(alias = "cuptiUnsubscribe")]
pub fn unsubscribe() {
    let session = current();
    let Ok(devices) = session.devices() else { return };
    if devices.family() == Family::Simulated {
        return;
    }
    let session = session.begun();
    let tell = || _ = session.inbox.post(&EventKind::Lost { count: 1 });
    let unsubscribe = || {
        devices.unsubscribe();
        // Blocks that came meanwhile may be freed and nobody hears it, as those before; this counts nothing more as lost.
        session.inbox.post(&EventKind::Lost { count: 0 });
    };
    session.subscription.stop(|| devices.subscribed().is_some(), tell, unsubscribe);
}

/// The session of the calling thread: the process's, unless a test put another one in its place.
#[inline]
pub(crate) fn current() -> &'static Session {
    OVERRIDE.get().unwrap_or_else(of_process)
}

/// The session of the process. Threads that come first together may each make one, of which one stays: none waits for another,
/// which the child of a fork may lack.
fn of_process() -> &'static Session {
    SESSION.get_or_init(|| Box::new(Session::new(settings::settings())))
}

fn refused(device: Option<Device>, bytes: Bytes, kind: MemKind) {
    oom::refused(of_process(), device, bytes, kind);
}

fn obtained(device: Device, bytes: Bytes) {
    oom::obtained(of_process(), device, bytes);
}

/// Hands what sources intercept to the session.
struct ToSession;

impl RecordEvents for ToSession {
    #[allow(clippy::inline_always, reason = "a hook is one function, which takes fewer lines of the instruction cache")]
    #[inline(always)]
    fn alloc(key: Key, bytes: Bytes, tag: Tag) {
        if let Some(session) = SESSION.get() {
            session.inbox.alloc(key, bytes, tag);
        }
    }

    #[allow(clippy::inline_always, reason = "as above")]
    #[inline(always)]
    fn free(key: Key) -> Answer {
        let Some(session) = SESSION.get() else { return Answer::Applied };
        session.inbox.free(key)
    }

    fn record(event: &EventKind) -> Answer {
        of_process().inbox.post(event)
    }

    fn number_stack(addresses: &[usize]) -> StackId {
        of_process().stacks.number(addresses)
    }
}

#[cfg(all(feature = "bench", feature = "dispatch"))]
pub(crate) use crate::source::hook_for_nobody;

/// For benchmarks: a stream-ordered allocation and its free through the hooks of the dispatch table, with a function of its own
/// in the driver's place, and the same without hooks.
#[cfg(all(feature = "bench", feature = "dispatch"))]
pub(crate) fn rehearse() -> [fn(u64); 2] {
    let device = Device { family: Family::Cuda, ordinal: 0 };
    let spec = ScopeSpec {
        device,
        gauge: Gauge::Exact,
        every: Duration::ZERO,
        thread: None,
        callsite: crate::model::CallsiteId::NONE,
        source: Source::Dispatch,
        at_peak: false,
    };
    of_process().begun().inbox.post(&EventKind::Open { scope: ScopeId(u64::MAX), spec });
    source::rehearse::<ToSession>()
}

/// Libraries are torn down while the process exits, by handlers that they set when they began: nobody may be in them then, and
/// nothing is called any more. Handlers run in reverse order, so this is set again for libraries that begin later than the session.
extern "C" fn at_exit() {
    static REPORTED: AtomicBool = AtomicBool::new(false);
    if let (Some(session), false) = (SESSION.get(), process::is_forked()) {
        session.sampler.stop();
        if !REPORTED.swap(true, Relaxed) {
            // Nothing unwinds into C.
            let _ = catch_unwind(AssertUnwindSafe(|| oom::report_pending(session)));
            let _ = catch_unwind(AssertUnwindSafe(|| oom::report_leaks(session)));
            let _ = catch_unwind(AssertUnwindSafe(|| peaks::report_at_exit(session)));
        }
        if let Ok(devices) = source::devices() {
            devices.unsubscribe();
        }
    }
}

/// NVML and the driver may have begun later than the session.
extern "C" fn stop_sampling() {
    if let (Some(session), false) = (SESSION.get(), process::is_forked()) {
        session.sampler.stop();
    }
}

/// In the child of a fork locks may be held by threads that are not there, and CUDA does not work.
pub(crate) fn alive() -> Result<()> {
    if process::is_forked() { Err(Kind::Forked.into()) } else { Ok(()) }
}

/// What a new scope is asked to be.
#[derive(Clone, Copy, Debug, Default)]
struct ScopeRequest {
    /// Else the calling thread's current device.
    device: Option<u32>,
    /// Else the best.
    gauge: Option<Gauge>,
    /// Of exact figures; else the best, or the one in use.
    source: Option<Source>,
    /// Only what the calling thread allocates.
    of_thread: bool,
    /// Which allocations make its peak.
    at_peak: bool,
}

/// A scope that is open, on a device that is fixed.
struct OpenScope {
    session: &'static Session,
    id: ScopeId,
    device: Device,
    gauge: Gauge,
    /// Which allocations make its peak is known.
    at_peak: bool,
    devices: &'static dyn Devices,
}

impl OpenScope {
    /// Opens a scope by the gauge that was wished for, else by that of `GPUMEM_GAUGE`, else by the best that the devices
    /// offer. None where the gauge is `Off`.
    fn open(
        session: &'static Session,
        request: ScopeRequest,
        ctx: Option<&str>,
        location: &'static Location<'static>,
    ) -> Result<Option<Self>> {
        // First: a thread that is not in the child of a fork may have been reading the environment.
        alive()?;
        let gauge = match (request.gauge, unless_needed(session.settings().gauge(), request.of_thread)) {
            (Some(gauge), _) => Some(gauge),
            // One thread can be counted by exact figures alone: that is asked for, whatever the environment says.
            (None, set) if request.of_thread && set != Ok(Some(Gauge::Off)) => Some(Gauge::Exact),
            (None, set) => set?,
        };
        if gauge == Some(Gauge::Off) {
            return Ok(None);
        }
        let devices = session.devices()?;
        let device = devices.device(request.device)?;
        let ordinal = device.ordinal;
        session.begun();
        let asked_for = |gauge: Gauge| match request.gauge {
            Some(_) => format!("the gauge `{gauge}` was asked for"),
            None => format!("GPUMEM_GAUGE says {gauge}"),
        };
        if let (Some(gauge @ (Gauge::Sampled | Gauge::Pool)), Some(source)) = (gauge, request.source) {
            let detail = format!("`{source}` gives exact figures, and {}; leave one of them out", asked_for(gauge));
            return Err(Kind::BadSetting { setting: "source", detail }.into());
        }
        let interruptions = session.subscription.interruptions();
        let (gauge, source, not_exact) = match gauge {
            Some(Gauge::Sampled) => (Gauge::Sampled, Source::Sampling, None),
            Some(Gauge::Pool) => (Gauge::Pool, Source::PoolMark, None),
            _ => match session.subscribe(devices, request.source, request.of_thread) {
                Ok(source) => (Gauge::Exact, source, None),
                Err(why) if gauge.is_none() && request.source.is_none() => {
                    (Gauge::Sampled, Source::Sampling, Some(why))
                }
                Err(why) => return Err(why),
            },
        };
        let sampled = gauge == Gauge::Sampled;
        if gauge != Gauge::Exact && request.of_thread {
            let setting = "thread_local_only";
            let detail = format!("it needs exact figures, and {}; leave one of them out", asked_for(gauge));
            return Err(not_exact.unwrap_or_else(|| Kind::BadSetting { setting, detail }.into()));
        }
        let every = if sampled { session.settings.sample_every } else { Duration::ZERO };
        let thread = request.of_thread.then(|| session.inbox.this_thread());
        let callsite = session.callsites.number(ctx, location);
        let spec = ScopeSpec { device, gauge, every, thread, callsite, source, at_peak: request.at_peak };
        let id = session.next_scope();
        let open = EventKind::Open { scope: id, spec };
        match gauge {
            Gauge::Sampled => {
                let read = || {
                    let memory = devices.read(ordinal)?;
                    session.sampler.watch(session, device, devices)?;
                    Ok::<_, Error>(EventKind::Sample { device, memory })
                };
                session.readings.ask(&session.inbox, device, read, &open)?;
            }
            Gauge::Pool => session.pools.open(session, device, devices, &open)?,
            _ => {
                devices.check(ordinal)?;
                if gauge == Gauge::Exact && !process::is_forked() {
                    session.post_asked(device, devices);
                }
                session.inbox.post(&open);
                // Given up since, and told perhaps before this scope was there.
                if session.subscription.interruptions() != interruptions {
                    session.inbox.post(&EventKind::Lost { count: 1 });
                }
            }
        }
        // What a setting that cannot be used leads to is in its notice.
        if let Some(why) = not_exact.filter(|why| !session.settings.is_problem(why)) {
            let text = format_args!(
                "{device} is sampled every {every:?}, all processes on it, and shorter peaks are missed, because {why}"
            );
            session.notify(Notice::Sampled, &text);
        }
        let at_peak = request.at_peak && gauge == Gauge::Exact;
        Ok(Some(Self { session, id, device, gauge, at_peak, devices }))
    }

    fn read(&self) -> Trace {
        self.ask(EventKind::Read { scope: self.id })
    }

    /// As [`reset`](Self::reset), but its peak is still that since its start.
    fn next(&self) -> Trace {
        let scope = self.id;
        self.ask(if self.at_peak { EventKind::ResetKeepingPeak { scope } } else { EventKind::Reset { scope } })
    }

    /// One reading, for the answer and for the new start: nothing falls between.
    fn reset(&self) -> Trace {
        self.ask(EventKind::Reset { scope: self.id })
    }

    fn ask(&self, question: EventKind) -> Trace {
        let Self { session, device, devices, .. } = *self;
        let Session { inbox, pools, readings, .. } = session;
        if self.gauge == Gauge::Exact && !process::is_forked() {
            session.post_asked(device, devices);
        }
        let trace = match self.gauge {
            Gauge::Sampled if !process::is_forked() => {
                let read = || Ok::<_, Infallible>(sampler::reading(session, device, devices));
                let Ok(trace) = readings.ask(inbox, device, read, &question);
                trace
            }
            Gauge::Pool if !process::is_forked() => pools.ask(session, device, devices, &question),
            _ => inbox.ask(None, &question),
        };
        // Only a thread that is inside the inbox gets no answer, or a process that was forked.
        trace.unwrap_or_else(|| Trace::stale(self.device.ordinal, self.gauge))
    }

    /// What it has come to, what tells the blocks that were allocated in it, and what made its peak.
    fn close(self) -> (Trace, Option<ScopePeriod>, Option<KeptPeak<'static>>) {
        let within = self.session.inbox.scope_period(self.id);
        let trace = self.ask(EventKind::Close { scope: self.id });
        if self.gauge == Gauge::Sampled {
            self.session.sampler.unwatch(self.device);
        }
        (trace, within, self.at_peak.then(|| KeptPeak::of_closed(&self.session.inbox, self.id)))
    }
}

/// A variable of the environment that says nothing sensible is no reason to refuse what the program itself needs.
fn unless_needed<T>(set: Result<Option<T>>, is_needed: bool) -> Result<Option<T>> {
    // The notice of the settings says what is wrong.
    if is_needed { Ok(set.unwrap_or(None)) } else { set }
}

#[cfg(all(test, feature = "sim"))]
mod tests;

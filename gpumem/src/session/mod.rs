//! The session: everything that a run of gpumem owns.

/// Records a request for a report at this moment, if the session is recorded.
#[cfg(feature = "capture")]
macro_rules! record_request {
    ($session:expr, $($request:tt)*) => {
        $session.record_request(|| {
            use gpumem_core::recording::Request;
            Request::$($request)*
        })
    };
}

/// Without the feature nothing is recorded. The arguments count as used.
#[cfg(not(feature = "capture"))]
macro_rules! record_request {
    ($session:expr, $($request:tt)*) => {};
}

mod budgets;
mod events;
mod exit;
mod guards;
mod output;
mod pools;
#[cfg(all(feature = "capture", feature = "cuda", target_os = "linux"))]
mod ranges;
#[cfg(feature = "capture")]
mod recorded;
#[cfg(feature = "capture")]
mod recorder;
#[cfg(all(test, feature = "sim"))]
mod testing;
mod views;

use std::{
    collections::HashMap,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use crate::inbox::{Readings, Subscription};
use once_cell::{race::OnceBox, sync::OnceCell};

#[cfg(feature = "sim")]
pub use self::budgets::simulated_gpu;
#[cfg(all(feature = "capture", feature = "cuda", target_os = "linux"))]
pub use self::ranges::NVTX_OBSERVER;
#[cfg(all(test, feature = "sim"))]
use self::testing::TestSession;
pub use self::{
    budgets::Budget,
    events::{label, set_gauge, subscribe, unsubscribe},
    guards::{
        BodyGuard, End, Entered, GpuMemTrace, GpuMemTraceBuilder, InScope, Lines, MemTracker, MemTrackerBuilder,
        ScopeHandle, TraceSpec, Traced,
    },
    output::{on_oom, retry_after_trim, set_sink, stats, stats_n_reset},
    pools::Pool,
    views::{LiveMemory, Status, breakdown, status, summary},
};
use self::{
    events::{CallsiteTable, Sampler},
    output::{Notices, Refusals, SinkState, StatsTable},
};
pub(crate) use self::{output::Notice, views::statistics};
#[cfg(feature = "capture")]
pub use self::{
    recorded::{begin, begin_at_start, end, mark, serve_foreign_program},
    recorder::Keep,
};
use crate::{
    derive::{Labels, Stack},
    error::{Error, Kind, Result},
    model::{Family, ScopeId, StackId},
    process,
    settings::{self, Settings},
    source::{self, Devices, StackTable},
};
pub use gpumem_core::report::{Figure, Relation};

/// The inbox of a session. With the feature `capture`, a recording can be made of what comes through it.
#[cfg(feature = "capture")]
pub(crate) type Inbox = crate::inbox::Inbox<recorder::EventTap>;
#[cfg(not(feature = "capture"))]
pub(crate) type Inbox = crate::inbox::Inbox;

/// The session of the process.
static SESSION: OnceBox<Session> = OnceBox::new();

#[cfg(all(test, feature = "sim"))]
thread_local! {
    /// The session that a test put in the place of the process's, on this thread.
    static OVERRIDE: std::cell::Cell<Option<&'static Session>> = const { std::cell::Cell::new(None) };
}

/// Everything that a run of gpumem owns. The process has one; tests make their own.
pub(crate) struct Session {
    settings: &'static Settings,
    inbox: Inbox,
    #[cfg(feature = "capture")]
    recorder: recorder::Recorder,
    callsites: CallsiteTable,
    stacks: StackTable,
    /// The descriptions of stacks that were resolved.
    stack_texts: Mutex<HashMap<StackId, Stack>>,
    labels: Mutex<Labels>,
    pools: pools::PoolTable,
    sink: SinkState,
    stats: StatsTable,
    notices: Notices,
    refusals: Refusals,
    sampler: Sampler,
    readings: Readings,
    /// The next number for a scope or a kept peak.
    scopes: AtomicU64,
    subscription: Subscription<Error>,
    /// CUPTI was the source at some time.
    was_cupti_used: AtomicBool,
    /// The functions that other tools had replaced at the last check, one bit each.
    displaced: Mutex<u128>,
    /// `displaced` is not 0.
    is_displaced: AtomicBool,
    /// Set when the sources record into it.
    begun: OnceCell<()>,
    /// Its own devices, which only the sessions of tests have. A session without them uses the process's.
    devices: OnceCell<&'static dyn Devices>,
}

impl Session {
    fn new(settings: &'static Settings) -> Self {
        Self {
            settings,
            inbox: Inbox::new(),
            #[cfg(feature = "capture")]
            recorder: recorder::Recorder::default(),
            callsites: CallsiteTable::default(),
            stacks: StackTable::default(),
            stack_texts: Mutex::default(),
            labels: Mutex::default(),
            pools: pools::PoolTable::default(),
            sink: SinkState::default(),
            stats: StatsTable::default(),
            notices: Notices::default(),
            refusals: Refusals::default(),
            sampler: Sampler::default(),
            readings: Readings::new(),
            scopes: AtomicU64::new(0),
            subscription: Subscription::new(),
            was_cupti_used: AtomicBool::new(false),
            displaced: Mutex::new(0),
            is_displaced: AtomicBool::new(false),
            begun: OnceCell::new(),
            devices: OnceCell::new(),
        }
    }

    /// The session. The sources of its devices record into it from now on.
    fn begun(&'static self) -> &'static Self {
        self.begun.get_or_init(|| {
            #[cfg(feature = "capture")]
            self.begin_recording();
            // The devices of another session record into it without this.
            if self.devices.get().is_none() {
                events::record_process(self.settings);
                process::at_exit(exit::at_exit);
            }
        });
        self
    }

    /// Whether the sources record into it.
    fn is_begun(&self) -> bool {
        self.begun.get().is_some()
    }

    /// Its devices. If they are simulated, the first use prints a notice.
    pub(crate) fn devices(&self) -> Result<&'static dyn Devices> {
        alive()?;
        process::notice_forks();
        self.settings();
        let devices = self.devices.get().map_or_else(source::devices, |own| Ok(*own))?;
        if devices.family() == Family::Simulated {
            let text = "figures are those of a simulated GPU (GPUMEM_SIM or SimGpu::install), not of a real one";
            self.notify(Notice::Simulated, &text);
        } else if let Some((cards, _)) = source::replaced_cards().filter(|_| !self.settings.is_foreign) {
            self.notify(Notice::Simulated, &format_args!("the program does not have the real card: {cards}"));
        }
        Ok(devices)
    }

    /// No device can be measured, and none will be while the process runs: the driver is asked once.
    fn is_without_devices(&self) -> bool {
        self.devices().and_then(|devices| devices.check(0)).is_err_and(|error| error.is_unavailable())
    }

    /// The number of the calling thread's stack.
    #[cfg_attr(
        not(feature = "sim"),
        expect(clippy::unused_self, reason = "only simulated devices have other sessions")
    )]
    fn stack_here(&self) -> StackId {
        #[cfg(feature = "sim")]
        if self.devices.get().is_some() {
            return source::uncached_stack(|addresses| self.number_stack(addresses));
        }
        source::current_stack()
    }

    /// The number of the stack that was refused memory. Without stacks nothing is walked, and no debug information is read.
    fn stack_of_refusal(&self) -> StackId {
        if source::min_bytes_of(self.settings) == u64::MAX { StackId::NONE } else { self.stack_here() }
    }

    /// The number of a stack. A recording has what a new stack consists of before any event with it.
    #[cfg_attr(not(any(feature = "sim", feature = "cuda")), allow(dead_code, reason = "no source"))]
    fn number_stack(&self, addresses: &[usize]) -> StackId {
        #[cfg(feature = "capture")]
        if self.recorder.defines_stacks() {
            return self.number_and_define(addresses);
        }
        self.stacks.number(addresses, |_| {})
    }

    /// A number for a scope, or for a peak that is kept.
    fn next_scope(&self) -> ScopeId {
        ScopeId(self.scopes.fetch_add(1, Relaxed))
    }
}

/// The session of the calling thread: the process's, unless a test put another one in its place.
#[inline]
pub(crate) fn current() -> &'static Session {
    #[cfg(all(test, feature = "sim"))]
    if let Some(session) = OVERRIDE.get() {
        return session;
    }
    of_process()
}

/// The session of the process. Several threads may create one at the same time, and one of these is kept: a thread must not wait for
/// another, which might not exist in the child of a fork.
fn of_process() -> &'static Session {
    SESSION.get_or_init(|| Box::new(Session::new(settings::settings())))
}

/// An error in the child of a fork: locks may be held by threads that do not exist there, and CUDA does not work.
pub(crate) fn alive() -> Result<()> {
    if process::is_forked() { Err(Kind::Forked.into()) } else { Ok(()) }
}

#[cfg(all(test, feature = "sim"))]
mod tests;

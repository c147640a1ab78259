//! The data of a session. The types here do not refer to `Session`; that avoids an import cycle.

use std::{
    collections::HashMap,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use once_cell::{race::OnceBox, sync::OnceCell};

#[cfg(feature = "capture")]
use super::recorder::{EventTap, Recorder};
use super::{
    events::{CallsiteTable, Sampler},
    output::{Notices, Rejections, SinkState, StatsTable},
    pools::PoolTable,
};
use crate::{
    derive::{Labels, Stack},
    error::{Error, Kind, Result},
    inbox::{Readings, Subscription},
    model::{ScopeId, StackId, Threads},
    process,
    settings::{self, Settings},
    source::{self, Devices, StackTable},
};

/// The inbox of a session. With the feature `capture`, its events can be recorded.
#[cfg(feature = "capture")]
pub(crate) type Inbox = crate::inbox::Inbox<EventTap>;
#[cfg(not(feature = "capture"))]
pub(crate) type Inbox = crate::inbox::Inbox;

/// The session of the process.
pub(super) static SESSION: OnceBox<Session> = OnceBox::new();

#[cfg(all(test, feature = "sim"))]
thread_local! {
    /// The session that a test uses on this thread instead of the process's.
    pub(super) static OVERRIDE: std::cell::Cell<Option<&'static Session>> = const { std::cell::Cell::new(None) };
}

/// Everything that a gpumem run owns. The process has one; tests make their own.
pub(crate) struct Session {
    pub(super) settings: &'static Settings,
    pub(super) inbox: Inbox,
    #[cfg(feature = "capture")]
    pub(super) recorder: Recorder,
    pub(super) callsites: CallsiteTable,
    pub(super) stacks: StackTable,
    /// The descriptions of resolved stacks.
    pub(super) stack_texts: Mutex<HashMap<StackId, Stack>>,
    /// True while a background thread resolves stacks.
    pub(super) is_looking_up: AtomicBool,
    pub(super) labels: Mutex<Labels>,
    pub(super) pools: PoolTable,
    /// The threads that scopes adopt by default, if neither they nor `GPUMEM_ADOPT` name threads.
    pub(super) adopted: OnceCell<Threads>,
    pub(super) sink: SinkState,
    pub(super) stats: StatsTable,
    pub(super) notices: Notices,
    pub(super) rejections: Rejections,
    pub(super) sampler: Sampler,
    pub(super) readings: Readings,
    /// The next id for a scope or a kept peak.
    pub(super) scopes: AtomicU64,
    pub(super) subscription: Subscription<Error>,
    /// True if CUPTI was the source at any time.
    pub(super) was_cupti_used: AtomicBool,
    /// The functions that other tools had replaced at the last check, one bit each.
    pub(super) displaced: Mutex<u128>,
    /// True if `displaced` is not 0.
    pub(super) is_displaced: AtomicBool,
    /// Set when the sources record into the session.
    pub(super) started: OnceCell<()>,
    /// The session's own devices, only in tests. Other sessions use the process's devices.
    pub(super) devices: OnceCell<&'static dyn Devices>,
}

impl Session {
    pub(super) fn new(settings: &'static Settings) -> Self {
        Self {
            settings,
            inbox: Inbox::new(),
            #[cfg(feature = "capture")]
            recorder: Recorder::default(),
            callsites: CallsiteTable::default(),
            stacks: StackTable::default(),
            stack_texts: Mutex::default(),
            is_looking_up: AtomicBool::new(false),
            labels: Mutex::default(),
            pools: PoolTable::default(),
            adopted: OnceCell::new(),
            sink: SinkState::default(),
            stats: StatsTable::default(),
            notices: Notices::default(),
            rejections: Rejections::default(),
            sampler: Sampler::default(),
            readings: Readings::new(),
            scopes: AtomicU64::new(0),
            subscription: Subscription::new(),
            was_cupti_used: AtomicBool::new(false),
            displaced: Mutex::new(0),
            is_displaced: AtomicBool::new(false),
            started: OnceCell::new(),
            devices: OnceCell::new(),
        }
    }

    /// Returns whether the sources record into the session.
    pub(super) fn is_started(&self) -> bool {
        self.started.get().is_some()
    }

    /// Returns the id of the calling thread's stack.
    #[cfg_attr(
        not(feature = "sim"),
        expect(clippy::unused_self, reason = "only simulated devices have other sessions")
    )]
    pub(super) fn stack_here(&self) -> StackId {
        #[cfg(feature = "sim")]
        if self.devices.get().is_some() {
            return source::uncached_stack(|addresses| self.number_stack(addresses));
        }
        source::current_stack()
    }

    /// Returns the id of the stack whose allocation was rejected. Without stacks, nothing is walked, and no debug information is
    /// read.
    pub(super) fn rejection_stack(&self) -> StackId {
        if source::min_bytes_of(self.settings) == u64::MAX { StackId::NONE } else { self.stack_here() }
    }

    /// Returns the id of a stack. In a recording, the definition of a new stack precedes its first event.
    #[cfg_attr(not(any(feature = "sim", feature = "cuda")), allow(dead_code, reason = "no source"))]
    pub(super) fn number_stack(&self, addresses: &[usize]) -> StackId {
        #[cfg(feature = "capture")]
        if self.recorder.defines_stacks() {
            return self.number_and_define(addresses);
        }
        self.stacks.number(addresses, |_| {})
    }

    /// Returns an id for a scope, or for a kept peak.
    pub(super) fn next_scope(&self) -> ScopeId {
        ScopeId(self.scopes.fetch_add(1, Relaxed))
    }
}

/// Returns the session of the calling thread: the process's, unless a test has replaced it.
#[inline]
pub(crate) fn current() -> &'static Session {
    #[cfg(all(test, feature = "sim"))]
    if let Some(session) = OVERRIDE.get() {
        return session;
    }
    of_process()
}

/// Returns the session of the process. Several threads may create one at the same time, and one of them is kept: a thread must not
/// wait for another, which might not exist in the child of a fork.
pub(super) fn of_process() -> &'static Session {
    SESSION.get_or_init(|| Box::new(Session::new(settings::settings())))
}

/// Returns an error in the child of a fork: there, locks may be held by threads that do not exist, and CUDA does not work.
pub(crate) fn alive() -> Result<()> {
    if process::is_forked() { Err(Kind::Forked.into()) } else { Ok(()) }
}

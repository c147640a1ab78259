//! The state of the recording in a session.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    time::Duration,
};

use gpumem_recording::{Item, RingWriter, ThreadDefinition};

use super::modules::{EarlyDefinitions, ModuleTable, ResolvedAddress};
use crate::{
    clock,
    inbox::Tap,
    model::{Event, StackId, ThreadId},
    process,
    ring_memory::{RingPages, prefetch_for_writing},
};

/// How many slots ahead a line is prefetched: the events of all threads until it arrives.
const SLOTS_AHEAD: u64 = 4;

/// Puts each event into the ring, while the session is recorded.
#[derive(Debug, Default)]
pub(crate) struct EventTap(pub(super) Option<Box<RingWriter<RingPages>>>);

impl Tap for EventTap {
    #[allow(clippy::inline_always, reason = "see `RingWriter::event`")]
    #[inline(always)]
    fn record(&mut self, event: &Event<'_>) {
        if let Some(ring) = &mut self.0 {
            ring.event(event, clock::ticks());
            // The line is in the cache of another processor, whose thread empties the ring.
            prefetch_for_writing(ring.line_ahead(SLOTS_AHEAD));
        }
    }

    fn start_thread(&mut self, thread: ThreadId, is_reused: bool) {
        if let Some(ring) = &mut self.0 {
            if is_reused {
                ring.item(&Item::ThreadReused(thread));
            }
            // The writing thread finds the name.
            ring.item(&Item::Thread(ThreadDefinition { thread, os_id: process::thread_id(), name: None }));
        }
    }
}

/// The recording of a session, if there is one.
#[derive(Debug, Default)]
pub(in crate::session) struct Recorder {
    pub(super) is_on: AtomicBool,
    pub(super) running: Mutex<Option<Running>>,
    /// The number of events that did not fit into the ring, at the end of the recording.
    pub(super) missed_last: AtomicU64,
    /// True if gpumem was injected into the program.
    pub(super) is_injected: AtomicBool,
    /// The age of the process when the recording started, if it may have allocated before.
    pub(super) ran_before: Mutex<Option<Duration>>,
    pub(super) modules: ModuleTable,
    /// True if there is space for definitions.
    pub(super) defines_stacks: AtomicBool,
    pub(super) early: Mutex<Option<EarlyDefinitions>>,
}

#[derive(Debug)]
pub(super) struct Running {
    pub(super) stop: Arc<AtomicBool>,
    pub(super) thread: std::thread::Thread,
    pub(super) is_done: mpsc::Receiver<()>,
}

impl Recorder {
    /// Notes that gpumem was injected into the program. The command resolves stacks after the program has ended, and the user's
    /// lines are in the program, not in the file with this code.
    pub(in crate::session) fn set_injected(&self) {
        self.is_injected.store(true, Relaxed);
    }

    /// Notes that the next recording does not start with the process.
    pub(in crate::session) fn set_late(&self) {
        let age = process::age().unwrap_or_default();
        *self.ran_before.lock().unwrap_or_else(PoisonError::into_inner) = Some(age);
    }

    pub(super) fn ran_before(&self) -> Option<Duration> {
        *self.ran_before.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::session) fn defines_stacks(&self) -> bool {
        self.defines_stacks.load(Relaxed)
    }

    pub(super) fn early(&self) -> MutexGuard<'_, Option<EarlyDefinitions>> {
        self.early.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn define_early(&self, id: StackId, addresses: &[ResolvedAddress]) {
        if let Some(early) = &mut *self.early() {
            early.define(id, addresses);
        }
    }

    pub(in crate::session) fn is_injected(&self) -> bool {
        self.is_injected.load(Relaxed)
    }
}

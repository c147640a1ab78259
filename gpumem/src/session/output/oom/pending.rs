//! The reports that are not printed yet.

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU64, AtomicUsize},
    },
    time::{Duration, Instant},
};

use crossbeam_channel::Sender;

use super::rejection::{Observation, OomUpdate, ThreadRejection};
use crate::report::OutOfMemory;

/// The time that a report waits. The report is removed if the thread obtains the memory within this time: allocators with a cache
/// empty the cache and try again.
const PRINT_DELAY: Duration = Duration::from_secs(1);

/// The largest number of pending reports.
const MAX_PENDING: usize = 32;

/// The program's function for rejected allocations.
pub(super) type Hook = Arc<dyn Fn(&OutOfMemory) + Send + Sync>;

/// The rejected allocations of a session: the program's function, and the reports.
#[derive(Default)]
pub(in crate::session) struct Rejections {
    pub(super) hook: RwLock<Option<Hook>>,
    /// The number of rejected allocations.
    pub(in crate::session) count: AtomicU64,
    /// The number of printed reports.
    pub(super) printed: AtomicU64,
    reporter: Mutex<Reporter>,
    /// Notified when the pending reports have changed.
    pub(super) changed: Condvar,
    /// The number of threads that are waiting for the driver.
    pub(super) driver_threads: AtomicUsize,
}

impl Rejections {
    pub(super) fn reporter(&self) -> MutexGuard<'_, Reporter> {
        self.reporter.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A rejected allocation whose report is not printed yet.
pub(super) struct PendingReport {
    pub(super) number: u64,
    pub(super) rejection: ThreadRejection,
    /// The channel to the thread that made the call.
    pub(super) updates: Sender<OomUpdate>,
    /// The report, as far as it is known.
    pub(super) oom: OutOfMemory,
    /// The stacks to resolve.
    pub(super) observation: Option<Observation>,
    /// The time at which the report stops waiting for the driver.
    pub(super) driver_deadline: Instant,
    /// True if the stacks are resolved, or are being resolved.
    pub(super) is_resolved: bool,
    /// The time at which the report is printed. `None` if only the program's function gets it.
    pub(super) due: Option<Instant>,
}

/// The pending reports, and the state of the thread that prints them.
#[derive(Default)]
pub(super) struct Reporter {
    pub(super) pending: Vec<PendingReport>,
    pub(super) next: u64,
    pub(super) is_running: bool,
    /// True while a report that was removed from `pending` is being printed.
    pub(super) is_printing: bool,
    /// True if the process is exiting.
    pub(super) is_exiting: bool,
}

impl Reporter {
    pub(super) fn find(&mut self, number: u64) -> Option<&mut PendingReport> {
        self.pending.iter_mut().find(|pending| pending.number == number)
    }

    /// Returns the report with this id, unless its stacks are resolved or being resolved.
    pub(super) fn unresolved(&mut self, number: u64) -> Option<&mut PendingReport> {
        self.find(number).filter(|pending| !pending.is_resolved)
    }

    /// Returns the time at which to print the report. If a report of the same request is pending, removes it and returns its
    /// time: a retried request is reported once, with the state after the last attempt, when caches are empty.
    pub(super) fn due_time(&mut self, rejection: &ThreadRejection, is_printed: bool) -> Option<Instant> {
        let is_same = |pending: &PendingReport| {
            let key = |rejection: &ThreadRejection| (rejection.thread, rejection.of.device, rejection.of.requested);
            pending.due.is_some() && key(&pending.rejection) == key(rejection)
        };
        if let Some(at) = self.pending.iter().position(is_same) {
            return self.pending.remove(at).due;
        }
        (is_printed && self.pending.len() < MAX_PENDING).then(|| Instant::now() + PRINT_DELAY)
    }

    /// Returns the next report whose stacks can be resolved: the driver has answered, or its time is over. Marks it as
    /// resolved.
    pub(super) fn next_to_resolve(&mut self) -> Option<(u64, ThreadRejection, Option<Observation>)> {
        let now = Instant::now();
        let is_ready = |pending: &&mut PendingReport| {
            !pending.is_resolved && (pending.observation.is_some() || pending.driver_deadline <= now)
        };
        let pending = self.pending.iter_mut().find(is_ready)?;
        pending.is_resolved = true;
        Some((pending.number, pending.rejection.clone(), pending.observation.take()))
    }

    /// Removes and returns the next report that is due.
    pub(super) fn remove_due(&mut self) -> Option<PendingReport> {
        let now = Instant::now();
        let is_due = |pending: &PendingReport| pending.due.is_some_and(|due| due <= now || self.is_exiting);
        let at = self.pending.iter().position(|pending| pending.is_resolved && is_due(pending))?;
        Some(self.pending.remove(at))
    }

    /// Returns whether the thread is printing a report or will print one.
    pub(super) fn will_print(&self) -> bool {
        self.is_printing || self.is_running && self.pending.iter().any(|pending| pending.due.is_some())
    }

    /// Returns the time at which the next report must be resolved or printed.
    pub(super) fn next_moment(&self) -> Option<Instant> {
        let moment =
            |pending: &PendingReport| if pending.is_resolved { pending.due } else { Some(pending.driver_deadline) };
        self.pending.iter().filter_map(moment).min()
    }
}

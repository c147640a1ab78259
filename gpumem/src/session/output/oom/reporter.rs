//! The threads that find the holders of the memory, and print the reports. They run only while reports are pending.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{PoisonError, atomic::Ordering::Relaxed},
    time::Instant,
};

use crossbeam_channel::Sender;

use super::{
    pending::{PendingReport, Rejections},
    print::print,
    rejection::{DRIVER_WAIT, Observation, OomUpdate, Stage, ThreadRejection, no_answer},
};
use crate::{
    derive::{KeptPeak, Names, Snapshot, Stack},
    error::{Error, Result},
    own_threads,
    report::{Breakdown, OutOfMemory},
    session::{Session, views},
    source,
};

/// The largest number of threads that wait for the driver. It may never answer.
const MAX_DRIVER_THREADS: usize = 4;

/// Starts the threads that find the holders of the memory, and schedules the report. The calling thread does not do this itself:
/// it may be in a callback, where calls to the driver and the loader can deadlock.
pub(super) fn investigate(
    session: &'static Session,
    rejection: ThreadRejection,
    is_printed: bool,
    updates: Sender<OomUpdate>,
) -> Result<()> {
    let Rejections { driver_threads, changed, .. } = &session.rejections;
    let mut reporter = session.rejections.reporter();
    let mut started = Ok(());
    if !reporter.is_running {
        started = own_threads::spawn("oom", move || run(session)).map(drop).map_err(Error::no_thread);
        reporter.is_running = started.is_ok();
    }
    let due = reporter.due_time(&rejection, is_printed);
    if due.is_some() {
        source::watch_allocations(true);
    }
    let number = reporter.next;
    reporter.next += 1;
    // The driver may never answer, so a separate thread reads it, and the number of these threads is limited.
    let mut driver_deadline = Instant::now();
    let may_read = driver_threads.fetch_add(1, Relaxed) < MAX_DRIVER_THREADS;
    let read = {
        let (rejection, updates) = (rejection.clone(), updates.clone());
        move || {
            let _ = catch_unwind(AssertUnwindSafe(|| observe(session, number, &rejection, &updates)));
            driver_threads.fetch_sub(1, Relaxed);
        }
    };
    if may_read && own_threads::spawn("oom", read).is_ok() {
        driver_deadline += DRIVER_WAIT;
    } else {
        driver_threads.fetch_sub(1, Relaxed);
    }
    // If the thread did not start, the report waits for the next one that does, or for the exit of the process.
    if started.is_ok() || due.is_some() {
        let oom = rejection.report();
        reporter.pending.push(PendingReport {
            number,
            rejection,
            updates,
            oom,
            observation: None,
            driver_deadline,
            is_resolved: false,
            due,
        });
        changed.notify_all();
    }
    started
}

/// Reads the live memory, then the driver, and sends an update after each. Reads no files. Runs on a separate thread, because
/// the driver may never answer.
fn observe(session: &'static Session, number: u64, rejection: &ThreadRejection, updates: &Sender<OomUpdate>) {
    let (snapshot, peak) = live_now(session, rejection);
    let has_texts = snapshot.stacks().all(|stack| session.is_resolved(stack));
    let groups = snapshot.groups(|stack| if has_texts { session.stack(stack) } else { Stack::default() });
    let mut early = rejection.report().with_holders(&groups);
    if !has_texts {
        early.places.clear();
    }
    let send = |early: &OutOfMemory, stage| {
        if let Some(pending) = session.rejections.reporter().unresolved(number) {
            pending.oom = early.clone();
        }
        let _ = updates.send(OomUpdate { oom: early.clone(), stage });
    };
    send(&early, Stage::Scopes);
    let reading = session.devices().and_then(|devices| views::read(session, devices, rejection.of.device));
    // The breakdown has a part for each library, which only resolved stacks name.
    if has_texts {
        early.breakdown = reading.clone().map(|reading| Breakdown::of(&reading, std::process::id(), &groups));
    }
    send(&early, Stage::Device);
    if let Some(pending) = session.rejections.reporter().unresolved(number) {
        pending.observation = Some(Observation { snapshot, peak, reading });
        session.rejections.changed.notify_all();
    }
}

/// Resolves and prints reports until none is pending.
fn run(session: &'static Session) {
    let (rejections, changed) = (&session.rejections, &session.rejections.changed);
    let mut reporter = rejections.reporter();
    loop {
        if let Some((number, rejection, observation)) = reporter.next_to_resolve() {
            drop(reporter);
            let observation = observation.unwrap_or_else(|| Observation::without_driver(session, &rejection));
            let resolved = catch_unwind(AssertUnwindSafe(|| observation.resolve(session, &rejection))).ok();
            reporter = rejections.reporter();
            if let (Some(pending), Some(oom)) = (reporter.find(number), resolved) {
                pending.oom = oom.clone();
                let _ = pending.updates.send(OomUpdate { oom, stage: Stage::Complete });
            }
            reporter.pending.retain(|pending| !pending.is_resolved || pending.due.is_some());
        } else if let Some(pending) = reporter.remove_due() {
            reporter.is_printing = true;
            drop(reporter);
            print(session, pending);
            reporter = rejections.reporter();
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

impl Observation {
    /// Returns an observation with the current live memory, for a driver that did not answer in time.
    fn without_driver(session: &'static Session, rejection: &ThreadRejection) -> Self {
        let (snapshot, peak) = live_now(session, rejection);
        Self { snapshot, peak, reading: Err(no_answer(DRIVER_WAIT)) }
    }

    /// Returns the complete report. Reads the files with debug information, unless they were read before.
    fn resolve(self, session: &Session, rejection: &ThreadRejection) -> OutOfMemory {
        let peak = self.peak.and_then(|peak| peak.holders(session));
        rejection.of.resolved(&self.snapshot, peak, self.reading, std::process::id(), session)
    }
}

/// Returns the live memory, and the allocations that made the device's peak.
fn live_now(session: &'static Session, rejection: &ThreadRejection) -> (Snapshot, Option<KeptPeak<'static>>) {
    let snapshot = Snapshot::now(&session.inbox, session, rejection.of.device);
    let peak = KeptPeak::of_device(&session.inbox, rejection.of.device, session.next_scope());
    (snapshot, peak)
}

//! In place of the library's `session/sync.rs`: the checker's kind of each part.

pub(super) use std::sync::PoisonError;
use std::{
    cell::{Cell, RefCell},
    time::Duration,
};

use shuttle::{
    lazy_static,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};
pub(super) use shuttle::{sync::MutexGuard, thread_local};

lazy_static! {
    // From 1 in every run.
    static ref NEXT_THREAD: AtomicU32 = AtomicU32::new(1);
    static ref RETURNED: shuttle::sync::Mutex<Vec<u32>> = shuttle::sync::Mutex::new(Vec::new());
}

/// Numbers are lent again only where that is what is looked at: a run has few threads, and each has a number of its own
/// elsewhere, by which its events are told.
pub(super) fn lend_number() -> (u32, bool) {
    let returned = if LENDS_AGAIN.get() { RETURNED.lock().unwrap().pop() } else { None };
    returned.map_or_else(|| (NEXT_THREAD.fetch_add(1, Relaxed), false), |number| (number, true))
}

pub(super) fn return_number(number: u32) {
    if LENDS_AGAIN.get() {
        RETURNED.lock().unwrap().push(number);
    }
}

pub(super) use shuttle::sync::{
    Mutex as Patient, MutexGuard as PatientGuard,
    atomic::{AtomicU64, Ordering::SeqCst},
};

#[derive(Debug)]
pub(super) struct Mutex<T>(shuttle::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(super) fn new(inside: T) -> Self {
        Self(shuttle::sync::Mutex::new(inside))
    }

    /// Nobody knows before an attempt.
    #[expect(clippy::unused_self, reason = "it is called as the real one is")]
    pub(super) fn is_locked(&self) -> bool {
        false
    }

    /// Where not patient, a try that fails takes until the lock is given back, so that a thread that waits for itself is a
    /// deadlock, which the checker reports, and not a wait without end.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        if PATIENT.get() {
            return self.0.lock().ok();
        }
        let taken = self.0.try_lock().ok();
        if taken.is_none() {
            drop(self.0.lock());
        }
        taken
    }
}

// Of the real thread, in which all of a run's threads take turns, as everything that is no step which others could see.
std::thread_local! {
    static PATIENT: Cell<bool> = const { Cell::new(false) };
    static LENDS_AGAIN: Cell<bool> = const { Cell::new(false) };
    static TICKS: Cell<u64> = const { Cell::new(0) };
}

/// Whether to try the lock is to wait for it: threads that try again have endlessly many orders, which differ in nothing but
/// how often they tried.
pub(crate) fn set_patient(patient: bool) {
    PATIENT.set(patient);
}

/// Whether the number of a thread that has ended is given to another one.
pub(crate) fn set_lends_again(lends_again: bool) {
    LENDS_AGAIN.set(lends_again);
}

/// Over at once, so that both ways to wait are gone: a snooze, then sleep.
pub(super) struct Backoff(Cell<bool>);

impl Backoff {
    pub(super) fn new() -> Self {
        Self(Cell::new(false))
    }

    pub(super) fn is_completed(&self) -> bool {
        self.0.get()
    }

    pub(super) fn snooze(&self) {
        self.0.set(true);
        interrupt();
    }
}

pub(super) fn sleep(_: Duration) {
    interrupt();
}

/// A clock that ticks whenever it is read.
#[derive(Debug)]
pub(super) struct Instant(u64);

impl Instant {
    pub(super) fn now() -> Self {
        Self(tick())
    }

    pub(super) fn elapsed(&self) -> Duration {
        interrupt();
        Duration::from_nanos(tick() - self.0)
    }
}

fn tick() -> u64 {
    TICKS.replace(TICKS.get() + 1)
}

thread_local! {
    static INTERRUPT: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
}

/// Has `handler` run in the middle of what the calling thread does next at the door, as a signal handler or a global allocator
/// would: where it reads the clock, or waits.
pub(crate) fn interrupt_with(handler: impl FnOnce() + 'static) {
    INTERRUPT.with(|interrupt| *interrupt.borrow_mut() = Some(Box::new(handler)));
}

fn interrupt() {
    let handler = INTERRUPT.with(|interrupt| interrupt.borrow_mut().take());
    if let Some(handler) = handler {
        handler();
    }
}

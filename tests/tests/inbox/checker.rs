//! The model checker's primitives for the library's inbox.

use std::{
    cell::{Cell, RefCell},
    mem,
    time::Duration,
};

use gpumem_core::{
    inbox::{Clock, Counter, Lock, Primitives, SpinLock, Tap, Wait},
    model::{Event, EventKind, ThreadId, ThreadName, Time},
};
use shuttle::{
    lazy_static,
    sync::{
        MutexGuard,
        atomic::{
            AtomicU32, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
};

pub(crate) type Inbox = gpumem_core::inbox::Inbox<Recorder, Checked>;
pub(crate) type Readings = gpumem_core::inbox::Readings<Checked>;
pub(crate) type Subscription = gpumem_core::inbox::Subscription<&'static str, Checked>;

/// An event that the ledger applied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Applied {
    pub(crate) number: u64,
    pub(crate) time: Time,
    pub(crate) thread: ThreadId,
    pub(crate) kind: EventKind,
}

/// Keeps the events that the ledger applied.
#[derive(Debug, Default)]
pub(crate) struct Recorder;

impl Tap for Recorder {
    const NEEDS_THREADS: bool = false;

    fn record(&mut self, event: &Event<'_>) {
        let Event { number, time, thread, kind } = *event;
        APPLIED.with(|applied| applied.borrow_mut().push(Applied { number, time, thread, kind: *kind }));
    }
}

/// Returns the events that the ledger of this run applied since the last call, in order.
pub(crate) fn applied() -> Vec<Applied> {
    APPLIED.with(|applied| mem::take(&mut *applied.borrow_mut()))
}

/// The primitives of the model checker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checked;

lazy_static! {
    // The ids start at 1 in each run.
    static ref NEXT_THREAD: AtomicU32 = AtomicU32::new(1);
    static ref RETURNED: shuttle::sync::Mutex<Vec<u32>> = shuttle::sync::Mutex::new(Vec::new());
}

gpumem_core::thread_variables!(shuttle::thread_local, Checked);

impl Primitives for Checked {
    type SpinLock<T> = CheckedLock<T>;
    type Lock<T> = CheckedLock<T>;
    type Counter = CheckedCounter;
    type Instant = Ticks;
    type Wait = Once;

    gpumem_core::thread_state!(Checked);

    /// Thread ids are reused only in tests about reused ids. In all other tests each thread has a separate id, by which its
    /// events are found.
    fn lend_number() -> (u32, bool) {
        let returned = if LENDS_AGAIN.get() { RETURNED.lock().unwrap().pop() } else { None };
        returned.map_or_else(|| (NEXT_THREAD.fetch_add(1, Relaxed), false), |number| (number, true))
    }

    fn return_number(number: u32) {
        if LENDS_AGAIN.get() {
            RETURNED.lock().unwrap().push(number);
        }
    }

    /// All threads of a run have this name.
    fn thread_name() -> ThreadName {
        ThreadName::new(b"worker-1")
    }

    fn inbox(_: bool) {}

    fn is_forked() -> bool {
        false
    }
}

/// The type of both locks of an inbox.
#[derive(Debug)]
pub(crate) struct CheckedLock<T>(shuttle::sync::Mutex<T>);

impl<T> SpinLock<T> for CheckedLock<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        Self: 'a;

    fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    /// Always returns false, because only an attempt to lock shows whether the lock is taken.
    fn is_locked(&self) -> bool {
        false
    }

    /// Tries to take the lock. If attempts are not patient, a failed attempt lasts until the lock is released. A thread that
    /// waits for itself is then a deadlock, which the checker reports, and not an endless loop.
    fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
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

impl<T> Lock<T> for CheckedLock<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        Self: 'a;

    fn new(value: T) -> Self {
        SpinLock::new(value)
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap()
    }
}

#[derive(Debug)]
pub(crate) struct CheckedCounter(AtomicU64);

impl Counter for CheckedCounter {
    fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }

    fn add(&self, more: u64) {
        self.0.fetch_add(more, SeqCst);
    }

    fn get(&self) -> u64 {
        self.0.load(SeqCst)
    }
}

// Variables of the real thread, on which all threads of a run take turns. Access to them is not a step that other threads could
// observe.
std::thread_local! {
    static APPLIED: RefCell<Vec<Applied>> = const { RefCell::new(Vec::new()) };
    static PATIENT: Cell<bool> = const { Cell::new(false) };
    static LENDS_AGAIN: Cell<bool> = const { Cell::new(false) };
    static TICKS: Cell<u64> = const { Cell::new(0) };
}

/// Sets whether an attempt to lock waits for the lock. If it does not wait, threads that try again have infinitely many orders,
/// which differ only in the number of attempts.
pub(crate) fn set_patient(patient: bool) {
    PATIENT.set(patient);
}

/// Sets whether the id of a thread that has ended is given to another thread.
pub(crate) fn set_lends_again(lends_again: bool) {
    LENDS_AGAIN.set(lends_again);
}

/// Waits only once, and can be interrupted during the wait.
pub(crate) struct Once;

impl Wait for Once {
    fn new() -> Self {
        Self
    }

    fn wait(&self) {
        interrupt();
    }
}

/// A clock that advances whenever it is read.
#[derive(Debug)]
pub(crate) struct Ticks(u64);

impl Clock for Ticks {
    fn now() -> Self {
        Self(tick())
    }

    fn elapsed(&self) -> Duration {
        interrupt();
        Duration::from_nanos(tick() - self.0)
    }
}

fn tick() -> u64 {
    TICKS.replace(TICKS.get() + 1)
}

shuttle::thread_local! {
    static INTERRUPT: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
}

/// Runs `handler` in the middle of the next call of the calling thread to the inbox, as a signal handler or a global allocator
/// would. The handler runs where the call reads the clock, or waits.
pub(crate) fn interrupt_with(handler: impl FnOnce() + 'static) {
    INTERRUPT.with(|interrupt| *interrupt.borrow_mut() = Some(Box::new(handler)));
}

fn interrupt() {
    let handler = INTERRUPT.with(|interrupt| interrupt.borrow_mut().take());
    if let Some(handler) = handler {
        handler();
    }
}

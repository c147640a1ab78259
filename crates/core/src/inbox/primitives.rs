//! The locks, the clock and the thread state that an inbox uses. A program uses [`Std`]. The model checker of the tests has
//! its own, so that it can choose which thread runs next.

use std::{
    fmt::Debug,
    ops::DerefMut,
    sync::{
        Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use crossbeam::utils::Backoff;
use spin::mutex::{SpinMutex, SpinMutexGuard};

use super::thread_state::ThreadState;
use crate::model::ThreadName;

/// The environment of an inbox.
pub trait Primitives: Debug + Sized + 'static {
    /// The lock around the ledger. It is held for about ten nanoseconds.
    type SpinLock<T>: SpinLock<T>;
    /// A lock that may be held for a long time. Waiting threads sleep.
    type Lock<T>: Lock<T>;
    /// A counter whose changes all threads see in the same order.
    type Counter: Counter;
    /// The clock.
    type Instant: Clock;
    /// The way in which a thread waits for the spin lock.
    type Wait: Wait;

    /// Calls `use_it` with the state of the calling thread.
    fn with_thread<R>(use_it: impl FnOnce(&ThreadState) -> R) -> R;

    /// Like [`with_thread`](Self::with_thread); `None` if the thread is ending and its state is gone.
    fn try_with_thread<R>(use_it: impl FnOnce(&ThreadState) -> R) -> Option<R>;

    /// Lends a number to the calling thread. Returns it, and whether another thread had it before.
    fn lend_number() -> (u32, bool);

    /// Arranges that the number is [returned](Self::return_number) when the calling thread ends.
    fn return_at_thread_end(number: u32);

    /// Returns the number of a thread that has ended.
    fn return_number(number: u32);

    /// Returns the name of the calling thread; empty if it is not known. Called under the lock of an inbox, at most once for each
    /// thread.
    fn thread_name() -> ThreadName;

    /// Counts the inboxes: called when one is created (`true`) or dropped (`false`). While several exist, no number is lent
    /// again, because only the inbox that lends it would know that the number now belongs to another thread.
    fn inbox(created: bool);

    /// Returns whether this process is the child of a fork. Threads that do not exist there may hold locks forever.
    fn is_forked() -> bool;
}

/// A lock whose waiting threads spin.
pub trait SpinLock<T> {
    /// Access to the value until it is dropped.
    type Guard<'a>: DerefMut<Target = T>
    where
        Self: 'a;

    /// Creates an unlocked lock around the value.
    fn new(value: T) -> Self;
    /// Returns whether a thread holds the lock. This is only a hint, because the answer may change immediately.
    fn is_locked(&self) -> bool;
    /// Locks without waiting. `None` if another thread holds the lock.
    fn try_lock(&self) -> Option<Self::Guard<'_>>;
}

/// A lock whose waiting threads sleep. It is not poisoned if its holder panics.
pub trait Lock<T> {
    /// Access to the value until it is dropped.
    type Guard<'a>: DerefMut<Target = T>
    where
        Self: 'a;

    /// Creates an unlocked lock around the value.
    fn new(value: T) -> Self;
    /// Waits until no other thread holds the lock, and locks it.
    fn lock(&self) -> Self::Guard<'_>;
}

/// A number to which several threads add.
pub trait Counter: Debug {
    /// Creates a counter with this value.
    fn new(value: u64) -> Self;
    /// Adds to the counter.
    fn add(&self, more: u64);
    /// Returns the current value.
    fn get(&self) -> u64;
}

/// A moment of a clock that never goes back.
pub trait Clock: Debug {
    /// Returns the current moment.
    fn now() -> Self;
    /// Returns the time since this moment.
    fn elapsed(&self) -> Duration;
}

/// The wait of one thread for a lock. Each lock attempt has its own.
pub trait Wait {
    /// Creates a wait that has not started.
    fn new() -> Self;
    /// Waits, a little longer with each call.
    fn wait(&self);
}

crate::thread_variables!(std::thread_local, Std);

/// The primitives of a program: those of `std`, and a spin lock that one store releases.
#[derive(Clone, Copy, Debug)]
pub struct Std;

impl<T> SpinLock<T> for SpinMutex<T> {
    type Guard<'a>
        = SpinMutexGuard<'a, T>
    where
        Self: 'a;

    fn new(value: T) -> Self {
        Self::new(value)
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.is_locked()
    }

    #[inline]
    fn try_lock(&self) -> Option<SpinMutexGuard<'_, T>> {
        self.try_lock()
    }
}

impl<T> Lock<T> for Mutex<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        Self: 'a;

    fn new(value: T) -> Self {
        Self::new(value)
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counter for AtomicU64 {
    fn new(value: u64) -> Self {
        Self::new(value)
    }

    fn add(&self, more: u64) {
        self.fetch_add(more, SeqCst);
    }

    fn get(&self) -> u64 {
        self.load(SeqCst)
    }
}

impl Clock for Instant {
    fn now() -> Self {
        Self::now()
    }

    fn elapsed(&self) -> Duration {
        Self::elapsed(self)
    }
}

impl Wait for Backoff {
    fn new() -> Self {
        Self::new()
    }

    fn wait(&self) {
        if self.is_completed() {
            sleep(Duration::from_micros(20));
        } else {
            self.snooze();
        }
    }
}

/// The standard library's `sleep` is not used: a thread may be cancelled in it (`pthread_cancel`), and would unwind out of a
/// hook.
fn sleep(duration: Duration) {
    static NOBODY_NOTIFIES: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
    let (lock, never) = &NOBODY_NOTIFIES;
    let locked = lock.lock().unwrap_or_else(PoisonError::into_inner);
    drop(never.wait_timeout(locked, duration));
}

/// The thread numbers that are lent.
struct Numbers {
    /// The largest number that was lent. Numbers start at 1.
    lent: u32,
    /// The numbers of threads that have ended.
    returned: Vec<u32>,
    /// The number of inboxes.
    inboxes: usize,
}

static NUMBERS: Mutex<Numbers> = Mutex::new(Numbers { lent: 0, returned: Vec::new(), inboxes: 0 });

fn numbers() -> MutexGuard<'static, Numbers> {
    NUMBERS.lock().unwrap_or_else(PoisonError::into_inner)
}

static NAME_OF_THREAD: OnceLock<fn() -> ThreadName> = OnceLock::new();

/// Sets the function that returns the name of the calling thread. That function must take only a fraction of a microsecond and no
/// lock. Only the first call has an effect.
pub fn name_threads_with(name: fn() -> ThreadName) {
    let _ = NAME_OF_THREAD.set(name);
}

static FORKED: AtomicBool = AtomicBool::new(false);

/// Marks this process as the child of a fork.
pub fn set_forked() {
    FORKED.store(true, Relaxed);
}

impl Primitives for Std {
    type SpinLock<T> = SpinMutex<T>;
    type Lock<T> = Mutex<T>;
    type Counter = AtomicU64;
    type Instant = Instant;
    type Wait = Backoff;

    crate::thread_state!(Std);

    fn lend_number() -> (u32, bool) {
        let mut numbers = numbers();
        let returned = if numbers.inboxes > 1 { None } else { numbers.returned.pop() };
        if let Some(returned) = returned {
            return (returned, true);
        }
        numbers.lent += 1;
        (numbers.lent, false)
    }

    fn return_number(number: u32) {
        numbers().returned.push(number);
    }

    fn thread_name() -> ThreadName {
        NAME_OF_THREAD.get().map_or_else(ThreadName::default, |name| name())
    }

    fn inbox(created: bool) {
        let mut numbers = numbers();
        numbers.inboxes = if created { numbers.inboxes + 1 } else { numbers.inboxes.saturating_sub(1) };
    }

    #[inline]
    fn is_forked() -> bool {
        FORKED.load(Relaxed)
    }
}

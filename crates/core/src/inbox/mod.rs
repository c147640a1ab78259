//! The inbox records the events of all threads, one after the other.

mod primitives;
mod readings;
mod subscription;
mod tap;
mod thread;
#[allow(missing_docs, reason = "`ThreadState::new` needs no sentence")]
mod thread_state;
mod views;
mod watch;
mod watches;

use std::{
    fmt, mem,
    panic::{AssertUnwindSafe, RefUnwindSafe, catch_unwind},
};

use self::watches::Watches;
pub use self::{
    primitives::{Clock, Counter, Lock, Primitives, SpinLock, Std, Wait, name_threads_with, set_forked},
    readings::Readings,
    subscription::Subscription,
    tap::{NoTap, Tap},
    thread::LentNumber,
    thread_state::ThreadState,
    views::LedgerView,
    watches::Watch,
};
use crate::{
    ledger::{BLOCK_PARTS, Ledger, Observer},
    model::{Answer, Block, Bytes, CallsiteId, Event, EventKind, Key, PoolId, Tag, ThreadId, Time, Trace},
};

/// Records events: gives each a number and a time and applies it to the ledger, under one lock that is held for a short
/// time. No call of a driver, no I/O and no formatting happens under it.
///
/// The lock, the number of events and the ledger's pending delta are in one cache line. In addition, an event writes only its
/// block and the record of its thread. When threads allocate in turn, each cache line that all of them write moves between their
/// processors.
#[repr(C, align(128))]
pub struct Inbox<T: Tap = NoTap, P: Primitives = Std> {
    state: P::SpinLock<InboxState<T>>,
    started: P::Instant,
    watches: P::Lock<Watches>,
}

#[derive(Debug)]
#[repr(C)]
struct InboxState<T> {
    number: u64,
    ledger: Ledger,
    time: Time,
    tap: T,
}

/// Leaves the inbox if the ledger panics. The event may have been applied only in part, so it counts as lost.
struct LeaveOnPanic<P: Primitives>(std::marker::PhantomData<P>);

impl<P: Primitives> Drop for LeaveOnPanic<P> {
    #[inline]
    fn drop(&mut self) {
        P::with_thread(|thread| {
            thread.lose(1);
            thread.leave();
        });
    }
}

/// Runs rare code in a separate function, so that the code for frequent events stays small in the instruction cache. Returns
/// `None` if the code panics; then an event counts as lost. Hooks and callbacks must not unwind.
#[cold]
#[inline(never)]
fn run_rare<P: Primitives, R>(code: impl FnOnce() -> R) -> Option<R> {
    let lose = |panic| {
        mem::forget(panic);
        P::with_thread(|thread| thread.lose(1));
    };
    catch_unwind(AssertUnwindSafe(code)).map_err(lose).ok()
}

/// Keeps the last event until the thread has left the inbox, if a budget watches for it.
#[inline]
fn keep_noticed<P: Primitives>(ledger: &mut Ledger) {
    if let Some(noticed) = ledger.noticed() {
        P::with_thread(|thread| thread.keep_noticed(noticed));
    }
}

type StateGuard<'a, T, P> = <<P as Primitives>::SpinLock<InboxState<T>> as SpinLock<InboxState<T>>>::Guard<'a>;

impl<T: Tap, P: Primitives> Inbox<T, P> {
    /// Creates an inbox without a tap in use. Its clock starts now.
    pub fn new() -> Self {
        Self::with(T::default(), false)
    }

    /// Creates an inbox that passes all events to this tap, starting with the first one.
    pub fn tapped(tap: T) -> Self {
        Self::with(tap, true)
    }

    fn with(tap: T, is_tapped: bool) -> Self {
        P::inbox(true);
        let mut ledger = Ledger::default();
        ledger.is_tapped = is_tapped;
        let state = InboxState { number: 0, ledger, time: Time::ZERO, tap };
        Self { state: P::SpinLock::new(state), started: P::Instant::now(), watches: P::Lock::new(Watches::default()) }
    }

    /// Records an allocation of a kind that needs no time (see `EventKind::needs_time`). Must not be called in the child of a
    /// fork. Does not panic.
    #[inline]
    pub fn alloc(&self, key: Key, bytes: Bytes, tag: Tag) {
        self.enter_alive(1, |state, thread| {
            self.prepare(state, false);
            if !state.ledger.alloc_like_latest(key, bytes, tag, state.number, thread) {
                self.alloc_rare(state, thread, move |ledger, number| ledger.alloc(key, bytes, tag, number, thread));
            }
            if T::IS_USED && state.ledger.is_tapped {
                state.pass_alloc(thread, key, bytes, tag);
            }
        });
    }

    /// Records the allocation of a part of a pool. Must not be called in the child of a fork. Does not panic.
    #[inline]
    pub fn part(&self, key: Key, bytes: Bytes, tag: Tag) {
        self.enter_alive(1, |state, thread| {
            self.prepare(state, false);
            if !state.ledger.part_like_latest(key, bytes, tag, state.number, thread) {
                self.alloc_rare(state, thread, move |ledger, number| ledger.part(key, bytes, tag, number, thread));
            }
            if T::IS_USED && state.ledger.is_tapped {
                state.pass_alloc(thread, key, bytes, tag);
            }
        });
    }

    /// Applies an allocation that differs from the last one. Does not panic.
    fn alloc_rare(&self, state: &mut InboxState<T>, thread: ThreadId, apply: impl FnOnce(&mut Ledger, u64)) {
        run_rare::<P, _>(move || {
            if state.ledger.needs_name(thread) {
                self.name_thread(state, thread);
            }
            let (number, ledger) = (state.number, &mut state.ledger);
            apply(ledger, number);
            keep_noticed::<P>(ledger);
        });
    }

    /// Records a free. Must not be called in the child of a fork. Does not panic.
    #[inline]
    pub fn free(&self, key: Key) -> Answer {
        let free = |state: &mut InboxState<T>, thread| {
            self.prepare(state, false);
            let answer = if state.ledger.free_like_latest(key, thread) {
                Answer::Applied
            } else {
                let ledger = &mut state.ledger;
                let free = move || {
                    let answer = ledger.free(key, None, thread);
                    keep_noticed::<P>(ledger);
                    answer
                };
                run_rare::<P, _>(free).unwrap_or(Answer::Applied)
            };
            if T::IS_USED && state.ledger.is_tapped {
                state.pass_free(thread, key);
            }
            answer
        };
        self.enter_alive(1, free).unwrap_or(Answer::Applied)
    }

    /// Records an event.
    pub fn post(&self, event: &EventKind) -> Answer {
        match *event {
            // Other threads cannot reuse the keys of these blocks yet: the end of a context is recorded before the driver reuses its
            // addresses or its number.
            EventKind::ContextDestroyed { context } => {
                self.post_in_parts(event, move |ledger, part, _| ledger.remove_context(context, part));
                return Answer::Applied;
            }
            EventKind::PoolEmptied { pool } => {
                self.post_in_parts(event, move |ledger, part, _| ledger.empty_pool(pool, part));
                return Answer::Applied;
            }
            EventKind::PoolRegistered { pool, device } => {
                self.post_in_parts(event, move |ledger, part, number| {
                    if part == 0 {
                        ledger.register_pool(pool, device, number);
                    }
                    ledger.learn_blocks(device, part);
                });
                return Answer::Applied;
            }
            _ => {}
        }
        self.enter(1, |state, thread| self.apply(state, thread, event)).unwrap_or(Answer::Applied)
    }

    /// Records a reading, if there is one, and a query of a scope; no other event comes between them. Returns the trace of the
    /// scope.
    pub fn ask(&self, reading: Option<&EventKind>, query: &EventKind) -> Option<Trace> {
        let ask = |state: &mut InboxState<T>, thread| {
            if let Some(reading) = reading {
                self.apply(state, thread, reading);
            }
            self.prepare(state, query.needs_time());
            let trace = state.ledger.query(&state.event(thread, query));
            Self::pass_on(state, thread, query);
            trace
        };
        self.enter(1 + u32::from(reading.is_some()), ask).flatten()
    }

    #[inline]
    fn apply(&self, state: &mut InboxState<T>, thread: ThreadId, event: &EventKind) -> Answer {
        self.prepare(state, event.needs_time());
        if matches!(event, EventKind::Alloc { .. }) && state.ledger.needs_name(thread) {
            self.name_thread(state, thread);
        }
        let answer = state.apply(thread, event);
        Self::pass_on(state, thread, event);
        answer
    }

    #[inline]
    fn pass_on(state: &mut InboxState<T>, thread: ThreadId, event: &EventKind) {
        keep_noticed::<P>(&mut state.ledger);
        if T::IS_USED && state.ledger.is_tapped {
            state.pass_to_tap(thread, event);
        }
    }

    /// Records the name of the thread, under the number meant for its allocation. The allocation gets the next number.
    #[cold]
    fn name_thread(&self, state: &mut InboxState<T>, thread: ThreadId) {
        let named = EventKind::Named { name: P::thread_name() };
        state.apply(thread, &named);
        if T::IS_USED && state.ledger.is_tapped {
            state.pass_to_tap(thread, &named);
        }
        self.prepare(state, false);
    }

    /// Numbers the next event.
    #[inline]
    fn prepare(&self, state: &mut InboxState<T>, needs_time: bool) {
        // Reading the clock costs more than the rest of an allocation. Events that need no exact time get the time of the last
        // event that needed one.
        if needs_time {
            state.time = self.started.elapsed();
            state.ledger.set_time(state.time);
        }
        state.number += 1;
    }

    /// Applies an event of a recording, with its recorded number, time and thread, and tells the observer what it does to blocks.
    ///
    /// `inside` is the scope path that its thread was in, if the recording does not contain the events that led there.
    pub fn replay(&self, event: &Event<'_>, inside: Option<&[CallsiteId]>, observer: &mut impl Observer) {
        let replay = |state: &mut InboxState<T>, _| {
            (state.number, state.time) = (event.number, event.time);
            state.ledger.set_time(event.time);
            match inside {
                Some(path) => state.ledger.apply_inside(path, event, observer),
                None => _ = state.ledger.apply_observed(event, observer),
            }
        };
        self.enter(1, replay);
    }

    /// Notes that a recording lacks events before the one with this number.
    pub fn replay_from(&self, number: u64) {
        self.enter(0, |state, _| state.ledger.lacks_events_before(number));
    }

    /// Notes that an event of a shortened recording was applied. If it allocates a block of the driver, the block belongs to this pool,
    /// or to none.
    pub fn replay_owner(&self, event: &EventKind, pool: PoolId, observer: &mut impl Observer) {
        self.enter(0, |state, _| state.ledger.decide_shortened(event, pool, observer));
    }

    /// Applies the start of a thread in a recording. The thread reuses the number of a thread that has ended.
    pub fn replay_thread(&self, thread: ThreadId) {
        self.enter(0, |state, _| state.ledger.start_thread(thread));
    }

    /// Records an event that concerns many blocks, and applies it to them in parts. Other threads get their turn in between.
    /// Blocks that another thread allocates between two parts may count together with blocks that a replay has already removed,
    /// so a live peak may be higher than its replay.
    #[cold]
    fn post_in_parts(&self, event: &EventKind, apply: impl Fn(&mut Ledger, usize, u64)) {
        let mut number = 0;
        for part in 0..BLOCK_PARTS {
            let one_part = |state: &mut InboxState<T>, thread: ThreadId| {
                if part == 0 {
                    self.prepare(state, event.needs_time());
                    number = state.number;
                    if T::IS_USED && state.ledger.is_tapped {
                        state.pass_to_tap(thread, event);
                    }
                }
                apply(&mut state.ledger, part, number);
            };
            if self.enter(u32::from(part == 0), one_part).is_none() {
                return;
            }
        }
    }

    /// Does the remaining work after an event, outside the lock: this thread lost events, or a budget watches for the event.
    #[cold]
    fn finish(&self) {
        let (count, noticed) = P::with_thread(|thread| (thread.reset_lost(), thread.take_noticed()));
        if count > 0 {
            run_rare::<P, _>(|| self.post(&EventKind::Lost { count: count.into() }));
        }
        if let Some(noticed) = noticed {
            self.notify(&noticed);
        }
    }

    /// Starts or stops passing events to the tap. `change` is called under the lock; it returns whether later events are
    /// passed.
    pub fn with_tap<R>(&self, change: impl FnOnce(&mut T) -> (bool, R)) -> Option<R> {
        let change = |state: &mut InboxState<T>, _| {
            let (is_tapped, result) = change(&mut state.tap);
            state.ledger.is_tapped = is_tapped;
            result
        };
        self.enter(0, change)
    }

    /// Runs `inside` under the lock. `None` if this thread is inside the inbox already; then `events` events count as lost.
    fn enter<R>(&self, events: u32, inside: impl FnOnce(&mut InboxState<T>, ThreadId) -> R) -> Option<R> {
        // A thread that does not exist in the child of a fork may hold the lock there forever.
        if P::is_forked() { None } else { self.enter_alive(events, inside) }
    }

    #[allow(
        clippy::inline_always,
        reason = "an event is one function, which takes fewer lines of the instruction cache"
    )]
    #[inline(always)]
    fn enter_alive<R>(&self, events: u32, inside: impl FnOnce(&mut InboxState<T>, ThreadId) -> R) -> Option<R> {
        // The closure is short because the compiler does not inline a long one into `with`.
        let Some(number) = P::with_thread(|thread| thread.enter().then(|| thread.number())) else {
            P::with_thread(|thread| thread.lose(events));
            return None;
        };
        let number = if number == 0 { self.start_thread() } else { number };
        let on_panic = LeaveOnPanic::<P>(std::marker::PhantomData);
        let result = inside(&mut self.lock(), ThreadId(number));
        mem::forget(on_panic);
        if P::with_thread(ThreadState::leave) {
            self.finish();
        }
        Some(result)
    }

    /// Gives the thread a number, until it ends.
    #[cold]
    #[inline(never)]
    fn start_thread(&self) -> u32 {
        let (number, was_anothers) = P::lend_number();
        P::with_thread(|thread| thread.set_number(number));
        P::return_at_thread_end(number);
        if was_anothers || T::NEEDS_THREADS {
            let mut state = self.lock();
            if was_anothers {
                state.ledger.start_thread(ThreadId(number));
            }
            if state.ledger.is_tapped {
                state.tap.start_thread(ThreadId(number), was_anothers);
            }
        }
        number
    }

    /// The lock is held for about ten nanoseconds, and one store releases it. A lock that wakes its waiters costs more than
    /// the work under it. A waiting thread spins, then yields, then sleeps, because the holder may have lost its processor.
    #[inline]
    fn lock(&self) -> StateGuard<'_, T, P> {
        self.state.try_lock().unwrap_or_else(|| self.wait())
    }

    #[cold]
    fn wait(&self) -> StateGuard<'_, T, P> {
        let wait = P::Wait::new();
        loop {
            // Reads the lock before it tries to lock: the attempt would move the cache line away from the holder's
            // processor.
            if !self.state.is_locked()
                && let Some(state) = self.state.try_lock()
            {
                return state;
            }
            wait.wait();
        }
    }

    /// Sets the number of the last event, for tests of large numbers.
    #[cfg(test)]
    pub(crate) fn pretend_events(&self, number: u64) {
        self.lock().number = number;
    }
}

impl<T: Tap> InboxState<T> {
    #[inline]
    fn event<'a>(&self, thread: ThreadId, kind: &'a EventKind) -> Event<'a> {
        Event { number: self.number, time: self.time, thread, kind }
    }

    #[inline]
    fn apply(&mut self, thread: ThreadId, kind: &EventKind) -> Answer {
        self.ledger.apply(&self.event(thread, kind))
    }

    #[cold]
    #[inline(never)]
    fn pass_to_tap(&mut self, thread: ThreadId, kind: &EventKind) {
        self.tap.record(&self.event(thread, kind));
    }

    /// This is [`pass_to_tap`](Self::pass_to_tap) for an allocation: the compiler leaves out what other events need.
    #[cold]
    #[inline(never)]
    fn pass_alloc(&mut self, thread: ThreadId, key: Key, bytes: Bytes, tag: Tag) {
        let kind = &EventKind::Alloc { key, block: Block::from_tag(bytes, tag) };
        self.tap.record(&self.event(thread, kind));
    }

    /// Like the function above, but for a free.
    #[cold]
    #[inline(never)]
    fn pass_free(&mut self, thread: ThreadId, key: Key) {
        let kind = &EventKind::Free { key, block: None };
        self.tap.record(&self.event(thread, kind));
    }
}

impl<T: Tap, P: Primitives> Default for Inbox<T, P> {
    fn default() -> Self {
        Self::new()
    }
}

/// A panic of the ledger counts as a lost event, and the state stays usable.
impl<T: Tap, P: Primitives> RefUnwindSafe for Inbox<T, P> {}

impl<T: Tap, P: Primitives> Drop for Inbox<T, P> {
    fn drop(&mut self) {
        P::inbox(false);
    }
}

impl<T: Tap, P: Primitives> fmt::Debug for Inbox<T, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("began", &self.started).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;

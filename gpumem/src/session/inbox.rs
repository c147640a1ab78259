//! The one door through which facts enter, in order. Left of it there is concurrency, right of it there is none.

use std::{
    cell::Cell,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use crate::{
    ledger::{Answer, Counts, Ledger, Tally},
    model::{Event, EventKind, MemKind, ThreadId, Time},
    sys::process,
};

/// Numbers facts, stamps them with the time and folds them, all under one short lock: no call of a driver, no I/O, no
/// formatting inside.
#[derive(Debug)]
pub(super) struct Inbox {
    door: Mutex<Door>,
    began: Instant,
    /// Facts that came while their own thread was inside, told to the fold by whoever comes next.
    lost: AtomicU64,
}

#[derive(Debug, Default)]
struct Door {
    number: u64,
    ledger: Ledger,
}

thread_local! {
    /// This thread is inside. A global allocator or a signal handler that allocates GPU memory would come back here
    /// while the fold is at work, and wait for itself for ever.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

impl Inbox {
    pub(super) fn new() -> Self {
        Self { door: Mutex::default(), began: Instant::now(), lost: AtomicU64::new(0) }
    }

    /// Takes `facts` in, one behind the other with nothing between; gives the answer to the last one.
    pub(super) fn post(&self, facts: &[EventKind]) -> Answer {
        self.enter(facts.len() as u64, |door| {
            let (time, thread) = (self.began.elapsed(), thread());
            let count = self.lost.swap(0, Relaxed);
            if count > 0 {
                door.take(time, thread, EventKind::Lost { count });
            }
            facts.iter().fold(Answer::Nothing, |_, fact| door.take(time, thread, *fact))
        })
        .unwrap_or(Answer::Nothing)
    }

    pub(super) fn age(&self) -> Duration {
        self.began.elapsed()
    }

    /// What was heard so far, and what is live.
    pub(super) fn counts(&self) -> (Counts, [Tally; MemKind::ALL.len()]) {
        self.enter(0, |door| (door.ledger.counts(), door.ledger.live())).unwrap_or_default()
    }

    /// Does something at the door; `None`, and `facts` are counted as lost, if this thread is inside already.
    fn enter<T>(&self, facts: u64, inside: impl FnOnce(&mut Door) -> T) -> Option<T> {
        // The lock may be held for ever by a thread that is not in this copy of the process.
        if process::is_forked() {
            return None;
        }
        // Where the thread is so far gone that its locals are, nothing can be inside any more.
        if INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(false) {
            self.lost.fetch_add(facts, Relaxed);
            return None;
        }
        // A panic inside (a failed allocation of the fold) leaves numbers, not broken memory: go on.
        let done = inside(&mut self.door.lock().unwrap_or_else(PoisonError::into_inner));
        let _ = INSIDE.try_with(|inside| inside.set(false));
        Some(done)
    }
}

/// The calling thread's number; 0 where it is so far gone that it has none.
pub(super) fn thread() -> ThreadId {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    thread_local! {
        static THREAD: Cell<u32> = const { Cell::new(0) };
    }
    let number = THREAD.try_with(|thread| {
        if thread.get() == 0 {
            thread.set(NEXT.fetch_add(1, Relaxed));
        }
        thread.get()
    });
    ThreadId(number.unwrap_or(0))
}

impl Door {
    fn take(&mut self, time: Time, thread: ThreadId, kind: EventKind) -> Answer {
        self.number += 1;
        self.ledger.apply(&Event { number: self.number, time, thread, kind })
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::model::{Block, Bytes, Device, Family, Gauge, Key, MemKind, ScopeId, Space, Trace, Watch};

    const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };

    fn open(scope: u64) -> EventKind {
        let watch = Watch { device: DEVICE, gauge: Gauge::Exact, every: Duration::ZERO, thread: None };
        EventKind::Open { scope: ScopeId(scope), watch }
    }

    fn close(scope: u64) -> EventKind {
        EventKind::Close { scope: ScopeId(scope) }
    }

    fn alloc(address: u64, bytes: u64) -> EventKind {
        let block = Block { device: DEVICE, bytes: Bytes::new(bytes), kind: MemKind::Device };
        EventKind::Alloc { key: Key::new(Space::Address, address), block }
    }

    fn free(address: u64) -> EventKind {
        EventKind::Free { key: Key::new(Space::Address, address), block: None }
    }

    fn trace(answer: Answer) -> Trace {
        let Answer::Trace(trace) = answer else { panic!("{answer:?}") };
        trace
    }

    #[test]
    fn totals_are_conserved_under_contention() {
        const THREADS: u64 = 8;
        const ROUNDS: u64 = 2_000;
        let inbox = Inbox::new();
        inbox.post(&[open(1)]);
        thread::scope(|threads| {
            for thread in 0..THREADS {
                let inbox = &inbox;
                threads.spawn(move || {
                    let scope = 100 + thread;
                    for round in 0..ROUNDS {
                        let address = (thread << 32) + round;
                        inbox.post(&[open(scope)]);
                        inbox.post(&[alloc(address, 10)]);
                        if round % 2 == 0 {
                            inbox.post(&[free(address)]);
                        }
                        trace(inbox.post(&[close(scope)]));
                    }
                });
            }
        });
        let trace = trace(inbox.post(&[close(1)]));
        assert_eq!(trace.used.get().unsigned_abs(), THREADS * ROUNDS / 2 * 10);
        assert!(trace.peaked.get() <= THREADS * 10);
        assert_eq!(trace.lost, 0);
        let posted = 2 + THREADS * (3 * ROUNDS + ROUNDS / 2);
        assert_eq!(inbox.door.lock().expect("nobody panicked").number, posted, "numbers have no gaps");
    }

    #[test]
    fn facts_of_one_post_are_neighbours() {
        let inbox = Inbox::new();
        assert!(trace(inbox.post(&[open(1), alloc(1, 10), close(1)])).used == 10);
    }

    #[test]
    fn a_thread_that_comes_back_while_inside_loses_its_fact_and_says_so() {
        let inbox = Inbox::new();
        inbox.post(&[open(1)]);
        INSIDE.set(true);
        assert_eq!(inbox.post(&[alloc(1, 10), alloc(2, 10)]), Answer::Nothing);
        INSIDE.set(false);
        let trace = trace(inbox.post(&[close(1)]));
        assert_eq!((trace.lost, trace.used.get()), (2, 0));
    }
}

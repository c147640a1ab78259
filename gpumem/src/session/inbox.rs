//! The one door through which facts enter, in order. Left of it there is concurrency, right of it there is none.

use std::{
    cell::Cell,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use crate::{
    ledger::Ledger,
    model::{Event, EventKind, Trace},
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

    /// Takes `facts` in, one behind the other with nothing between; answers what the last one asks for.
    pub(super) fn post(&self, facts: &[EventKind]) -> Option<Trace> {
        // Where the thread is so far gone that its locals are, nothing can be inside any more.
        if INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(false) {
            self.lost.fetch_add(facts.len() as u64, Relaxed);
            return None;
        }
        let trace = {
            // A panic inside (a failed allocation of the fold) leaves numbers, not broken memory: go on.
            let mut door = self.door.lock().unwrap_or_else(PoisonError::into_inner);
            let time = self.began.elapsed();
            let count = self.lost.swap(0, Relaxed);
            if count > 0 {
                door.take(time, EventKind::Lost { count });
            }
            facts.iter().fold(None, |_, fact| door.take(time, *fact))
        };
        let _ = INSIDE.try_with(|inside| inside.set(false));
        trace
    }
}

impl Door {
    fn take(&mut self, time: std::time::Duration, kind: EventKind) -> Option<Trace> {
        self.number += 1;
        self.ledger.apply(&Event { number: self.number, time, kind })
    }
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use super::*;
    use crate::model::{Block, Bytes, Device, Family, Gauge, MemKind, ScopeId};

    const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };

    fn open(scope: u64) -> EventKind {
        EventKind::Open { scope: ScopeId(scope), device: DEVICE, gauge: Gauge::Exact, every: Duration::ZERO }
    }

    fn close(scope: u64) -> EventKind {
        EventKind::Close { scope: ScopeId(scope) }
    }

    fn alloc(address: u64, bytes: u64) -> EventKind {
        EventKind::Alloc(Block { device: DEVICE, address, bytes: Bytes::new(bytes), kind: MemKind::Device })
    }

    fn free(address: u64) -> EventKind {
        EventKind::Free { device: DEVICE, address, bytes: None }
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
                        assert!(inbox.post(&[close(scope)]).is_some());
                    }
                });
            }
        });
        let trace = inbox.post(&[close(1)]).expect("the scope was open");
        assert_eq!(trace.used.get().unsigned_abs(), THREADS * ROUNDS / 2 * 10);
        assert!(trace.peaked.get() <= THREADS * 10);
        assert_eq!(trace.lost, 0);
        let posted = 2 + THREADS * (3 * ROUNDS + ROUNDS / 2);
        assert_eq!(inbox.door.lock().expect("nobody panicked").number, posted, "numbers have no gaps");
    }

    #[test]
    fn facts_of_one_post_are_neighbours() {
        let inbox = Inbox::new();
        assert!(inbox.post(&[open(1), alloc(1, 10), close(1)]).is_some_and(|trace| trace.used == 10));
    }

    #[test]
    fn a_thread_that_comes_back_while_inside_loses_its_fact_and_says_so() {
        let inbox = Inbox::new();
        inbox.post(&[open(1)]);
        INSIDE.set(true);
        assert_eq!(inbox.post(&[alloc(1, 10), alloc(2, 10)]), None);
        INSIDE.set(false);
        let trace = inbox.post(&[close(1)]).expect("the scope was open");
        assert_eq!((trace.lost, trace.used.get()), (2, 0));
    }
}

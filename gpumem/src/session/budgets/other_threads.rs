//! The allocations and frees of other threads on the device of a budget.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use super::{exclusive_tests, thread_facts::RawFacts};
use crate::{
    inbox::Watch,
    ledger::{Noticed, Noticing},
    model::{Bytes, Device, OwnerThread},
    report::{BelongsTo, Counted, OtherThread},
    session::Session,
};

/// The largest number of threads that are distinguished.
const MOST: usize = 256;

/// Watches the allocations and frees of other threads until it is dropped.
pub(super) struct Others {
    session: &'static Session,
    id: u64,
    watch: Arc<Watcher>,
}

struct Watcher {
    device: Device,
    counted: Counted,
    /// The thread of the budget.
    thread: thread::ThreadId,
    seen: Mutex<HashMap<OwnerThread, Seen>>,
}

/// The observed allocations and frees of one thread.
#[derive(Default)]
struct Seen {
    facts: RawFacts,
    outside: Tally,
    /// Events in scopes that the thread opened itself.
    in_scopes: Tally,
}

#[derive(Clone, Copy, Default)]
struct Tally {
    blocks: u64,
    bytes: Bytes,
    freed: Bytes,
}

impl Others {
    /// Starts the watch. `None` if other threads do not matter.
    pub(super) fn watch(session: &'static Session, device: Device, counted: Counted) -> Option<Self> {
        let noticing = match counted {
            Counted::OwnThreadOnly => return None,
            Counted::OwnThread => Noticing::AllocationsOfOthers,
            Counted::AllThreads => Noticing::OfOthers,
        };
        let watcher = Watcher { device, counted, thread: thread::current().id(), seen: Mutex::default() };
        let watch = Arc::new(watcher);
        let id = session.inbox.watch(device, noticing, Arc::clone(&watch) as Arc<dyn Watch>);
        Some(Self { session, id, watch })
    }

    /// Returns the threads whose allocations make the function's memory use uncertain.
    pub(super) fn found(&self) -> Vec<OtherThread> {
        let mut seen = std::mem::take(&mut *self.watch.seen());
        let own = RawFacts::here();
        if self.watch.counted == Counted::AllThreads {
            seen.retain(|_, Seen { facts, .. }| facts.may_be_of_another_test(&own));
        }
        if seen.is_empty() {
            return Vec::new();
        }
        let own = own.resolved();
        let found = seen.into_values().filter_map(|Seen { facts, outside, in_scopes }| {
            let mut tally = outside;
            let who = match (facts.resolved().belongs_to(&own), self.watch.counted) {
                (BelongsTo::OtherTest(test), Counted::AllThreads) => {
                    tally.add(in_scopes);
                    format!("test `{test}`")
                }
                (BelongsTo::OtherTest(_), _) | (_, Counted::AllThreads) => return None,
                (BelongsTo::ThisTest, _) => {
                    // The harness names the test's thread, and that thread waits for the unnamed threads that it starts. Threads
                    // with their own scopes do not count for each other.
                    if own.name.is_some() {
                        tally.add(in_scopes);
                    } else if tally.blocks == 0 {
                        return None;
                    }
                    facts.in_words()
                }
                // A thread in its own scope is measured there, and may have nothing to do with this function.
                (BelongsTo::NotKnown, _) if outside.blocks == 0 => return None,
                (BelongsTo::NotKnown, _) => facts.in_words(),
            };
            let Tally { blocks, bytes, freed } = tally;
            Some(OtherThread { who, place: facts.place(), threads: 1, blocks, bytes, freed })
        });
        found.collect()
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        self.session.inbox.unwatch(self.id);
    }
}

impl Watcher {
    fn seen(&self) -> MutexGuard<'_, HashMap<OwnerThread, Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch for Watcher {
    fn notice(&self, noticed: &Noticed) {
        let Noticed { device, thread, is_free, is_guest, .. } = *noticed;
        // All watches receive every event, so an event may concern another budget.
        let is_counted = thread::current().id() == self.thread;
        let is_anothers = self.counted == Counted::OwnThread && (is_free || is_guest);
        // No event belongs to the test while it waits for its turn.
        if device != self.device || is_counted || is_anothers || exclusive_tests::waits(self.thread) {
            return;
        }
        let (is_new, is_full) = {
            let seen = self.seen();
            (!seen.contains_key(&thread), seen.len() >= MOST)
        };
        let key = if is_new && is_full { OwnerThread::LAST } else { thread };
        // The facts are collected before taking the lock, so that other threads do not wait.
        let facts = if is_new && !is_full { RawFacts::here() } else { RawFacts::default() };
        let mut seen = self.seen();
        let Seen { outside, in_scopes, .. } = seen.entry(key).or_insert_with(|| Seen { facts, ..Seen::default() });
        (if noticed.is_in_scope { in_scopes } else { outside }).note(noticed);
    }
}

impl Tally {
    fn note(&mut self, noticed: &Noticed) {
        if noticed.is_free {
            self.freed = self.freed + noticed.bytes;
        } else {
            self.blocks += 1;
            self.bytes = self.bytes + noticed.bytes;
        }
    }

    fn add(&mut self, other: Self) {
        self.blocks += other.blocks;
        self.bytes = self.bytes + other.bytes;
        self.freed = self.freed + other.freed;
    }
}

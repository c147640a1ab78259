//! The turns of budgets: a test whose budget counts all threads runs while no other test with a budget runs.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, ThreadId},
};

use super::thread_facts::RawFacts;
use crate::process;

/// The budget of a test, or of code in a test. While it exists, tests that must run alone wait; if it must run alone itself, all
/// others wait.
pub(super) struct Turn {
    id: u64,
}

/// A thread with a turn, or one that waits for its turn.
struct Holder {
    id: u64,
    thread: ThreadId,
    /// True if the budget counts all threads.
    is_alone: bool,
    waits: bool,
    role: Role,
}

/// The role of the thread. Only threads of tests wait or are waited for. A test may wait for its workers, so a worker must not wait
/// for the test.
#[derive(Clone)]
enum Role {
    Test,
    Worker,
    /// The role is determined only when needed, because this reads debug information.
    NotKnown(Arc<RawFacts>),
}

#[derive(Default)]
struct Holders {
    last: u64,
    all: Vec<Holder>,
}

static HOLDERS: Mutex<Holders> = Mutex::new(Holders { last: 0, all: Vec::new() });
static CHANGED: Condvar = Condvar::new();

fn holders() -> MutexGuard<'static, Holders> {
    HOLDERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns whether this thread is waiting for its turn.
pub(super) fn waits(thread: ThreadId) -> bool {
    holders().all.iter().any(|holder| holder.thread == thread && holder.waits)
}

impl Turn {
    /// Waits until it is the calling thread's turn. `is_test` is true if this is known to be a test's thread; otherwise its role is
    /// determined. `None` if it cannot be one.
    pub(super) fn wait(is_test: bool, is_alone: bool) -> Option<Self> {
        // A thread that does not exist in the child of a fork may hold the lock there.
        if process::is_forked() {
            return None;
        }
        let role = if is_test {
            Role::Test
        } else if thread::current().name().is_none_or(|name| name == "main") {
            // The harness names the threads of tests, unless all tests run on the main thread, one after the other.
            return None;
        } else {
            Role::NotKnown(Arc::new(RawFacts::here()))
        };
        let mut holders = holders();
        holders.last += 1;
        let turn = Self { id: holders.last };
        holders.all.push(Holder { id: turn.id, thread: thread::current().id(), is_alone, waits: true, role });
        loop {
            match holders.blocker_of(turn.id) {
                None => {
                    holders.of(turn.id).into_iter().for_each(|own| own.waits = false);
                    break;
                }
                Some((id, Role::NotKnown(facts))) => {
                    drop(holders);
                    let role = if facts.resolved().test().is_some() { Role::Test } else { Role::Worker };
                    holders = self::holders();
                    holders.of(id).into_iter().for_each(|holder| holder.role = role.clone());
                }
                Some(_) => holders = CHANGED.wait(holders).unwrap_or_else(PoisonError::into_inner),
            }
        }
        // Other threads may be waiting until this thread stops waiting.
        CHANGED.notify_all();
        Some(turn)
    }
}

impl Holders {
    fn of(&mut self, id: u64) -> Option<&mut Holder> {
        self.all.iter_mut().find(|holder| holder.id == id)
    }

    /// Returns the thread that delays the turn of this one, and its role. Returns this thread itself if its own role must be
    /// determined first.
    fn blocker_of(&self, id: u64) -> Option<(u64, Role)> {
        let own = self.all.iter().find(|holder| holder.id == id)?;
        let is_worker = |holder: &Holder| matches!(holder.role, Role::Worker);
        // A thread that already holds a turn does not wait for the threads that wait for it.
        let has_turn = self.all.iter().any(|holder| holder.thread == own.thread && !holder.waits);
        let blocks = |other: &&Holder| {
            other.thread != own.thread
                && !is_worker(other)
                && if own.is_alone { !other.waits && !self.waits_inside(other) } else { other.is_alone && !has_turn }
        };
        if is_worker(own) {
            return None;
        }
        let blocker = self.all.iter().find(blocks)?;
        let first = if matches!(own.role, Role::NotKnown(_)) { own } else { blocker };
        Some((first.id, first.role.clone()))
    }

    /// Returns whether the holder's thread itself waits for another turn, and is therefore idle.
    fn waits_inside(&self, holder: &Holder) -> bool {
        self.all.iter().any(|other| other.thread == holder.thread && other.waits)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if !process::is_forked() {
            holders().all.retain(|holder| holder.id != self.id);
            CHANGED.notify_all();
        }
    }
}

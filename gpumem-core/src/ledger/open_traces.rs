//! The threads that have open traces on a device.

use std::collections::{HashMap, VecDeque};

use crate::model::{NumberHashBuilder, OwnerThread, ScopeId};

/// The threads that have open traces on a device, and the threads that closed one last. A query costs the same however many
/// traces there are.
#[derive(Debug, Default)]
pub(super) struct OpenTraces {
    /// The number of traces of each thread.
    open: HashMap<OwnerThread, usize, NumberHashBuilder>,
    all: usize,
    /// The thread and the number of the newest event that closed a trace, and of the newest one by another thread.
    closed: [Option<(OwnerThread, u64)>; 2],
    /// The open scopes that count the whole process and that no trace of another thread has overlapped yet, sorted.
    pub(super) alone: VecDeque<ScopeId>,
}

impl OpenTraces {
    pub(super) fn opened(&mut self, thread: OwnerThread) {
        *self.open.entry(thread).or_default() += 1;
        self.all += 1;
    }

    pub(super) fn closed(&mut self, thread: OwnerThread, number: u64) {
        if let Some(open) = self.open.get_mut(&thread) {
            *open -= 1;
            self.all -= 1;
            if *open == 0 {
                self.open.remove(&thread);
            }
        }
        let [newest, _] = self.closed;
        if newest.is_some_and(|(of, _)| of != thread) {
            self.closed[1] = newest;
        }
        self.closed[0] = Some((thread, number));
    }

    /// Returns whether another thread has a trace open now.
    pub(super) fn has_others(&self, thread: OwnerThread) -> bool {
        self.all > self.open.get(&thread).copied().unwrap_or(0)
    }

    /// Returns whether another thread had a trace open at some time since the event with this number.
    pub(super) fn others_since(&self, thread: OwnerThread, number: u64) -> bool {
        self.has_others(thread) || self.closed.iter().flatten().any(|(of, closed)| *of != thread && *closed > number)
    }
}

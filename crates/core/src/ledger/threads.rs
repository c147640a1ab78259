//! The data of all threads.

use super::{
    live::Attribution,
    thread::{Freed, Thread},
};
use crate::model::{OwnerThread, ThreadId};

/// The threads, indexed by thread id. There are as many as ever ran at the same time.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Threads {
    /// The number of owner threads that were created.
    pub(super) owner_threads: u32,
    all: Vec<Thread>,
}

impl Threads {
    /// Returns a thread that has allocated, freed or entered a scope, or may have.
    #[inline]
    pub(super) fn known(&self, thread: ThreadId) -> Option<&Thread> {
        self.all.get(thread.0 as usize)
    }

    #[inline]
    pub(super) fn known_mut(&mut self, thread: ThreadId) -> Option<&mut Thread> {
        self.all.get_mut(thread.0 as usize)
    }

    /// Returns a thread, which is added if it is not known.
    #[inline]
    pub(super) fn get(&mut self, thread: ThreadId) -> &mut Thread {
        let at = thread.0 as usize;
        if at >= self.all.len() {
            self.add_until(at);
        }
        &mut self.all[at]
    }

    #[cold]
    #[inline(never)]
    fn add_until(&mut self, last: usize) {
        while self.all.len() <= last {
            let own = self.next_owner();
            self.all.push(Thread::new(own));
        }
    }

    /// Starts a thread that reuses the id of an ended thread. The new thread gets its own owner thread, so that it does not own the
    /// blocks of the ended one.
    pub(super) fn start(&mut self, thread: ThreadId) {
        let own = self.next_owner();
        if let Some(ended) = self.known_mut(thread) {
            // The list contains the thread id, so the new thread is in it as well.
            *ended = Thread { is_looked_up: ended.is_looked_up, ..Thread::new(own) };
        }
    }

    /// Returns a new owner thread. After 2^32 of them, all later threads and guests share the last one.
    pub(super) fn next_owner(&mut self) -> OwnerThread {
        let next = self.owner_threads;
        self.owner_threads = next.saturating_add(1);
        OwnerThread(next)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Thread> {
        self.all.iter_mut()
    }

    /// Returns the attributions that blocks may get again: those of each thread's last allocation and of its last free.
    pub(super) fn attributions(&self) -> impl Iterator<Item = Attribution> {
        let latest = self.all.iter().map(|thread| thread.latest.1);
        latest.chain(self.all.iter().filter_map(|thread| match &thread.freed {
            Freed::Block(_, entry) => Some(entry.attribution()),
            _ => None,
        }))
    }

    /// Returns the owner threads that blocks may get now. The owner thread of an adopting scope is in no `entered`, but the next
    /// allocation of the adopted thread may have it.
    pub(super) fn owners(&self) -> impl Iterator<Item = OwnerThread> {
        let entered = self.all.iter().flat_map(|thread| &thread.entered).map(|entered| entered.owner);
        entered.chain(self.attributions().map(Attribution::owner))
    }
}

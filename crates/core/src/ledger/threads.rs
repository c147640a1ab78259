//! Starts threads, and lets them enter and leave scopes.

use std::ops::Bound;

use super::{
    Ledger,
    counts::PART_LEN,
    live::BLOCK_PARTS,
    thread::{Entered, Freed, Thread},
};
use crate::model::{CallsiteId, Event, OwnerThread, ScopeId, ThreadId};

/// A thread counts for this many of the outermost scopes that it is in, for the innermost one, and for the scopes in which these
/// were opened. The limit bounds the time to leave a scope.
pub(super) const MOST_ENTERED: usize = 16;

impl Ledger {
    #[inline]
    pub(super) fn thread(&mut self, thread: ThreadId) -> &mut Thread {
        let at = thread.0 as usize;
        if at >= self.threads.len() {
            self.add_threads(at);
        }
        &mut self.threads[at]
    }

    #[cold]
    #[inline(never)]
    fn add_threads(&mut self, last: usize) {
        while self.threads.len() <= last {
            let own = next_owner(&mut self.owner_threads);
            self.threads.push(Thread::new(own));
        }
    }

    /// Starts a thread that reuses the id of an ended thread. The new thread gets its own owner thread, so that it does not own the
    /// blocks of the ended one.
    pub fn start_thread(&mut self, thread: ThreadId) {
        let own = next_owner(&mut self.owner_threads);
        if let Some(ended) = self.threads.get_mut(thread.0 as usize) {
            // The list contains the thread id, so the new thread is in it as well.
            let is_looked_up = ended.is_looked_up;
            *ended = Thread::new(own);
            ended.is_looked_up = is_looked_up;
        }
    }

    /// Returns the scopes that a thread is in, the outermost first.
    pub fn path_of(&mut self, thread: ThreadId) -> Vec<CallsiteId> {
        let (node, _) = self.place_of(thread);
        self.tree.path(node)
    }

    /// Lets a thread enter an open scope.
    pub(super) fn enter(&mut self, scope: ScopeId, event: &Event<'_>) {
        let open = self.scopes.get(&scope).map(|open| (open.node, open.owner));
        let open = open.map(|(node, host)| (node, host, self.owner_in(host, event.thread)));
        let thread = self.thread(event.thread);
        let Thread { node, owner, .. } = *thread;
        let stays = Entered { number: event.number, scope, node, host: None, owner, by_opening: false };
        // If the scope is closed already, the thread stays where it is.
        thread.enter(open.map_or(stays, |(node, host, owner)| Entered { node, host: Some(host), owner, ..stays }));
        self.look_up_again();
    }

    /// Lets a thread leave a scope.
    pub(super) fn leave(&mut self, scope: ScopeId, thread: ThreadId) {
        let left = self.thread(thread).leave(scope);
        self.update_later(thread, left);
        self.look_up_again();
    }

    /// Updates the owner threads of the scopes in `entered` from `left` on, and of the innermost one. The thread is no longer in
    /// the scope that was at index `left`, so its later allocations do not count there.
    pub(super) fn update_later(&mut self, thread: ThreadId, left: usize) {
        let len = self.thread(thread).entered.len();
        for at in left..len.min(MOST_ENTERED) {
            // Each owner thread depends only on the one before.
            if !self.update_owner(at, thread) {
                break;
            }
        }
        if len > MOST_ENTERED {
            self.update_owner(len - 1, thread);
        }
    }

    /// Returns whether the owner thread of the scope with this index in `entered` has changed.
    fn update_owner(&mut self, at: usize, thread: ThreadId) -> bool {
        let Entered { owner, host, by_opening, .. } = self.thread(thread).entered[at];
        let updated = match host {
            Some(host) => self.owner_at(at, host, thread),
            None if by_opening => owner,
            None => self.owner_around(at, thread),
        };
        let thread = self.thread(thread);
        thread.entered[at].owner = updated;
        thread.update_scope();
        updated != owner
    }

    /// Returns the owner thread for allocations of `thread` in a scope that was opened on the owner thread `host`. They also count for
    /// the scopes that the thread is in already.
    pub(super) fn owner_in(&mut self, host: OwnerThread, thread: ThreadId) -> OwnerThread {
        let at = self.thread(thread).entered.len();
        self.owner_at(at, host, thread)
    }

    fn owner_at(&mut self, at: usize, host: OwnerThread, thread: ThreadId) -> OwnerThread {
        let (around, own) = (self.owner_around(at, thread), self.thread(thread).own);
        if around == host {
            return host;
        }
        if self.guests.must_scan() {
            self.scan_for_guests();
        }
        let Self { guests, owner_threads, .. } = self;
        guests.owner_within(own, around, host, || next_owner(owner_threads))
    }

    /// Returns the owner thread around the scope with this index in `entered`.
    fn owner_around(&mut self, at: usize, thread: ThreadId) -> OwnerThread {
        let Thread { entered, own, .. } = self.thread(thread);
        at.min(MOST_ENTERED).checked_sub(1).map_or(*own, |around| entered[around].owner)
    }

    /// Returns a new owner thread for a task that is started on the owner thread `host`. `None` if no owner thread is left.
    pub(super) fn task_in(&mut self, host: OwnerThread) -> Option<OwnerThread> {
        if self.guests.must_scan() {
            self.scan_for_guests();
        }
        let own = next_owner(&mut self.owner_threads);
        self.guests.add_task(own, host).then_some(own)
    }

    /// Makes one step of the scan that finds the owner threads of guests in use. Its last step forgets the others. A block
    /// that is allocated during the scan has an owner thread that its thread had at the start, or has entered since.
    #[cold]
    fn scan_for_guests(&mut self) {
        /// The number of parts of the blocks in one step. Tests read more parts in one step, because they have few guests and
        /// their scans must end.
        const STEP: usize = if cfg!(test) { 64 } else { 1 };
        let Self { guests, live, threads, scopes, .. } = self;
        let of_threads = threads.iter().flat_map(|thread| {
            let freed =
                if let Freed::Block(_, entry) = &thread.freed { Some(entry.attribution().owner()) } else { None };
            // The owner thread of an adopting scope is in no `entered`, but the thread's next allocation may have it.
            let latest = [thread.latest.1.owner()];
            thread.entered.iter().map(|entered| entered.owner).chain(latest).chain(freed)
        });
        let (scan, is_new) = guests.scan();
        if is_new {
            return guests.mark_used(of_threads);
        }
        if scan.next_part < BLOCK_PARTS {
            let first = scan.next_part;
            scan.next_part = BLOCK_PARTS.min(first + STEP);
            let parts = (first..scan.next_part).flat_map(|part| live.part(part));
            return guests.mark_used(parts.map(|(_, entry)| entry.attribution().owner()));
        }
        let rest = (scan.last_scope.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let part: Vec<_> = scopes.range(rest).take(PART_LEN).map(|(id, scope)| (*id, scope.owner)).collect();
        if let Some((last, _)) = part.last() {
            scan.last_scope = Some(*last);
            return guests.mark_used(part.iter().map(|(_, owner)| *owner));
        }
        guests.mark_used(of_threads);
        guests.end_scan();
    }
}

/// Returns a new owner thread. After 2^32 of them, all later threads and guests share the last one.
fn next_owner(owner_threads: &mut u32) -> OwnerThread {
    let next = *owner_threads;
    *owner_threads = next.saturating_add(1);
    OwnerThread(next)
}

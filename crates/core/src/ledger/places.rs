//! The places of threads: the scopes that each thread is in, and the scopes that adopt threads. They decide for which scope path and
//! which owner thread an allocation counts.

use std::collections::HashMap;

use super::{
    adopters::Adopters,
    allocated_on::AllocatedOn,
    guests::Guests,
    scope::{Scope, Scopes},
    thread::{Entered, MOST_ENTERED, Thread},
    threads::Threads,
    tree::NodeId,
};
use crate::model::{Event, Family, NumberHashBuilder, OwnerThread, ScopeId, ThreadId};

/// See the [module](self). Where a new guest may be needed, the methods take the guests.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Places {
    pub(super) scopes: Scopes,
    /// The devices on which each open task allocated.
    pub(super) tasks: HashMap<OwnerThread, AllocatedOn, NumberHashBuilder>,
    pub(super) adopters: Adopters,
    pub(super) threads: Threads,
}

impl Places {
    /// Returns the path and the owner thread for the allocations of a thread.
    pub(super) fn place_of(&mut self, thread: ThreadId, guests: &mut Guests) -> (NodeId, OwnerThread) {
        let Thread { node, owner, .. } = *self.threads.get(thread);
        let Some(adopter) = self.adopter_of(thread) else { return (node, owner) };
        let (node, host) = self.innermost(&self.scopes[&adopter]);
        (node, self.owner_in(host, thread, guests))
    }

    /// Lets a thread enter an open scope.
    pub(super) fn enter(&mut self, scope: ScopeId, event: &Event<'_>, guests: &mut Guests) {
        let open = self.scopes.get(&scope).map(|open| (open.node, open.owner));
        let open = open.map(|(node, host)| (node, host, self.owner_in(host, event.thread, guests)));
        let thread = self.threads.get(event.thread);
        let Thread { node, owner, .. } = *thread;
        let stays = Entered { number: event.number, scope, node, host: None, owner, by_opening: false };
        // If the scope is closed already, the thread stays where it is.
        thread.enter(open.map_or(stays, |(node, host, owner)| Entered { node, host: Some(host), owner, ..stays }));
        self.look_up_again();
    }

    /// Lets a thread leave a scope.
    pub(super) fn leave(&mut self, scope: ScopeId, thread: ThreadId, guests: &mut Guests) {
        let left = self.threads.get(thread).leave(scope);
        self.update_later(thread, left, guests);
        self.look_up_again();
    }

    /// Updates the owner threads of the scopes in `entered` from `left` on, and of the innermost one. The thread is no longer in
    /// the scope that was at index `left`, so its later allocations do not count there.
    pub(super) fn update_later(&mut self, thread: ThreadId, left: usize, guests: &mut Guests) {
        let len = self.threads.get(thread).entered.len();
        for at in left..len.min(MOST_ENTERED) {
            // Each owner thread depends only on the one before.
            if !self.update_owner(at, thread, guests) {
                break;
            }
        }
        if len > MOST_ENTERED {
            self.update_owner(len - 1, thread, guests);
        }
    }

    /// Returns whether the owner thread of the scope with this index in `entered` has changed.
    fn update_owner(&mut self, at: usize, thread: ThreadId, guests: &mut Guests) -> bool {
        let of = self.threads.get(thread);
        let Entered { owner, host, by_opening, .. } = of.entered[at];
        let updated = match host {
            Some(host) => self.owner_at(at, host, thread, guests),
            None if by_opening => owner,
            None => of.owner_around(at),
        };
        let of = self.threads.get(thread);
        of.entered[at].owner = updated;
        of.update_scope();
        updated != owner
    }

    /// Returns the owner thread for allocations of `thread` in a scope that was opened on the owner thread `host`. They also count for
    /// the scopes that the thread is in already.
    fn owner_in(&mut self, host: OwnerThread, thread: ThreadId, guests: &mut Guests) -> OwnerThread {
        let at = self.threads.get(thread).entered.len();
        self.owner_at(at, host, thread, guests)
    }

    fn owner_at(&mut self, at: usize, host: OwnerThread, thread: ThreadId, guests: &mut Guests) -> OwnerThread {
        let thread = self.threads.get(thread);
        let (around, own) = (thread.owner_around(at), thread.own);
        if around == host {
            return host;
        }
        guests.owner_within(own, around, host, || self.threads.next_owner())
    }

    /// Returns a new owner thread for a task that is started on the owner thread `host`. `None` if no owner thread is left.
    pub(super) fn start_task(&mut self, host: OwnerThread, guests: &mut Guests) -> Option<OwnerThread> {
        let own = self.threads.next_owner();
        if !guests.add_task(own, host) {
            return None;
        }
        self.tasks.insert(own, AllocatedOn::default());
        Some(own)
    }

    /// Notes the device of an allocation for the tasks among the threads of its owner thread.
    pub(super) fn note_for_tasks(&mut self, owner: OwnerThread, meter: u16, number: u64, guests: &Guests) {
        if !self.tasks.is_empty() {
            let tasks = &mut self.tasks;
            guests.for_each_thread(owner, |of| tasks.get_mut(&of).into_iter().for_each(|on| on.note(meter, number)));
        }
    }

    /// Returns the meter of the device on which a scope's thread allocated since the scope started, if it allocated nothing on the
    /// scope's device.
    #[inline]
    pub(super) fn allocated_only_on(&self, scope: &Scope) -> Option<u16> {
        if scope.spec.device.family == Family::Custom {
            return None;
        }
        let (meter, since) = (scope.exact_meter, scope.devices_since);
        if scope.is_task() {
            return self.tasks.get(&scope.owner)?.other_than(meter, since);
        }
        let opener = self.opener_of(scope)?;
        opener.allocated_on.other_than(meter, since).filter(|_| opener.is_in_opened(scope.number))
    }
}

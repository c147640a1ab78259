//! Threads in scopes of other threads. A block that is allocated there counts for the thread that allocated it and for the
//! thread of the scope.

use std::{
    collections::{HashMap, HashSet},
    iter::successors,
};

use crate::model::{NumberHashBuilder, OwnerThread, ScopeId};

/// No scan starts while there are fewer guests than this.
const NO_SCAN: usize = if cfg!(test) { 4 } else { 512 };

/// A thread in a scope of another thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Guest {
    /// The owner thread of the guest itself.
    own: OwnerThread,
    /// The owner thread that opened the scope. The host may be a guest itself.
    host: OwnerThread,
}

/// The owner threads of all guests. Any other owner thread is that of a thread itself.
#[derive(Debug, Default)]
pub(super) struct Guests {
    known: HashMap<OwnerThread, Guest, NumberHashBuilder>,
    owners: HashMap<Guest, OwnerThread, NumberHashBuilder>,
    /// The number of guests that were in use at the last scan.
    in_use: usize,
    /// The scan in progress, which finds the guests in use.
    scan: Option<GuestScan>,
}

/// A scan reads blocks and scopes in parts; threads allocate in between.
#[derive(Debug, Default)]
pub(super) struct GuestScan {
    /// The part of the blocks that is read next.
    pub(super) next_part: usize,
    /// The last scope that was read.
    pub(super) last_scope: Option<ScopeId>,
    /// The owner threads in use: those of the blocks, scopes and threads that were read so far, and those entered since the scan
    /// started.
    used: HashSet<OwnerThread, NumberHashBuilder>,
}

impl Guests {
    /// Returns the owner thread of allocations of the thread `own` in a scope of the owner thread `host`. `next` creates a
    /// new owner thread.
    pub(super) fn owner(
        &mut self,
        own: OwnerThread,
        host: OwnerThread,
        next: impl FnOnce() -> OwnerThread,
    ) -> OwnerThread {
        // A block of this host counts for the thread already.
        if self.threads(host).any(|thread| thread == own) {
            self.mark_used([host]);
            return host;
        }
        self.guest(own, host, next)
    }

    /// Returns the owner thread of blocks that count for `own` in addition to `host`.
    fn guest(&mut self, own: OwnerThread, host: OwnerThread, next: impl FnOnce() -> OwnerThread) -> OwnerThread {
        let guest = Guest { own, host };
        let owner = self.owners.get(&guest).copied().unwrap_or_else(next);
        // All later guests share the last owner thread. That owner thread gets no host, because it could become its own host.
        if owner == OwnerThread::LAST {
            return host;
        }
        self.known.insert(owner, guest);
        self.owners.insert(guest, owner);
        self.mark_used([owner]);
        owner
    }

    /// Like [`owner`](Self::owner), for a thread whose allocations have the owner thread `around` before it enters the scope.
    /// They still count for all threads and tasks of `around`.
    pub(super) fn owner_within(
        &mut self,
        own: OwnerThread,
        around: OwnerThread,
        host: OwnerThread,
        mut next: impl FnMut() -> OwnerThread,
    ) -> OwnerThread {
        let owner = self.owner(own, host, &mut next);
        if around == own || self.hosts(host).any(|known| known == around) {
            return owner;
        }
        let counted: Vec<OwnerThread> = self.threads(owner).collect();
        let missing: Vec<OwnerThread> = self.threads(around).filter(|thread| !counted.contains(thread)).collect();
        missing.into_iter().rev().fold(owner, |owner, missing| self.guest(missing, owner, &mut next))
    }

    /// Makes allocations of the task `own` count for the owner thread `host` as well. Returns `false` if the task shares its
    /// owner thread with others.
    pub(super) fn add_task(&mut self, own: OwnerThread, host: OwnerThread) -> bool {
        if own == OwnerThread::LAST {
            return false;
        }
        self.known.insert(own, Guest { own, host });
        self.mark_used([own]);
        true
    }

    /// Returns the owner thread, its host, the host of that, and so on.
    pub(super) fn hosts(&self, owner: OwnerThread) -> impl Iterator<Item = OwnerThread> {
        successors(Some(owner), |owner| self.known.get(owner).map(|guest| guest.host))
    }

    /// Returns the threads that allocate on the owner thread, on its host, and so on.
    pub(super) fn threads(&self, owner: OwnerThread) -> impl Iterator<Item = OwnerThread> {
        let next = |owner| Some(self.known.get(&owner).map_or((owner, None), |guest| (guest.own, Some(guest.host))));
        successors(next(owner), move |(_, host)| host.and_then(next)).map(|(thread, _)| thread)
    }

    /// Calls `count` once for each thread for which a block of this owner thread counts.
    #[inline]
    pub(super) fn for_each_thread(&self, owner: OwnerThread, mut count: impl FnMut(OwnerThread)) {
        if self.known.is_empty() {
            return count(owner);
        }
        self.threads(owner).for_each(count);
    }

    /// Returns whether a scan is in progress or due. A scan is due when there are twice as many guests as were in use at the last
    /// one.
    pub(super) fn must_scan(&self) -> bool {
        self.scan.is_some() || self.known.len() >= NO_SCAN.max(2 * self.in_use)
    }

    /// Returns the scan in progress, and whether this call started it.
    pub(super) fn scan(&mut self) -> (&mut GuestScan, bool) {
        let is_new = self.scan.is_none();
        (self.scan.get_or_insert_default(), is_new)
    }

    /// Marks these owner threads as used, if a scan is in progress.
    pub(super) fn mark_used(&mut self, owners: impl IntoIterator<Item = OwnerThread>) {
        if let Some(scan) = &mut self.scan {
            scan.used.extend(owners.into_iter().filter(|owner| self.known.contains_key(owner)));
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    #[cfg(test)]
    pub(super) fn owners(&self) -> usize {
        self.owners.len()
    }

    /// Ends the scan: forgets the guests that are not in use.
    pub(super) fn end_scan(&mut self) {
        let GuestScan { used, .. } = self.scan.take().unwrap_or_default();
        let in_use: HashSet<OwnerThread, NumberHashBuilder> =
            used.into_iter().flat_map(|owner| self.hosts(owner)).collect();
        self.known.retain(|owner, _| in_use.contains(owner));
        self.owners.retain(|_, owner| in_use.contains(owner));
        self.in_use = self.known.len();
    }
}

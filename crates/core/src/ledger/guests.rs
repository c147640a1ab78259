//! Threads in scopes of other threads. A block that is allocated there counts for the thread that allocated it and for the
//! thread of the scope.

use std::{
    collections::{HashMap, HashSet},
    iter::successors,
    ops::Bound,
};

use super::{
    counts::PART_LEN,
    live::{BLOCK_PARTS, LiveBlocks},
    scope::Scopes,
    threads::Threads,
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
    /// The number of scopes that guests have entered, and of tasks that were started, since the last step of a scan.
    steps_due: usize,
    /// The scan in progress, which finds the guests in use.
    scan: Option<GuestScan>,
}

/// A scan reads blocks and scopes in parts; threads allocate in between.
#[derive(Debug, Default)]
struct GuestScan {
    /// The part of the blocks that is read next.
    next_part: usize,
    /// The last scope that was read.
    last_scope: Option<ScopeId>,
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
        self.steps_due += 1;
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
        self.steps_due += 1;
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

    /// Makes the steps that are due, if a scan is in progress or if there are twice as many guests as were in use at the last one.
    #[inline]
    pub(super) fn scan_if_due(&mut self, live: &LiveBlocks, scopes: &Scopes, threads: &Threads) {
        while self.steps_due > 0 {
            self.steps_due -= 1;
            if self.scan.is_some() || self.known.len() >= NO_SCAN.max(2 * self.in_use) {
                self.scan(live, scopes, threads);
            }
        }
    }

    /// Makes one step of the scan that finds the owner threads of guests in use. Its last step forgets the others. A block
    /// that is allocated during the scan has an owner thread that its thread had at the start, or has entered since.
    #[cold]
    fn scan(&mut self, live: &LiveBlocks, scopes: &Scopes, threads: &Threads) {
        /// The number of parts of the blocks in one step. Tests read more parts in one step, because they have few guests and
        /// their scans must end.
        const STEP: usize = if cfg!(test) { 64 } else { 1 };
        let Some(scan) = &mut self.scan else {
            self.scan = Some(GuestScan::default());
            return self.mark_used(threads.owners());
        };
        if scan.next_part < BLOCK_PARTS {
            let first = scan.next_part;
            scan.next_part = BLOCK_PARTS.min(first + STEP);
            let parts = (first..scan.next_part).flat_map(|part| live.part(part));
            return self.mark_used(parts.map(|(_, entry)| entry.attribution().owner()));
        }
        let rest = (scan.last_scope.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let part = || scopes.range(rest).take(PART_LEN);
        // Scopes that open later have an owner thread of a thread, or one that is entered during the scan.
        let last_full = part().nth(PART_LEN - 1);
        scan.last_scope = last_full.map(|(last, _)| *last);
        self.mark_used(part().map(|(_, scope)| scope.owner));
        if last_full.is_none() {
            self.mark_used(threads.owners());
            self.end_scan();
        }
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
    fn end_scan(&mut self) {
        let GuestScan { used, .. } = self.scan.take().unwrap_or_default();
        let in_use: HashSet<OwnerThread, NumberHashBuilder> =
            used.into_iter().flat_map(|owner| self.hosts(owner)).collect();
        self.known.retain(|owner, _| in_use.contains(owner));
        self.owners.retain(|_, owner| in_use.contains(owner));
        self.in_use = self.known.len();
    }
}

//! Threads that allocate in a scope of another thread, for whom a block counts twice: for the thread that allocated it, and for
//! the one on whose behalf it did.

use std::collections::{HashMap, HashSet};

use crate::model::{OwnerThread, ScopeId};

/// So many are not worth a look.
const FEW: usize = if cfg!(test) { 4 } else { 512 };

/// A owner thread that is not a thread's own: a guest in a scope, and the owner thread that the scope was opened on, which may be a guest's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Guest {
    own: OwnerThread,
    host: OwnerThread,
}

/// All owner threads of guests. A owner thread that is not in here is a thread's own.
#[derive(Debug, Default)]
pub(super) struct Guests {
    known: HashMap<OwnerThread, Guest>,
    owners: HashMap<Guest, OwnerThread>,
    /// How many were in use at the last look.
    in_use: usize,
    /// While it is found out which are in use.
    look: Option<Look>,
}

/// Blocks and scopes are looked at in parts, while threads go on.
#[derive(Debug, Default)]
pub(super) struct Look {
    /// The next part of the blocks.
    pub(super) part: usize,
    /// The last scope that was looked at.
    pub(super) after: Option<ScopeId>,
    /// The owner threads in use: of the blocks, scopes and threads that were looked at so far, and those entered since the look began.
    seen: HashSet<OwnerThread>,
}

impl Guests {
    /// The owner thread of a thread in a scope of that owner thread; `next` is for a new one.
    pub(super) fn owner(
        &mut self,
        own: OwnerThread,
        host: OwnerThread,
        next: impl FnOnce() -> OwnerThread,
    ) -> OwnerThread {
        // It counts for this thread already, and for the same others.
        if self.hosts(host).any(|host| self.own(host) == own) {
            self.see([host]);
            return host;
        }
        let guest = Guest { own, host };
        let owner = self.owners.get(&guest).copied().unwrap_or_else(next);
        // The one that all share when no others are left must not lead to itself.
        if owner == OwnerThread::LAST {
            return host;
        }
        self.known.insert(owner, guest);
        self.owners.insert(guest, owner);
        self.see([owner]);
        owner
    }

    /// The thread that allocates on this owner thread.
    fn own(&self, owner: OwnerThread) -> OwnerThread {
        self.known.get(&owner).map_or(owner, |guest| guest.own)
    }

    /// The owner thread, the one on whose behalf it allocates, and so on.
    pub(super) fn hosts(&self, owner: OwnerThread) -> impl Iterator<Item = OwnerThread> {
        std::iter::successors(Some(owner), |owner| self.known.get(owner).map(|guest| guest.host))
    }

    /// Each thread for which a block of this owner thread counts, once: who allocated it, and on whose behalf.
    #[inline]
    pub(super) fn each(&self, owner: OwnerThread, mut count: impl FnMut(OwnerThread)) {
        if self.known.is_empty() {
            return count(owner);
        }
        self.hosts(owner).for_each(|host| count(self.own(host)));
    }

    /// There are twice as many as were in use at the last look, or some hundred; or it is being looked.
    pub(super) fn are_many(&self) -> bool {
        self.look.is_some() || self.known.len() >= FEW.max(2 * self.in_use)
    }

    /// The look in progress, and whether it has just begun.
    pub(super) fn look(&mut self) -> (&mut Look, bool) {
        let is_new = self.look.is_none();
        (self.look.get_or_insert_default(), is_new)
    }

    /// These are in use, should it be looked.
    pub(super) fn see(&mut self, owners: impl IntoIterator<Item = OwnerThread>) {
        if let Some(look) = &mut self.look {
            look.seen.extend(owners.into_iter().filter(|owner| self.known.contains_key(owner)));
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

    /// The look is over: forgets those that are not in use.
    pub(super) fn forget(&mut self) {
        let Look { seen, .. } = self.look.take().unwrap_or_default();
        let in_use: HashSet<OwnerThread> = seen.into_iter().flat_map(|owner| self.hosts(owner)).collect();
        self.known.retain(|owner, _| in_use.contains(owner));
        self.owners.retain(|_, owner| in_use.contains(owner));
        self.in_use = self.known.len();
    }
}

//! Threads that allocate in a scope of another thread, for whom a block counts twice: for the thread that allocated it, and for
//! the one on whose behalf it did.

use std::collections::{HashMap, HashSet};

use crate::model::{ScopeId, Strand};

/// So many are not worth a look.
const FEW: usize = if cfg!(test) { 4 } else { 512 };

/// A strand that is not a thread's own: a guest in a scope, and the strand that the scope was opened on, which may be a guest's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Guest {
    own: Strand,
    host: Strand,
}

/// All strands of guests. A strand that is not in here is a thread's own.
#[derive(Debug, Default)]
pub(super) struct Guests {
    known: HashMap<Strand, Guest>,
    strands: HashMap<Guest, Strand>,
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
    /// The strands in use: of the blocks, scopes and threads that were looked at so far, and those entered since the look began.
    seen: HashSet<Strand>,
}

impl Guests {
    /// The strand of a thread in a scope of that strand; `next` is for a new one.
    pub(super) fn strand(&mut self, own: Strand, host: Strand, next: impl FnOnce() -> Strand) -> Strand {
        // It counts for this thread already, and for the same others.
        if self.hosts(host).any(|host| self.own(host) == own) {
            self.see([host]);
            return host;
        }
        let guest = Guest { own, host };
        let strand = self.strands.get(&guest).copied().unwrap_or_else(next);
        // The one that all share when no others are left must not lead to itself.
        if strand == Strand::LAST {
            return host;
        }
        self.known.insert(strand, guest);
        self.strands.insert(guest, strand);
        self.see([strand]);
        strand
    }

    /// The thread that allocates on this strand.
    fn own(&self, strand: Strand) -> Strand {
        self.known.get(&strand).map_or(strand, |guest| guest.own)
    }

    /// The strand, the one on whose behalf it allocates, and so on.
    pub(super) fn hosts(&self, strand: Strand) -> impl Iterator<Item = Strand> {
        std::iter::successors(Some(strand), |strand| self.known.get(strand).map(|guest| guest.host))
    }

    /// Each thread for which a block of this strand counts, once: who allocated it, and on whose behalf.
    #[inline]
    pub(super) fn each(&self, strand: Strand, mut count: impl FnMut(Strand)) {
        if self.known.is_empty() {
            return count(strand);
        }
        self.hosts(strand).for_each(|host| count(self.own(host)));
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
    pub(super) fn see(&mut self, strands: impl IntoIterator<Item = Strand>) {
        if let Some(look) = &mut self.look {
            look.seen.extend(strands.into_iter().filter(|strand| self.known.contains_key(strand)));
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    #[cfg(test)]
    pub(super) fn strands(&self) -> usize {
        self.strands.len()
    }

    /// The look is over: forgets those that are not in use.
    pub(super) fn forget(&mut self) {
        let Look { seen, .. } = self.look.take().unwrap_or_default();
        let in_use: HashSet<Strand> = seen.into_iter().flat_map(|strand| self.hosts(strand)).collect();
        self.known.retain(|strand, _| in_use.contains(strand));
        self.strands.retain(|_, strand| in_use.contains(strand));
        self.in_use = self.known.len();
    }
}

//! Threads that allocate in a scope of another thread, for whom a block counts twice: for the thread that allocated it, and for
//! the one on whose behalf it did.

use std::collections::{HashMap, HashSet};

use crate::model::Strand;

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
}

impl Guests {
    /// The strand of a thread in a scope of that strand; `next` is for a new one.
    pub(super) fn strand(&mut self, own: Strand, host: Strand, next: impl FnOnce() -> Strand) -> Strand {
        // It counts for this thread already, and for the same others.
        if self.hosts(host).any(|host| self.own(host) == own) {
            return host;
        }
        let guest = Guest { own, host };
        *self.strands.entry(guest).or_insert_with(|| {
            let strand = next();
            self.known.insert(strand, guest);
            strand
        })
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

    /// There are twice as many as were in use at the last look, or some hundred.
    pub(super) fn are_many(&self) -> bool {
        self.known.len() >= 512.max(2 * self.in_use)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    #[cfg(test)]
    pub(super) fn strands(&self) -> usize {
        self.strands.len()
    }

    /// Forgets those that are not in use.
    pub(super) fn keep(&mut self, in_use: impl Iterator<Item = Strand>) {
        let in_use: HashSet<Strand> = in_use.collect();
        let in_use: HashSet<Strand> = in_use.into_iter().flat_map(|strand| self.hosts(strand)).collect();
        self.known.retain(|strand, _| in_use.contains(strand));
        self.strands.retain(|_, strand| in_use.contains(strand));
        self.in_use = self.known.len();
    }
}

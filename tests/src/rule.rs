//! The rule for what a trace counts, computed naively: each event looks at all traces. Here, no thread enters a scope of another thread.
//! `GpuMemTrace` documents the rule, and `ledger/accounts.rs` computes it fast.

use std::collections::HashMap;

/// The threads that a trace counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts {
    /// Every thread.
    All,
    /// Its own thread, and threads in no scope.
    OwnAndUnscoped,
    /// Its own thread.
    Own,
}

/// An open trace.
#[derive(Debug)]
struct Open {
    counts: Counts,
    opener: u64,
    /// The event since which there have always been open traces of this thread that count the same threads.
    since: usize,
    used: i64,
    peak: i64,
}

/// A thread, and whether it is in a scope.
#[derive(Clone, Copy, Debug)]
struct Place {
    thread: u64,
    is_in_scope: bool,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    place: Place,
    at: usize,
    bytes: i64,
}

/// All open traces and live blocks, by ids that the caller chooses.
#[derive(Debug, Default)]
pub struct Rule {
    events: usize,
    open: HashMap<u64, Open>,
    live: HashMap<u64, Block>,
    freed: HashMap<u64, Option<(u64, Block)>>,
}

impl Open {
    fn counts(&self, place: Place) -> bool {
        self.counts == Counts::All || self.owns(place)
    }

    /// Returns whether memory that is allocated at this place belongs to the trace. A trace that counts all threads also counts memory that
    /// does not belong to it.
    fn owns(&self, Place { thread, is_in_scope }: Place) -> bool {
        if is_in_scope { thread == self.opener } else { self.counts != Counts::Own }
    }

    fn holds(&self, block: &Block) -> bool {
        self.since < block.at && self.owns(block.place)
    }

    fn change(&mut self, by: i64) {
        self.used += by;
        self.peak = self.peak.max(self.used);
    }

    fn used_and_peaked(&self) -> (i64, u64) {
        (self.used, (self.peak - self.used.max(0)).unsigned_abs())
    }
}

impl Rule {
    /// Counts an event. Returns the thread, and whether it is in a scope: while a trace is open that it opened.
    fn place(&mut self, thread: u64) -> Place {
        self.events += 1;
        Place { thread, is_in_scope: self.open.values().any(|open| open.opener == thread) }
    }

    /// Applies the allocation of a block by a thread.
    pub fn alloc(&mut self, thread: u64, block: u64, bytes: i64) {
        let place = self.place(thread);
        self.live.insert(block, Block { place, at: self.events, bytes });
        self.open.values_mut().filter(|open| open.counts(place)).for_each(|open| open.change(bytes));
    }

    /// Applies the free of a block, which may be unknown, by a thread.
    pub fn free(&mut self, thread: u64, block: u64) {
        let place = self.place(thread);
        let freed = self.live.remove(&block).map(|freed| (block, freed));
        if let Some((_, freed)) = &freed {
            self.change_by_free(freed, place, -1);
        }
        self.freed.insert(thread, freed);
    }

    /// Reverts the latest free of a thread, because it failed.
    pub fn free_failed(&mut self, thread: u64) {
        let place = self.place(thread);
        if let Some((block, freed)) = self.freed.remove(&thread).flatten() {
            self.change_by_free(&freed, place, 1);
            self.live.insert(block, freed);
        }
    }

    fn change_by_free(&mut self, block: &Block, by: Place, sign: i64) {
        let holders: Vec<u64> = self.open.values().filter(|open| open.holds(block)).map(|open| open.opener).collect();
        let belongs_to_others = holders.iter().any(|opener| !(by.is_in_scope && by.thread == *opener));
        // A trace that leaves out threads in no scope leaves out their memory.
        let is_left_out = |open: &Open| open.counts == Counts::Own && !block.place.is_in_scope && open.since < block.at;
        for open in self.open.values_mut() {
            // True if this trace is inside a trace to which the block belongs.
            let is_inside = holders.contains(&open.opener);
            let counts_for_freer = (is_inside || !belongs_to_others) && open.owns(by) && !is_left_out(open);
            let counts_as_allocated = open.holds(block) || is_inside && open.owns(block.place);
            if open.counts == Counts::All || counts_as_allocated || counts_for_freer {
                open.change(sign * block.bytes);
            }
        }
    }

    /// Opens a trace of a thread.
    pub fn open(&mut self, opener: u64, trace: u64, counts: Counts) {
        self.events += 1;
        let alike = self.open.values().filter(|open| (open.opener, open.counts) == (opener, counts));
        let since = alike.map(|open| open.since).min().unwrap_or(self.events);
        self.open.insert(trace, Open { counts, opener, since, used: 0, peak: 0 });
    }

    /// Closes a trace. Returns used and peaked, if it was open.
    pub fn close(&mut self, trace: u64) -> Option<(i64, u64)> {
        self.open.remove(&trace).map(|open| open.used_and_peaked())
    }
}

//! Allocations and frees. They change the live blocks, the sums, and what is kept of the thread and the pools.

use super::{
    FastPath, Ledger,
    accounts::Place,
    counts::signed,
    groups::AllocGroup,
    live::{Attribution, Entry},
    observer::{BlockChangeKind, Observer},
    pools::UNDECIDED,
    sums::Sums,
    thread::{Freed, Thread},
    tree::NodeId,
};
use crate::model::{Answer, Block, Bytes, Gauge, Key, OwnerThread, Tag, ThreadId};

impl Ledger {
    /// Applies an allocation that differs from the latest events only in its key and size, as most do. If it differs in anything
    /// else, this returns `false` and changes nothing, and the caller calls [`alloc`](Self::alloc). This function calls nothing
    /// and cannot panic.
    #[allow(clippy::inline_always, reason = "one function without calls takes fewer lines of the instruction cache")]
    #[inline(always)]
    pub fn alloc_like_latest(&mut self, key: Key, bytes: Bytes, tag: Tag, number: u64, thread: ThreadId) -> bool {
        self.fast_path == FastPath::All && self.alloc_in_front(key, bytes, tag, number, thread)
    }

    #[allow(clippy::inline_always, reason = "as above")]
    #[inline(always)]
    pub(super) fn alloc_in_front(&mut self, key: Key, bytes: Bytes, tag: Tag, number: u64, thread: ThreadId) -> bool {
        let Some(Thread { latest: (latest, attribution), .. }) = self.places.threads.known(thread) else {
            return false;
        };
        if *latest != tag || !self.sums.pending.is_of(*attribution) {
            return false;
        }
        let entry = self.live.entry(bytes, number, *attribution);
        if !self.live.insert_in_front(key, entry) {
            return false;
        }
        self.sums.pending.add(signed(bytes));
        self.sums.pending.allocated(bytes.get());
        true
    }

    /// Like [`alloc_like_latest`](Self::alloc_like_latest), for the free of a block that is in the front cache.
    #[allow(clippy::inline_always, reason = "one function without calls takes fewer lines of the instruction cache")]
    #[inline(always)]
    pub fn free_like_latest(&mut self, key: Key, thread: ThreadId) -> bool {
        let is_fast = if key.is_part() { self.has_fast_parts() } else { self.fast_path == FastPath::All };
        let Self { sums: Sums { pending, accounts, .. }, places, live, .. } = self;
        let Some(record) = places.threads.known_mut(thread) else { return false };
        if !is_fast {
            return false;
        }
        let (tag, attribution) = record.latest;
        // With open accounts, the thread must still be where it allocated the block.
        let is_in_scope = record.node != NodeId::NONE;
        let is_alike = |entry: &Entry| {
            pending.is_of(entry.attribution())
                && (!accounts.are_open()
                    || tag != Tag::NONE
                        && entry.attribution() == attribution
                        && accounts.are_alike_since(entry.number(), is_in_scope))
        };
        let Some(entry) = live.remove_from_front(key, is_alike) else { return false };
        pending.subtract(signed(entry.bytes));
        // Built in place to avoid a store-forwarding stall: a temporary would be written in words and copied in wider
        // registers.
        record.freed = Freed::Block(key, entry);
        true
    }

    /// Applies an allocation. `number` is the number of its event.
    pub fn alloc(&mut self, key: Key, bytes: Bytes, tag: Tag, number: u64, thread: ThreadId) {
        self.alloc_observed(key, bytes, tag, number, thread, &mut ());
    }

    pub(super) fn alloc_observed<O: Observer>(
        &mut self,
        key: Key,
        bytes: Bytes,
        tag: Tag,
        number: u64,
        thread: ThreadId,
        observer: &mut O,
    ) {
        if self.pools.has_undecided() {
            let is_many = self.pools.has_many_undecided();
            self.decide_before(thread, key, Some(tag.device()), is_many, observer);
        }
        let attribution = self.attribution(tag, bytes, number, thread);
        let entry = self.live.entry(bytes, number, attribution);
        self.insert_block(key, entry, observer);
        self.sums.count(&entry);
        if self.sums.groups.get(entry.group()).pool == UNDECIDED {
            return self.add_undecided(key, &entry, thread, observer);
        }
        self.sums.notify(BlockChangeKind::Allocated, key, &entry, observer);
        self.sums.pending.allocated(bytes.get());
        if !self.watches.is_empty() {
            self.notice(&entry, false, thread);
        }
    }

    /// Inserts a new block, or one whose free has failed. The caller counts it.
    fn insert_block<O: Observer>(&mut self, key: Key, entry: Entry, observer: &mut O) {
        if let Some((key, missed)) = self.live.insert(key, entry) {
            self.pools.remove_range(key, &mut self.sums);
            self.sums.remove_without_free(&missed);
            self.sums.notify(BlockChangeKind::FreeMissed, key, &missed, observer);
        }
    }

    /// Returns the owner thread and the group of an allocation.
    fn attribution(&mut self, tag: Tag, bytes: Bytes, number: u64, thread: ThreadId) -> Attribution {
        let (latest, attribution) = self.places.threads.get(thread).latest;
        if latest == tag { attribution } else { self.find_attribution(tag, bytes, number, thread) }
    }

    #[cold]
    fn find_attribution(&mut self, tag: Tag, bytes: Bytes, number: u64, thread: ThreadId) -> Attribution {
        self.scan_for_guests();
        let Self { sums, places, .. } = self;
        sums.flush();
        let meter = sums.meters.index(tag.device(), Gauge::Exact);
        let is_on_device = tag.kind().is_on_device();
        if is_on_device {
            places.threads.get(thread).allocated_on.note(meter, number);
        }
        let is_shared = places.note_adoption(thread, meter, bytes, is_on_device, number, sums);
        let (node, owner) = places.place_of(thread, &mut sums.guests);
        if is_on_device {
            places.note_for_tasks(owner, meter, number, &sums.guests);
        }
        let node = sums.tree.same_path_on(meter, node);
        let (kind, pool) = (tag.kind(), sums.pool_of_new(tag, meter));
        let context = if tag.is_of_driver() { tag.context() } else { 0 };
        let group = AllocGroup { node, stack: tag.stack(), meter, kind, context, pool };
        let attribution = Attribution::new(owner, sums.group_number(group, &places.threads));
        // The next allocation is noted as well, if scopes of several threads adopt the thread.
        places.threads.get(thread).latest = (if is_shared { Tag::NONE } else { tag }, attribution);
        attribution
    }

    /// Returns the path and the owner thread for the allocations of a thread.
    pub(super) fn place_of(&mut self, thread: ThreadId) -> (NodeId, OwnerThread) {
        self.places.place_of(thread, &mut self.sums.guests)
    }

    /// Returns the place at which a thread frees now.
    fn place_of_free(&mut self, thread: ThreadId) -> Place {
        if !self.sums.accounts.are_open() {
            return Place::OUTSIDE;
        }
        let (node, owner) = self.place_of(thread);
        Place::new(owner, self.sums.tree.is_in_scope(node))
    }

    /// Applies a free. `older` is the source's description of a block that is older than the session.
    pub fn free(&mut self, key: Key, older: Option<&Block>, thread: ThreadId) -> Answer {
        self.free_observed(key, older, thread, &mut ())
    }

    pub(super) fn free_observed<O: Observer>(
        &mut self,
        key: Key,
        older: Option<&Block>,
        thread: ThreadId,
        observer: &mut O,
    ) -> Answer {
        if self.pools.has_undecided() {
            let device = self.live.get(key).map(|entry| self.sums.device_of(entry));
            self.decide_before(thread, key, device, true, observer);
        }
        let Some(entry) = self.live.remove(key) else { return self.free_unknown(key, older, thread) };
        self.pools.remove_range(key, &mut self.sums);
        let by = self.place_of_free(thread);
        self.sums.remove_block(&entry, by);
        self.places.threads.get(thread).freed = Freed::Block(key, entry);
        if !self.watches.is_empty() {
            self.notice(&entry, true, thread);
        }
        self.sums.notify(BlockChangeKind::Freed, key, &entry, observer);
        Answer::Applied
    }

    #[cold]
    fn free_unknown(&mut self, key: Key, older: Option<&Block>, thread: ThreadId) -> Answer {
        if key.is_part() {
            self.unknown_part(key);
            self.places.threads.get(thread).freed = Freed::Nothing;
            return Answer::Applied;
        }
        self.sums.counts.events = self.sums.counts.events.wrapping_add(1);
        let (freed, answer) = match older {
            Some(block) => (self.free_older(block, thread), Answer::Applied),
            // The free is counted when the late lookup ends. A scope that opens before then starts before this free.
            None => (Freed::Uncounted, Answer::Untracked),
        };
        self.places.threads.get(thread).freed = freed;
        answer
    }

    pub(super) fn free_older(&mut self, block: &Block, thread: ThreadId) -> Freed {
        if !block.kind.is_on_device() {
            return Freed::Uncounted;
        }
        let by = self.place_of_free(thread);
        self.sums.change_older(block.device, -signed(block.bytes), by);
        Freed::Older(block.device, block.bytes)
    }

    /// Undoes the last free of a thread, which failed. The failed free is not counted as an event.
    pub(super) fn free_failed<O: Observer>(&mut self, thread: ThreadId, observer: &mut O) {
        match std::mem::take(&mut self.places.threads.get(thread).freed) {
            Freed::Nothing => return,
            // The pending delta gets a block without an allocation, which lowers the number of events by one (see
            // `GroupDelta::events`). This way the failed free is not counted.
            Freed::Block(key, entry) => {
                self.sums.guests.mark_used([entry.attribution().owner()]);
                self.insert_block(key, entry, observer);
                let by = self.place_of_free(thread);
                self.sums.add_block_again(&entry, by);
                self.block_is_back(key, &entry);
                return self.sums.notify(BlockChangeKind::FreeFailed, key, &entry, observer);
            }
            Freed::Older(device, bytes) => {
                let by = self.place_of_free(thread);
                self.sums.change_older(device, signed(bytes), by);
            }
            Freed::Uncounted => {}
            Freed::Untracked(number) => {
                self.sums.counts.untracked = self.sums.counts.untracked.saturating_sub(1);
                // Scopes that started after this event have it in their initial count.
                for scope in self.places.scopes.values_mut().filter(|scope| scope.start.number > number) {
                    let before = &mut scope.start.before.untracked;
                    *before = before.saturating_sub(1);
                }
            }
        }
        self.sums.counts.events = self.sums.counts.events.wrapping_sub(1);
    }

    /// Changes the size of a block. Its entry keeps its attribution and its place in the tables, so a thread that reads the
    /// blocks in parts finds this block only once.
    pub(super) fn shrink<O: Observer>(&mut self, key: Key, bytes: Bytes, thread: ThreadId, observer: &mut O) {
        if let Some(entry) = self.live.get_mut(key) {
            let (before, now) = (*entry, entry.with_bytes(bytes));
            *entry = now;
            let by = self.place_of_free(thread);
            self.sums.remove_block(&before, by);
            self.sums.add_block_again(&now, by);
            self.pools.resize_range(key, bytes);
            self.sums.notify_change(BlockChangeKind::Shrunk, key, &now, (before.bytes, bytes), observer);
        }
    }

    /// Removes the blocks of a destroyed context, in one part of [`BLOCK_PARTS`](super::BLOCK_PARTS) parts of the blocks.
    pub fn remove_context(&mut self, context: u8, part: usize) {
        self.remove_context_observed(context, part, &mut ());
    }

    pub(super) fn remove_context_observed<O: Observer>(&mut self, context: u8, part: usize, observer: &mut O) {
        if self.pools.has_undecided() {
            self.decide_for_program(None, |_| true, observer);
        }
        let groups = &self.sums.groups;
        for (key, entry) in self.live.drain(part, |entry| groups.get(entry.group()).context == context) {
            self.sums.counts.removed_with_context += 1;
            self.pools.remove_range(key, &mut self.sums);
            self.sums.remove_without_free(&entry);
            self.sums.notify(BlockChangeKind::RemovedWithContext, key, &entry, observer);
        }
    }
}

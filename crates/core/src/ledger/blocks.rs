//! Allocations and frees.

use super::{
    Ledger,
    accounts::Place,
    counts::signed,
    delta::GroupDelta,
    groups::{AllocGroup, GroupId, GroupState},
    live::{Attribution, Entry},
    meters::Meter,
    observer::{BlockChange, BlockChangeKind, Observer},
    pending::PendingDelta,
    pool_table::{UNDECIDED, count_for_views},
    stats::add_signed,
    thread::{Freed, Thread},
    tree::NodeId,
};
use crate::model::{Answer, Block, Bytes, Device, Gauge, Key, OwnerThread, Tag, ThreadId};

impl Ledger {
    /// Applies an allocation that differs from the latest events only in its key and size, as most do. If it differs in anything
    /// else, this returns `false` and changes nothing, and the caller calls [`alloc`](Self::alloc). This function calls nothing
    /// and cannot panic.
    #[allow(clippy::inline_always, reason = "one function without calls takes fewer lines of the instruction cache")]
    #[inline(always)]
    pub fn alloc_like_latest(&mut self, key: Key, bytes: Bytes, tag: Tag, number: u64, thread: ThreadId) -> bool {
        !self.is_special && self.alloc_in_front(key, bytes, tag, number, thread)
    }

    #[allow(clippy::inline_always, reason = "as above")]
    #[inline(always)]
    pub(super) fn alloc_in_front(&mut self, key: Key, bytes: Bytes, tag: Tag, number: u64, thread: ThreadId) -> bool {
        let Some(Thread { latest: (latest, attribution), .. }) = self.threads.get(thread.0 as usize) else {
            return false;
        };
        if *latest != tag || !self.pending.is_of(*attribution) {
            return false;
        }
        if !self.live.insert_in_front(key, Entry::new(bytes, number, self.tenths, *attribution)) {
            return false;
        }
        self.pending.add(signed(bytes));
        self.pending.allocated(bytes.get());
        true
    }

    /// Like [`alloc_like_latest`](Self::alloc_like_latest), for the free of a block that is in the front cache.
    #[allow(clippy::inline_always, reason = "one function without calls takes fewer lines of the instruction cache")]
    #[inline(always)]
    pub fn free_like_latest(&mut self, key: Key, thread: ThreadId) -> bool {
        let is_special = if key.is_part() { self.is_watched || self.has_undecided() } else { self.is_special };
        let Some(record) = self.threads.get_mut(thread.0 as usize) else { return false };
        if is_special {
            return false;
        }
        let Self { pending, accounts, live, .. } = self;
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
        self.pending.subtract(signed(entry.bytes));
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
        if self.has_undecided() {
            let is_many = self.pools.has_many_undecided();
            self.decide_before(thread, key, Some(tag.device()), is_many, observer);
        }
        let attribution = self.attribution(tag, bytes, number, thread);
        let entry = Entry::new(bytes, number, self.tenths, attribution);
        self.insert_block(key, entry, observer);
        self.count(&entry);
        if self.has_pools && self.groups.get(entry.group()).pool == UNDECIDED {
            return self.add_undecided(key, &entry, thread, observer);
        }
        self.notify(BlockChangeKind::Allocated, key, &entry, observer);
        self.pending.allocated(bytes.get());
        if self.is_watched {
            self.notice(&entry, false, thread);
        }
    }

    /// Inserts a new block, or one whose free has failed. The caller counts it.
    fn insert_block<O: Observer>(&mut self, key: Key, entry: Entry, observer: &mut O) {
        if let Some((key, missed)) = self.live.insert(key, entry) {
            self.block_is_gone(key);
            self.remove_without_free(&missed);
            self.notify(BlockChangeKind::FreeMissed, key, &missed, observer);
        }
    }

    /// Tells the observer what happened to a block.
    #[inline]
    pub(super) fn notify<O: Observer>(&self, kind: BlockChangeKind, key: Key, entry: &Entry, observer: &mut O) {
        if O::OBSERVES {
            let sizes = if kind.blocks() > 0 { (Bytes::ZERO, entry.bytes) } else { (entry.bytes, Bytes::ZERO) };
            self.notify_change(kind, key, entry, sizes, observer);
        }
    }

    /// Tells the observer of an allocation like the last one.
    pub(super) fn notify_latest<O: Observer>(&self, key: Key, bytes: Bytes, number: u64, observer: &mut O) {
        let entry = Entry::new(bytes, number, self.tenths, Attribution::new(OwnerThread(0), self.pending.group));
        self.notify(BlockChangeKind::Allocated, key, &entry, observer);
    }

    fn notify_change<O: Observer>(
        &self,
        kind: BlockChangeKind,
        key: Key,
        entry: &Entry,
        (before, after): (Bytes, Bytes),
        observer: &mut O,
    ) {
        let group = *self.groups.get(entry.group());
        let device = self.meters.0[usize::from(group.meter)].device;
        observer.changed(BlockChange { kind, key, number: entry.number(), before, after, device, group });
    }

    /// Counts a block where its thread allocated it.
    pub(super) fn count(&mut self, entry: &Entry) {
        self.pending_of(entry.attribution()).add(signed(entry.bytes));
    }

    /// Subtracts a block whose free was not observed.
    #[cold]
    pub(super) fn remove_without_free(&mut self, entry: &Entry) {
        self.remove_block(entry, Place::OUTSIDE);
        self.counts.events = self.counts.events.wrapping_sub(1);
    }

    /// Subtracts a block that a thread at this place freed.
    pub(super) fn remove_block(&mut self, entry: &Entry, by: Place) {
        if self.counts_where_allocated(entry, by) {
            self.pending_of(entry.attribution()).subtract(signed(entry.bytes));
        } else {
            self.change_apart(entry, by, GroupDelta::of_block(-1, -signed(entry.bytes)));
        }
    }

    /// Undoes [`remove_block`](Self::remove_block).
    fn add_block_again(&mut self, entry: &Entry, by: Place) {
        if self.counts_where_allocated(entry, by) {
            self.count(entry);
        } else {
            self.change_apart(entry, by, GroupDelta::of_block(1, signed(entry.bytes)));
        }
    }

    /// Returns whether the free of a block counts in the accounts in which an allocation with its attribution counts now.
    fn counts_where_allocated(&self, entry: &Entry, by: Place) -> bool {
        !self.accounts.are_open()
            || self.accounts.are_alike_since(entry.number(), by.is_in_scope()) && self.place_of_block(entry) == by
    }

    fn place_of_block(&self, entry: &Entry) -> Place {
        let is_in_scope = self.tree.is_in_scope(self.groups.get(entry.group()).node);
        Place::new(entry.attribution().owner(), is_in_scope)
    }

    /// Counts the free of a block, or undoes it, in the accounts that [`Accounts::of_free`](super::accounts::Accounts::of_free)
    /// finds.
    #[cold]
    fn change_apart(&mut self, entry: &Entry, by: Place, delta: GroupDelta) {
        self.flush_pending();
        let (place, number) = (self.place_of_block(entry), entry.group());
        let meter = self.groups.get(number).meter;
        if !self.apply_delta(number, &delta) {
            return;
        }
        let Self { accounts, guests, .. } = self;
        let search = accounts.of_free((place, entry.number()), by, meter, guests);
        for id in &search.found {
            let Some(account) = accounts.get_mut(*id) else { continue };
            account.apply(number, delta.bytes);
            if search.is_shared {
                // The scopes that were open at the allocation share the block already.
                account.share_after(entry.number(), signed(entry.bytes));
            }
        }
        accounts.end_search(search);
    }

    #[inline]
    pub(super) fn pending_of(&mut self, attribution: Attribution) -> &mut PendingDelta {
        if !self.pending.is_of(attribution) {
            self.start_pending(attribution);
        }
        &mut self.pending
    }

    #[cold]
    fn start_pending(&mut self, attribution: Attribution) {
        self.flush_pending();
        let is_in_scope = || self.tree.is_in_scope(self.groups.get(attribution.group()).node);
        let owner = if self.accounts.are_open() && is_in_scope() { attribution.owner() } else { OwnerThread::LAST };
        (self.pending.group, self.pending.owner) = (attribution.group(), owner);
    }

    /// Applies the pending delta to the group, the meter, the tree and the accounts. Call this before an event of another group
    /// or in other accounts, and before any of these counters is read.
    #[inline]
    pub(super) fn flush_pending(&mut self) {
        let Some((number, delta)) = self.pending.delta() else { return };
        let owner = std::mem::take(&mut self.pending).owner;
        if self.apply_delta(number, &delta) && self.accounts.are_open() {
            self.count_for_accounts(owner, number, &delta);
        }
    }

    /// Applies allocations and their frees at one place to the accounts.
    #[inline(never)]
    fn count_for_accounts(&mut self, owner: OwnerThread, number: GroupId, delta: &GroupDelta) {
        let Self { groups, tree, guests, accounts, .. } = self;
        let AllocGroup { node, meter, .. } = *groups.get(number);
        let place = Place::new(owner, tree.is_in_scope(node));
        let is_shared = !place.is_in_scope() && accounts.are_shared(meter);
        accounts.each_of(place, meter, guests, |_, account| {
            account.apply(number, delta.bytes);
            if is_shared {
                account.share(delta.allocated);
            }
        });
    }

    /// Applies a delta to its group, the meter and the tree. Returns whether the program's view counts the group.
    fn apply_delta(&mut self, number: GroupId, delta: &GroupDelta) -> bool {
        let Self { groups, meters, tree, counts, pools, .. } = self;
        counts.events = counts.events.wrapping_add_signed(delta.events());
        let state = groups.state(number);
        state.blocks = add_signed(state.blocks, delta.blocks.net);
        state.bytes = add_signed(state.bytes, delta.bytes.net);
        let group = &state.group;
        let Meter { level, peaks, on_device, kinds, driver, .. } = &mut meters.0[usize::from(group.meter)];
        kinds[group.kind as usize].apply(delta);
        let is_in_program = group.kind.is_on_device()
            && driver.as_mut().is_none_or(|driver| count_for_views(driver, pools, group, delta));
        if is_in_program {
            let high = level.in_use.saturating_add(delta.bytes.high);
            if state.history.must_save(peaks) || peaks.is_new_peak(high) {
                peaks.apply(&mut state.history, state.bytes.cast_signed(), delta.bytes, high);
            }
            on_device.apply(delta);
            level.apply(high, delta.bytes.net);
            tree.apply(group.node, delta);
        } else if group.is_of_pool_only() && state.history.must_save(peaks) {
            // Peaks report the memory of pools too. No peak of the program is as low as this level.
            peaks.apply(&mut state.history, state.bytes.cast_signed(), delta.bytes, i64::MIN);
        }
        is_in_program
    }

    /// Returns the owner thread and the group of an allocation.
    fn attribution(&mut self, tag: Tag, bytes: Bytes, number: u64, thread: ThreadId) -> Attribution {
        let (latest, attribution) = self.thread(thread).latest;
        if latest == tag { attribution } else { self.find_attribution(tag, bytes, number, thread) }
    }

    #[cold]
    fn find_attribution(&mut self, tag: Tag, bytes: Bytes, number: u64, thread: ThreadId) -> Attribution {
        self.flush_pending();
        let meter = self.meters.index(tag.device(), Gauge::Exact);
        if tag.kind().is_on_device() {
            self.thread(thread).allocated_on.note(meter, number);
        }
        let is_shared =
            !self.adopters.is_empty() && self.note_adoption(thread, meter, bytes, tag.kind().is_on_device(), number);
        let (node, owner) = self.place_of(thread);
        if tag.kind().is_on_device() && !self.tasks.is_empty() {
            let Self { guests, tasks, .. } = self;
            guests.for_each_thread(owner, |of| tasks.get_mut(&of).into_iter().for_each(|on| on.note(meter, number)));
        }
        let node = self.tree.same_path_on(meter, node);
        let (kind, pool) = (tag.kind(), self.pool_of_new(tag, meter));
        let context = if tag.is_of_driver() { tag.context() } else { 0 };
        let group = AllocGroup { node, stack: tag.stack(), meter, kind, context, pool };
        let attribution = Attribution::new(owner, self.group_number(group));
        // The next allocation is noted as well, if scopes of several threads adopt the thread.
        self.thread(thread).latest = (if is_shared { Tag::NONE } else { tag }, attribution);
        attribution
    }

    /// Returns the number of a group.
    pub(super) fn group_number(&mut self, group: AllocGroup) -> GroupId {
        let Self { threads, accounts, meters, groups, .. } = self;
        let in_use = || {
            let latest = threads.iter().map(|thread| thread.latest.1.group());
            let freed = threads.iter().filter_map(|thread| match &thread.freed {
                Freed::Block(_, entry) => Some(entry.group()),
                _ => None,
            });
            latest.chain(freed).chain(accounts.needed_groups()).collect()
        };
        let is_needed = |state: &GroupState| state.history.is_needed(&meters.0[usize::from(state.group.meter)].peaks);
        groups.number(group, in_use, is_needed)
    }

    /// Counts the free of a block that is older than the session, or the failure of that free. No thread and no scope is known to
    /// have allocated the block.
    fn change_older(&mut self, device: Device, by: i64, thread: ThreadId) {
        self.flush_pending();
        if self.accounts.are_open() {
            let (place, meter) = (self.place_of_free(thread), self.meters.index(device, Gauge::Exact));
            let Self { accounts, guests, .. } = self;
            let is_shared = !place.is_in_scope() && accounts.are_shared(meter);
            accounts.each_of(place, meter, guests, |_, account| {
                account.change_older(by);
                if is_shared {
                    account.share(by.saturating_abs());
                }
            });
        }
        let Meter { level, peaks, driver, .. } = self.meters.of(device, Gauge::Exact);
        peaks.change_older(by);
        if let Some(driver) = driver {
            driver.change(by);
        }
        level.change(by);
        peaks.raise(level.in_use);
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
        if self.has_undecided() {
            let device = self.live.get(key).map(|entry| self.device_of(entry));
            self.decide_before(thread, key, device, true, observer);
        }
        let Some(entry) = self.live.remove(key) else { return self.free_unknown(key, older, thread) };
        self.block_is_gone(key);
        let by = self.place_of_free(thread);
        self.remove_block(&entry, by);
        self.thread(thread).freed = Freed::Block(key, entry);
        if self.is_watched {
            self.notice(&entry, true, thread);
        }
        self.notify(BlockChangeKind::Freed, key, &entry, observer);
        Answer::Applied
    }

    #[cold]
    fn free_unknown(&mut self, key: Key, older: Option<&Block>, thread: ThreadId) -> Answer {
        if key.is_part() {
            self.unknown_part(key);
            self.thread(thread).freed = Freed::Nothing;
            return Answer::Applied;
        }
        self.counts.events = self.counts.events.wrapping_add(1);
        let (freed, answer) = match older {
            Some(block) => (self.free_older(block, thread), Answer::Applied),
            // The free is counted when the late lookup ends. A scope that opens before then starts before this free.
            None => (Freed::Uncounted, Answer::Untracked),
        };
        self.thread(thread).freed = freed;
        answer
    }

    pub(super) fn free_older(&mut self, block: &Block, thread: ThreadId) -> Freed {
        if !block.kind.is_on_device() {
            return Freed::Uncounted;
        }
        self.change_older(block.device, -signed(block.bytes), thread);
        Freed::Older(block.device, block.bytes)
    }

    /// Undoes the last free of a thread, which failed. The failed free is not counted as an event.
    pub(super) fn free_failed<O: Observer>(&mut self, thread: ThreadId, observer: &mut O) {
        match std::mem::take(&mut self.thread(thread).freed) {
            Freed::Nothing => return,
            // The pending delta gets a block without an allocation, which lowers the number of events by one (see
            // `GroupDelta::events`). This way the failed free is not counted.
            Freed::Block(key, entry) => {
                self.guests.mark_used([entry.attribution().owner()]);
                self.insert_block(key, entry, observer);
                let by = self.place_of_free(thread);
                self.add_block_again(&entry, by);
                self.block_is_back(key, &entry);
                return self.notify(BlockChangeKind::FreeFailed, key, &entry, observer);
            }
            Freed::Older(device, bytes) => self.change_older(device, signed(bytes), thread),
            Freed::Uncounted => {}
            Freed::Untracked(number) => {
                self.counts.untracked = self.counts.untracked.saturating_sub(1);
                // Scopes that started after this event have it in their initial count.
                for scope in self.scopes.values_mut().filter(|scope| scope.start.number > number) {
                    let before = &mut scope.start.before.untracked;
                    *before = before.saturating_sub(1);
                }
            }
        }
        self.counts.events = self.counts.events.wrapping_sub(1);
    }

    /// Changes the size of a block. Its entry keeps its attribution and its place in the tables, so a thread that reads the
    /// blocks in parts finds this block only once.
    pub(super) fn shrink<O: Observer>(&mut self, key: Key, bytes: Bytes, thread: ThreadId, observer: &mut O) {
        if let Some(entry) = self.live.get_mut(key) {
            let (before, now) = (*entry, entry.with_bytes(bytes));
            *entry = now;
            let by = self.place_of_free(thread);
            self.remove_block(&before, by);
            self.add_block_again(&now, by);
            self.block_is_resized(key, bytes);
            if O::OBSERVES {
                self.notify_change(BlockChangeKind::Shrunk, key, &now, (before.bytes, bytes), observer);
            }
        }
    }

    /// Removes the blocks of a destroyed context, in one part of [`BLOCK_PARTS`](super::BLOCK_PARTS) parts of the blocks.
    pub fn remove_context(&mut self, context: u8, part: usize) {
        self.remove_context_observed(context, part, &mut ());
    }

    pub(super) fn remove_context_observed<O: Observer>(&mut self, context: u8, part: usize, observer: &mut O) {
        if self.has_undecided() {
            self.decide_for_program(None, |_| true, observer);
        }
        let groups = &self.groups;
        for (key, entry) in self.live.drain(part, |entry| groups.get(entry.group()).context == context) {
            self.counts.removed_with_context += 1;
            self.block_is_gone(key);
            self.remove_without_free(&entry);
            self.notify(BlockChangeKind::RemovedWithContext, key, &entry, observer);
        }
    }
}

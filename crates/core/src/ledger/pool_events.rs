//! Applies the events of pools: they are registered, allocate and free parts, and report what they have. See `undecided.rs` for how the
//! ledger finds the owner of a block of the driver.

use super::{
    Ledger,
    groups::AllocGroup,
    live::{BLOCK_PARTS, Entry},
    meters::Meter,
    observer::{BlockChangeKind, Observer},
    pools::{KnownPool, Range, UNDECIDED, WrongCalls},
    scope::ScopeStart,
    thread::Thread,
};
use crate::model::{Bytes, Device, Gauge, Key, MemKind, PoolId, Tag, ThreadId};

/// 64 TiB, more than any device has. Calls with a size of this or more count as wrong and their sizes are ignored, because sums
/// with them may not fit into 63 bits.
pub(super) const LARGEST: u64 = 1 << 46;

/// A lost event cannot explain a wrong call of this kind.
pub(super) const SURE: u64 = u64::MAX;

impl Ledger {
    /// Registers a pool on a device. The caller then calls [`learn_blocks`](Self::learn_blocks) for each part of the blocks.
    pub fn register_pool(&mut self, pool: PoolId, device: Device, number: u64) {
        self.sums.flush();
        self.pools.register(pool, device, number);
        self.update_fast_path();
        let index = self.sums.meters.index(device, Gauge::Exact);
        let Meter { level, driver, .. } = &mut self.sums.meters.0[usize::from(index)];
        if driver.is_none() {
            // Until now both views were the same, with their peaks.
            let mut view = level.clone();
            for scope in self.places.scopes.values_mut().filter(|scope| scope.exact_meter == index) {
                let ScopeStart { peak, device_in_use, device_peak, .. } = scope.start;
                if scope.account.is_none() && scope.spec.gauge == Gauge::Exact {
                    view.peaks.close(peak);
                }
                scope.start.driver = Some((device_in_use, device_peak));
            }
            *driver = Some(view);
        }
        // The next allocation of each thread finds out that there is a pool.
        self.places.threads.iter_mut().for_each(Thread::forget_latest);
    }

    /// Stores the address ranges of the driver's blocks, for one part of the blocks, of [`BLOCK_PARTS`]. No
    /// block moves to a part that was read before.
    pub fn learn_blocks(&mut self, device: Device, part: usize) {
        let meter = self.sums.meters.index(device, Gauge::Exact);
        let Self { live, sums, pools, .. } = self;
        for (key, entry) in live.part(part) {
            let group = sums.groups.get(entry.group());
            let is_block = group.meter == meter && group.kind.is_on_device() && group.kind != MemKind::Part;
            // If the device already has another pool, the owner of the block may be known.
            if is_block && !pools.ranges.contains_key(&key.get()) {
                pools.insert_range(key, entry.bytes, group.pool);
            }
        }
    }

    /// Frees the parts of a pool, in one part of the blocks, of [`BLOCK_PARTS`].
    pub fn empty_pool(&mut self, pool: PoolId, part: usize) {
        self.empty_pool_observed(pool, part, &mut ());
    }

    pub(super) fn empty_pool_observed<O: Observer>(&mut self, pool: PoolId, part: usize, observer: &mut O) {
        if let Some(of) = self.pools.get_mut(pool).filter(|_| part == 0) {
            of.reserved = None;
            let device = of.device;
            self.decide_for_program(None, |of| of.device == device, observer);
        }
        let groups = &self.sums.groups;
        let is_part = |group: &AllocGroup| group.pool == pool && group.kind == MemKind::Part;
        for (key, entry) in self.live.drain(part, |entry| is_part(groups.get(entry.group()))) {
            self.sums.remove_without_free(&entry);
            self.sums.notify(BlockChangeKind::Freed, key, &entry, observer);
        }
    }

    /// Applies the allocation of a part that is in the same block as the last part and that differs from the latest events only
    /// in its key and size. If it differs in anything else, this returns `false` and changes nothing, and the caller calls
    /// [`part`](Self::part).
    #[inline]
    pub fn part_like_latest(&mut self, key: Key, bytes: Bytes, tag: Tag, number: u64, thread: ThreadId) -> bool {
        self.has_fast_parts()
            && self.pools.is_in_latest(key.address(), bytes, PoolId(tag.context()))
            && self.live.has_room_in_front(key)
            && !self.live.is_in_shard(key)
            && self.alloc_in_front(key, bytes, tag, number, thread)
    }

    /// Applies the allocation of a part. Does nothing if its pool is not registered: a recording that started later contains only
    /// the driver's blocks and would count this memory twice.
    pub fn part(&mut self, key: Key, bytes: Bytes, tag: Tag, number: u64, thread: ThreadId) {
        self.part_observed(key, bytes, tag, number, thread, &mut ());
    }

    pub(super) fn part_observed<O: Observer>(
        &mut self,
        key: Key,
        bytes: Bytes,
        tag: Tag,
        number: u64,
        thread: ThreadId,
        observer: &mut O,
    ) {
        let pool = PoolId(tag.context());
        if self.pools.get_mut(pool).is_none() {
            return;
        }
        if bytes.get() >= LARGEST {
            return self.wrong_call(pool, SURE, |wrong| &mut wrong.outside);
        }
        self.find_block_of(key, bytes, pool, number, observer);
        if self.pools.has_undecided() {
            self.decide_before(thread, key, Some(tag.device()), true, observer);
        }
        if let Some(before) = self.live.remove(key) {
            self.wrong_call(pool, before.number(), |wrong| &mut wrong.doubled);
            self.sums.remove_without_free(&before);
            self.sums.notify(BlockChangeKind::FreeMissed, key, &before, observer);
        }
        self.alloc_observed(key, bytes, tag, number, thread, observer);
    }

    /// Ends the parts that the driver's new block is over: the block that they were in was freed, and its pool has not reported
    /// that they are gone. This reads all live blocks, and then forgets the ranges without parts. Therefore it is done at most
    /// once after a pool has freed blocks, unless parts are left.
    #[cold]
    pub(super) fn end_left_parts<O: Observer>(&mut self, block: Key, bytes: Bytes, observer: &mut O) {
        /// Other threads wait while all blocks are read. If there are more parts, none are ended.
        const MOST: u64 = 1 << 16;
        let (start, end) = (block.get(), block.get().saturating_add(bytes.get()));
        if !block.is_address() || !self.pools.is_over_left(start, end) {
            return;
        }
        self.sums.flush();
        let Self { live, sums, pools, .. } = self;
        if sums.pools.parts() > MOST {
            return pools.left.clear();
        }
        let parts = (0..BLOCK_PARTS).flat_map(|part| live.part(part)).filter(|(key, _)| key.is_part());
        let left = parts.filter_map(|(key, entry)| Some((key, *entry, *pools.left_of(key)?)));
        let (ended, kept): (Vec<_>, Vec<_>) = left.partition(|(.., range)| range.start < end && start < range.end);
        pools.left = kept.into_iter().map(|(.., range)| (range.start, range)).collect();
        for (key, before, range) in ended {
            self.live.remove(key);
            self.wrong_call(range.pool, before.number(), |wrong| &mut wrong.doubled);
            self.sums.remove_without_free(&before);
            self.sums.notify(BlockChangeKind::FreeMissed, key, &before, observer);
        }
    }

    /// A part was freed that is not live.
    #[cold]
    pub(super) fn unknown_part(&mut self, key: Key) {
        let since = self.pools.get_mut(key.pool()).map_or(0, |pool| pool.since);
        self.wrong_call(key.pool(), since, |wrong| &mut wrong.unknown);
    }

    /// Notes that events before the one with this number are missing, other than frees of live blocks.
    pub(crate) fn lacks_events_before(&mut self, number: u64) {
        self.pools.complete_from = number;
    }

    /// Counts a call that contradicts the events since the one with the number `since`. If some of these were lost, the call may
    /// be right and is not counted.
    pub(super) fn wrong_call(&mut self, pool: PoolId, since: u64, which: impl Fn(&mut WrongCalls) -> &mut u64) {
        if since < self.pools.complete_from {
            return;
        }
        if let Some(pool) = self.pools.get_mut(pool) {
            *which(&mut pool.wrong) += 1;
            self.sums.counts.lost += 1;
        }
    }

    /// Finds the block that contains a new part. If the block does not belong to a pool yet, it now belongs to this pool.
    fn find_block_of<O: Observer>(&mut self, key: Key, bytes: Bytes, pool: PoolId, number: u64, observer: &mut O) {
        let address = key.address();
        if self.pools.is_in_latest(address, bytes, pool) {
            return;
        }
        let found = self.pools.ranges.range(..=address).next_back().map(|(_, range)| *range);
        let inside = found.filter(|range| address < range.end && bytes.get() <= range.end - address);
        let Some(of) = self.pools.get_mut(pool) else { return };
        match inside {
            Some(range) if range.pool == pool => self.pools.latest = range,
            Some(range) if range.pool == PoolId::NONE || range.pool == UNDECIDED => {
                let block = Key::from_raw(range.start);
                let since = of.since;
                let was_program = range.pool == PoolId::NONE
                    && self.live.get(block).is_some_and(|entry| entry.number() > since && entry.number() < number);
                if was_program && range.was_early {
                    of.read_early += 1;
                } else if was_program {
                    self.wrong_call(pool, since, |wrong| &mut wrong.late);
                }
                self.decide(block, pool, observer);
                self.pools.latest = Range { pool, ..range };
            }
            _ if of.has_handles => {}
            // The block may be older than the pool.
            _ => self.wrong_call(pool, 0, |wrong| &mut wrong.outside),
        }
    }

    /// Handles a driver block that is live again because its free failed.
    pub(super) fn block_is_back(&mut self, key: Key, entry: &Entry) {
        let AllocGroup { meter, kind, pool, .. } = *self.sums.groups.get(entry.group());
        if kind.is_on_device() && self.sums.meters.0[usize::from(meter)].driver.is_some() {
            self.pools.insert_range(key, entry.bytes, pool);
            self.pools.left.remove(&key.get());
        }
    }

    /// Returns all registered pools, and closed pools that still have blocks.
    pub fn pools(&mut self) -> Vec<KnownPool> {
        self.sums.flush();
        self.pools.known(&self.sums.pools)
    }

    /// Returns the address ranges of the blocks of pools. Blocks that are known by their handles are not included.
    pub fn pool_blocks(&self) -> Vec<(PoolId, std::ops::Range<u64>)> {
        self.pools.blocks().map(|block| (block.pool, block.start..block.end)).collect()
    }

    /// Returns the bytes in use by the driver's blocks on a device with a pool.
    #[cfg(test)]
    pub(super) fn driver_in_use(&mut self, device: Device) -> Option<i64> {
        self.sums().meters.of(device, Gauge::Exact).driver.as_ref().map(|level| level.in_use)
    }
}

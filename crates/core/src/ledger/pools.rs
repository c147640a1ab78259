//! Pools: a second level of memory. A pool takes blocks from the driver and hands out parts of them. A device with a registered
//! pool has two simultaneous views. The *program's view* contains the parts of pools and the driver blocks that belong to no
//! pool. The *driver's view* contains all driver blocks. Without a pool the two are the same, and only the program's view is
//! kept.
//!
//! A part is a block of kind [`MemKind::Part`] whose group has the id of its pool. A driver block belongs to a pool if its group
//! has the id of that pool; then only the driver's view counts the block.

use std::collections::BTreeMap;

use super::{
    groups::AllocGroup,
    pool_sums::{PoolSum, PoolSums},
    sums::Sums,
};
use crate::model::{Bytes, Device, Key, MemKind, PoolId, ThreadId};

/// The pool of a block whose owner is not yet known.
pub(super) const UNDECIDED: PoolId = PoolId(u8::MAX);

/// All pools, and the address ranges of the driver's blocks on devices with pools.
#[derive(Debug, Default)]
pub(super) struct Pools {
    /// The range in which the last part was found.
    pub(super) latest: Range,
    /// All pools, indexed by pool id. Id 0 is not a pool.
    all: Vec<Option<PoolState>>,
    /// The driver's blocks, by their start address.
    pub(super) ranges: BTreeMap<u64, Range>,
    /// The ranges of pools' blocks that were freed, by their start address. Parts may still be live there: a pool may report
    /// after the free of its block that its parts are gone, or that it is empty.
    pub(super) left: BTreeMap<u64, Range>,
    /// The undecided blocks, in order of allocation.
    pub(super) undecided: Vec<Undecided>,
    /// No event from this number on was lost.
    pub(super) complete_from: u64,
}

/// The address range of a driver block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Range {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) pool: PoolId,
    /// True if the block counted for the program before its first part, because another thread used the device in between.
    pub(super) was_early: bool,
}

/// One pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct PoolState {
    pub(super) device: Device,
    /// The number of the event that registered it.
    pub(super) since: u64,
    pub(super) reserved: Option<Bytes>,
    /// True if some of the pool's blocks are known by their handles, so that the addresses of its parts cannot be checked.
    pub(super) has_handles: bool,
    pub(super) wrong: WrongCalls,
    pub(super) read_early: u64,
}

/// The numbers of wrong calls to a pool. Each wrong call also counts as a lost event. Calls that lost events may explain are not
/// included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrongCalls {
    /// A part was freed that is not live.
    pub unknown: u64,
    /// A part was allocated at the address of a live part, or the driver allocated a block over a part whose block was freed
    /// before. The older part is then treated as freed.
    pub doubled: u64,
    /// A part is not inside a driver block, or is inside a block of another pool. Such a part still counts. Calls with sizes
    /// larger than any device are also counted here, but their sizes are ignored.
    pub outside: u64,
    /// A driver block was counted for the program before its first part showed that it belongs to the pool. Peaks from that time
    /// include the block.
    pub late: u64,
    /// The pool reported less memory than the sum of its parts.
    pub below: u64,
}

/// A registered pool, as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownPool {
    /// Its id.
    pub pool: PoolId,
    /// Its device.
    pub device: Device,
    /// The number of its live parts.
    pub parts: u64,
    /// The sum of their sizes.
    pub part_bytes: Bytes,
    /// The memory that the pool holds from the driver, as the pool reported it. If it reported nothing, more than its blocks or
    /// less than its parts, this is the sum of its blocks.
    pub reserved: Bytes,
    /// The amount that the pool reported. If it reported nothing, this is the sum of its blocks.
    pub reported: Bytes,
    /// The sum of its driver blocks.
    pub block_bytes: Bytes,
    /// Its wrong calls.
    pub wrong: WrongCalls,
    /// Blocks that were counted for the program until their first part, because of another thread's event in between. Peaks from
    /// that time include them.
    pub read_early: u64,
}

/// A driver block whose owner is not yet known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Undecided {
    /// The thread that allocated it.
    pub(super) thread: ThreadId,
    pub(super) key: Key,
    pub(super) device: Device,
}

impl KnownPool {
    /// Returns the unused bytes of the pool. `None` if its parts exceed its memory, so that one of the two numbers is wrong.
    pub fn unused(&self) -> Option<Bytes> {
        self.reserved.checked_sub(self.part_bytes)
    }
}

impl AllocGroup {
    /// Returns whether the program's view includes the blocks of this group.
    pub fn is_in_program(&self) -> bool {
        self.kind.is_on_device() && !self.is_of_pool_only()
    }

    /// Returns whether the blocks are parts of a pool, or driver blocks that are known to belong to one.
    pub(super) fn has_pool(&self) -> bool {
        is_known(self.pool)
    }

    /// Returns whether these are driver blocks that belong to a pool or whose owner is not yet known.
    pub(super) fn is_of_pool_only(&self) -> bool {
        self.pool != PoolId::NONE && self.kind != MemKind::Part
    }
}

/// Returns whether this is a pool, and not that of a block that belongs to none or is undecided.
fn is_known(pool: PoolId) -> bool {
    pool != PoolId::NONE && pool != UNDECIDED
}

impl Pools {
    /// Adds a pool. An older one with its id is gone.
    pub(super) fn register(&mut self, pool: PoolId, device: Device, since: u64) {
        let at = usize::from(pool.0);
        if at >= self.all.len() {
            self.all.resize(at + 1, None);
        }
        let wrong = WrongCalls::default();
        self.all[at] = Some(PoolState { device, since, reserved: None, has_handles: false, wrong, read_early: 0 });
    }

    /// Returns whether no pool was ever registered.
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn get_mut(&mut self, pool: PoolId) -> Option<&mut PoolState> {
        self.all.get_mut(usize::from(pool.0))?.as_mut()
    }

    /// Returns all registered pools, and closed pools that still have blocks.
    pub(super) fn known(&self, sums: &PoolSums) -> Vec<KnownPool> {
        let known = |(id, pool): (u8, &Option<PoolState>)| {
            let (pool, PoolState { device, reserved, wrong, read_early, .. }) = (PoolId(id), (*pool)?);
            let PoolSum { parts, part_bytes, block_bytes } = sums.of(pool);
            let [part_bytes, block_bytes] = [part_bytes, block_bytes].map(Bytes::new);
            let reported = reserved.unwrap_or(block_bytes);
            let reserved = if (part_bytes..=block_bytes).contains(&reported) { reported } else { block_bytes };
            Some(KnownPool { pool, device, parts, part_bytes, reserved, reported, block_bytes, wrong, read_early })
        };
        (0..).zip(&self.all).filter_map(known).collect()
    }

    /// Returns the address ranges of the blocks of pools.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &Range> {
        self.ranges.values().filter(|block| is_known(block.pool))
    }

    /// Returns whether any block is undecided.
    #[inline]
    pub(super) fn has_undecided(&self) -> bool {
        !self.undecided.is_empty()
    }

    /// Returns whether the part is in the block in which the last part was found.
    #[inline]
    pub(super) fn is_in_latest(&self, address: u64, bytes: Bytes, pool: PoolId) -> bool {
        let Range { start, end, pool: of, .. } = self.latest;
        start <= address && bytes.get() <= end.wrapping_sub(address) && address < end && of == pool
    }

    /// Returns whether there are many undecided blocks. A thread that allocates many blocks in a row does not do so for a pool.
    pub(super) fn has_many_undecided(&self) -> bool {
        self.undecided.len() >= 16
    }

    pub(super) fn insert_range(&mut self, key: Key, bytes: Bytes, pool: PoolId) {
        let start = key.get();
        if key.is_address() {
            self.ranges.insert(start, Range { start, end: start.saturating_add(bytes.get()), pool, was_early: false });
        }
    }

    /// Handles a driver block that is gone.
    #[inline]
    pub(super) fn remove_range(&mut self, key: Key, sums: &mut Sums) {
        if !self.is_empty() {
            self.remove_range_of(key, sums);
        }
    }

    fn remove_range_of(&mut self, key: Key, sums: &mut Sums) {
        if key.is_address() {
            // The latest parts may not be counted yet.
            sums.flush();
            let removed = self.ranges.remove(&key.get());
            self.latest = Range::default();
            if let Some(range) = removed.filter(|range| range.start < range.end)
                && sums.pools.of(range.pool).parts > 0
            {
                self.left.insert(range.start, range);
            }
        }
    }

    /// Handles a driver block whose size changed.
    pub(super) fn resize_range(&mut self, key: Key, bytes: Bytes) {
        if key.is_address()
            && let Some(range) = self.ranges.get_mut(&key.get())
        {
            range.end = range.start.saturating_add(bytes.get());
            self.latest = Range::default();
        }
    }

    /// Returns whether a driver block in this range would be over one of the ranges that were left.
    pub(super) fn is_over_left(&self, start: u64, end: u64) -> bool {
        let before = self.left.range(..end).next_back();
        start < end && before.is_some_and(|(_, range)| start < range.end)
    }

    /// Returns the range that was left, if it contains this part.
    pub(super) fn left_of(&self, part: Key) -> Option<&Range> {
        let (_, range) = self.left.range(..=part.address()).next_back()?;
        (part.address() < range.end && range.pool == part.pool()).then_some(range)
    }
}

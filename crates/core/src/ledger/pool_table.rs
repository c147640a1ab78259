//! What the ledger keeps of pools; `pools.rs` says what they are.

use std::collections::BTreeMap;

use super::{delta::GroupDelta, groups::AllocGroup, meters::UsageLevel, stats::add_signed};
use crate::model::{Bytes, Device, Key, MemKind, PoolId, ThreadId};

/// The pool of a block of which it is not known yet to whom it belongs.
pub(super) const UNDECIDED: PoolId = PoolId(u8::MAX);

/// All pools, and where the driver's blocks lie on devices with pools.
#[derive(Debug, Default)]
pub(super) struct Pools {
    /// Where the newest part was found.
    pub(super) newest: Range,
    /// By the number of the pool. Number 0 is none.
    pub(super) all: Vec<Pool>,
    /// The driver's blocks, by the address at which they begin.
    pub(super) ranges: BTreeMap<u64, Range>,
    /// The undecided blocks, in the order of their allocation.
    pub(super) undecided: Vec<Undecided>,
    /// No event from this number on was lost.
    pub(super) complete_from: u64,
}

/// Where a block of the driver lies.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Range {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) pool: PoolId,
    /// True if the block counted for the program before its first part, because another thread used the device in between.
    pub(super) was_early: bool,
}

/// One pool.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pool {
    pub(super) device: Option<Device>,
    /// The number of the event that registered it.
    pub(super) since: u64,
    pub(super) parts: u64,
    pub(super) part_bytes: u64,
    pub(super) block_bytes: u64,
    pub(super) reserved: Option<Bytes>,
    /// Some of its blocks are known by their handles, so the addresses of its parts cannot be checked.
    pub(super) has_handles: bool,
    pub(super) wrong: WrongCalls,
    pub(super) read_early: u64,
}

/// How often calls of a pool were wrong. Each of them also counts as lost. A call that lost events may explain is not among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrongCalls {
    /// A part was freed that is not live.
    pub unknown: u64,
    /// A part was allocated at the address of a live part, which is then taken as freed.
    pub doubled: u64,
    /// A part does not lie inside of a block of the driver, or lies in a block of another pool. Such a part counts. Calls with sizes above any
    /// device are here, too, and their sizes do not count.
    pub outside: u64,
    /// A block of the driver was counted for the program before its first part showed that it is the pool's. Peaks of that
    /// time have it.
    pub late: u64,
    /// The pool reported less memory than its parts have.
    pub below: u64,
}

/// A registered pool, as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownPool {
    /// Its number.
    pub pool: PoolId,
    /// Its device.
    pub device: Device,
    /// The number of its live parts.
    pub parts: u64,
    /// The sum of their sizes.
    pub part_bytes: Bytes,
    /// The memory that it has from the driver: the amount that it reported. If it reported nothing, or more than its blocks, or less than its
    /// parts, this is the sum of its blocks.
    pub reserved: Bytes,
    /// The amount that it reported. If it reported nothing, this is the sum of its blocks.
    pub reported: Bytes,
    /// The sum of its blocks of the driver.
    pub block_bytes: Bytes,
    /// Its wrong calls.
    pub wrong: WrongCalls,
    /// Blocks that were counted for the program until their first part, because of another thread's event in between. Peaks of that time
    /// have them.
    pub read_early: u64,
}

/// A block of the driver of which it is not known yet to whom it belongs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Undecided {
    /// The thread that allocated it.
    pub(super) thread: ThreadId,
    pub(super) key: Key,
    pub(super) device: Device,
}

impl KnownPool {
    /// What it keeps unused. `None` if its parts are more than it has, so that one of the two is wrong.
    pub fn unused(&self) -> Option<Bytes> {
        self.reserved.checked_sub(self.part_bytes)
    }
}

impl AllocGroup {
    /// The program's view has its blocks.
    pub fn is_in_program(&self) -> bool {
        self.kind.is_on_device() && !self.is_of_pool_only()
    }

    /// Its blocks are the driver's and belong to a pool, or it is not known yet to whom.
    pub(super) fn is_of_pool_only(&self) -> bool {
        self.pool != PoolId::NONE && self.kind != MemKind::Part
    }
}

impl Pools {
    pub(super) fn get_mut(&mut self, pool: PoolId) -> Option<&mut Pool> {
        self.all.get_mut(usize::from(pool.0)).filter(|pool| pool.device.is_some())
    }

    /// The part lies in the block in which the newest part was found.
    #[inline]
    pub(super) fn is_in_newest(&self, address: u64, bytes: Bytes, pool: PoolId) -> bool {
        let Range { start, end, pool: of, .. } = self.newest;
        start <= address && bytes.get() <= end.wrapping_sub(address) && address < end && of == pool
    }

    /// A thread that allocates many blocks in a row does not do it for a pool.
    pub(super) fn has_many_undecided(&self) -> bool {
        self.undecided.len() >= 16
    }

    pub(super) fn insert_range(&mut self, key: Key, bytes: Bytes, pool: PoolId) {
        let start = key.get();
        if key.is_address() {
            self.ranges.insert(start, Range { start, end: start.saturating_add(bytes.get()), pool, was_early: false });
        }
    }

    pub(super) fn remove_range(&mut self, key: Key) {
        if key.is_address() {
            self.ranges.remove(&key.get());
            self.newest = Range::default();
        }
    }

    /// Adds a delta of a group to its pool.
    fn count(&mut self, group: &AllocGroup, delta: &GroupDelta) {
        let Some(pool) = self.get_mut(group.pool) else { return };
        if group.kind == MemKind::Part {
            pool.parts = add_signed(pool.parts, delta.blocks.net);
            pool.part_bytes = add_signed(pool.part_bytes, delta.bytes.net);
        } else {
            pool.block_bytes = add_signed(pool.block_bytes, delta.bytes.net);
        }
    }
}

/// Applies the delta of a group to the driver's view and to its pool. Returns whether the program's view has it, too.
#[cold]
pub(super) fn count_for_views(
    driver: &mut UsageLevel,
    pools: &mut Pools,
    group: &AllocGroup,
    delta: &GroupDelta,
) -> bool {
    if group.kind != MemKind::Part {
        driver.apply(driver.in_use.saturating_add(delta.bytes.high), delta.bytes.net);
    }
    pools.count(group, delta);
    group.is_in_program()
}

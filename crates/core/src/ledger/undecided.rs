//! Decides whether a driver block belongs to a pool or to the program, on a device with a pool.
//!
//! The driver does not report for whom it allocates. Therefore a new block is *undecided* until the next event of its thread. If
//! that event is a part inside the block, or a pool that reports as much new memory, the block belongs to the pool. After any
//! other event it belongs to the program. This way the growth of a pool is never a peak of the program, and no peak has to be
//! lowered later.
//!
//! An allocation or a free by another thread on the device, or a query by any thread, also gives the block to the program,
//! because they must not miss a block whose thread does nothing more. If the first part comes after that, the block moves to the
//! pool. No call was wrong, but peaks from that time include the block, so the ledger counts such blocks. If a pool reports
//! everything under one lock, no event of another of its threads comes between a block and its first part.

use std::{mem, ops::Range};

use super::{
    Ledger,
    groups::AllocGroup,
    live::Entry,
    observer::{BlockChangeKind, Observer},
    pool_events::{LARGEST, SURE},
    pool_sums::PoolSum,
    pools::{UNDECIDED, Undecided},
    sums::Sums,
};
use crate::model::{Bytes, Device, EventKind, Key, MemKind, PoolId, Tag, ThreadId};

impl Ledger {
    /// Returns whether any block is undecided.
    pub fn has_undecided(&self) -> bool {
        self.pools.has_undecided()
    }

    /// Handles a pool's report of how much memory it has from the driver. The ledger looks for undecided blocks of this thread,
    /// allocated one after the other, whose sum is exactly the amount that the pool's known blocks lack, or exactly its growth
    /// since its last report. (If some blocks of the pool were not seen, that amount always includes them.) The latest such
    /// blocks become the pool's, and the other undecided blocks of the thread become the program's. Without such blocks, nothing
    /// is decided: a smaller block may be the program's.
    pub(super) fn pool_reserved<O: Observer>(
        &mut self,
        pool: PoolId,
        bytes: Bytes,
        thread: ThreadId,
        observer: &mut O,
    ) {
        if bytes.get() >= LARGEST {
            return self.wrong_call(pool, SURE, |wrong| &mut wrong.outside);
        }
        self.sums.flush();
        let PoolSum { part_bytes, block_bytes, .. } = self.sums.pools.of(pool);
        let Some(of) = self.pools.get_mut(pool) else { return };
        let (since, device, before) = (of.since, of.device, of.reserved.replace(bytes));
        if bytes.get() < part_bytes {
            self.wrong_call(pool, since, |wrong| &mut wrong.below);
        }
        let mine = self.undecided_of(thread, device);
        let known = [Some(block_bytes), before.map(Bytes::get)].into_iter().flatten();
        let mut missing = known.map(|known| bytes.get().saturating_sub(known));
        let Some(taken) = missing.find_map(|missing| exactly(&mine, missing)) else { return };
        let taken = &mine[taken];
        if let Some(of) = self.pools.get_mut(pool) {
            of.has_handles |= taken.iter().any(|(key, _)| !key.is_address());
        }
        for (key, _) in taken {
            self.decide(*key, pool, observer);
        }
        self.decide_for_program(Some(thread), |of| of.thread == thread, observer);
    }

    /// Returns the undecided blocks of a thread on a device and their sizes, the latest first.
    fn undecided_of(&self, thread: ThreadId, device: Device) -> Vec<(Key, u64)> {
        let mine = self.pools.undecided.iter().rev().filter(|of| of.thread == thread && of.device == device);
        mine.filter_map(|of| Some((of.key, self.live.get(of.key)?.bytes.get()))).collect()
    }

    /// Adds a new block on a device with a pool to the undecided blocks.
    #[cold]
    pub(super) fn add_undecided<O: Observer>(&mut self, key: Key, entry: &Entry, thread: ThreadId, observer: &mut O) {
        // Until the block is decided, it is not counted as an allocation, which lowers the number of events by two. This adds
        // them.
        self.sums.counts.events = self.sums.counts.events.wrapping_add(2);
        self.sums.notify(BlockChangeKind::Allocated, key, entry, observer);
        self.end_left_parts(key, entry.bytes, observer);
        self.pools.insert_range(key, entry.bytes, UNDECIDED);
        self.pools.undecided.push(Undecided { thread, key, device: self.sums.device_of(entry) });
        self.places.threads.get(thread).forget_latest();
    }

    /// Decides blocks before this thread allocates or frees a block with this key on this device: the undecided blocks of other
    /// threads there become the program's, and the thread's own ones too if `has_own` is true.
    #[cold]
    pub(super) fn decide_before<O: Observer>(
        &mut self,
        thread: ThreadId,
        key: Key,
        device: Option<Device>,
        has_own: bool,
        observer: &mut O,
    ) {
        let is_decided =
            |of: &Undecided| of.key == key || if of.thread == thread { has_own } else { Some(of.device) == device };
        self.decide_for_program(Some(thread), is_decided, observer);
    }

    /// Gives the undecided blocks for which `is_decided` is true to the program, because of an event of this thread.
    #[cold]
    pub(super) fn decide_for_program<O: Observer>(
        &mut self,
        thread: Option<ThreadId>,
        is_decided: impl Fn(&Undecided) -> bool,
        observer: &mut O,
    ) {
        let undecided = mem::take(&mut self.pools.undecided);
        let (decided, rest): (Vec<_>, Vec<_>) = undecided.into_iter().partition(is_decided);
        self.pools.undecided = rest;
        for Undecided { thread: by, key, .. } in decided {
            if thread != Some(by)
                && key.is_address()
                && let Some(range) = self.pools.ranges.get_mut(&key.get())
            {
                range.was_early = true;
            }
            self.decide(key, PoolId::NONE, observer);
            if !self.watches.is_empty()
                && let Some(entry) = self.live.get(key).copied()
            {
                self.notice(&entry, false, by);
            }
        }
    }

    /// Decides that a driver block belongs to this pool, or to none.
    pub(super) fn decide<O: Observer>(&mut self, key: Key, pool: PoolId, observer: &mut O) {
        self.pools.undecided.retain(|of| of.key != key);
        let Some(before) = self.live.get(key).copied() else { return };
        let group = *self.sums.groups.get(before.group());
        self.sums.flush();
        let now = before.with_group(self.sums.group_number(AllocGroup { pool, ..group }, &self.places.threads));
        if let Some(entry) = self.live.get_mut(key) {
            *entry = now;
        }
        let is_new = group.pool == UNDECIDED;
        self.sums.move_block(&before, &now, is_new);
        if is_new {
            self.sums.counts.events = self.sums.counts.events.wrapping_sub(2);
        }
        if key.is_address()
            && let Some(range) = self.pools.ranges.get_mut(&key.get())
        {
            range.pool = pool;
        }
        let kind = if pool == PoolId::NONE { BlockChangeKind::GivenToProgram } else { BlockChangeKind::TakenByPool };
        self.sums.notify(kind, key, &now, observer);
    }

    /// Decides the block of an event from a shortened recording, which may lack the next event of the thread. If the event
    /// allocated a driver block, the block belongs to this pool, or to none.
    pub fn decide_shortened<O: Observer>(&mut self, event: &EventKind, pool: PoolId, observer: &mut O) {
        match event {
            EventKind::Alloc { key, block } if block.kind != MemKind::Part => {
                let Some(now) = self.live.get(*key).map(|entry| self.sums.groups.get(entry.group()).pool) else {
                    return;
                };
                let of = self.pools.get_mut(pool).filter(|of| of.device == block.device);
                if now == pool || of.is_none() && pool != PoolId::NONE {
                    return;
                }
                if let Some(of) = of {
                    of.has_handles |= !key.is_address();
                }
                self.decide(*key, pool, observer);
            }
            _ => {}
        }
    }
}

impl Sums {
    /// Returns the pool of a new block: its own pool for a part, and [`UNDECIDED`] for a driver block on a device with a pool.
    /// `meter` is the meter of the device.
    pub(super) fn pool_of_new(&self, tag: Tag, meter: u16) -> PoolId {
        if tag.kind() == MemKind::Part {
            return PoolId(tag.context());
        }
        let has_pool = tag.kind().is_on_device() && self.meters.0[usize::from(meter)].driver.is_some();
        if has_pool { UNDECIDED } else { PoolId::NONE }
    }
}

/// Returns the latest consecutive blocks whose sum is exactly this many bytes, from a list that starts with the latest block.
fn exactly(blocks: &[(Key, u64)], bytes: u64) -> Option<Range<usize>> {
    let row_from = |from: usize| {
        let mut sum = 0_u64;
        let row = blocks[from..].iter().position(|(_, size)| {
            sum = sum.saturating_add(*size);
            sum >= bytes
        })?;
        (sum == bytes).then_some(from..from + row + 1)
    };
    (0..blocks.len()).find_map(row_from)
}

//! To whom a block of the driver belongs, on a device with a pool.
//!
//! The driver does not say for whom it allocates. So a new block is *undecided* until the next event of its thread: a part inside of
//! it, or a pool that reserved as much, makes it the pool's; any other event makes it the program's. So the growth of a pool never is a
//! peak of the program, and no peak has to be lowered later.
//!
//! An allocation or a free of another thread on the device, and a query of any thread, also make it the program's: they must not miss a
//! block whose thread does nothing more. If the first part comes after that, the block is the pool's from then on. No call was wrong, but
//! peaks of that time have the block, so the ledger counts such blocks. If a pool reports everything under one lock, no event of another of
//! its threads comes between a block and its first part.

use std::{mem, ops::Range};

use super::{
    Ledger,
    accounts::Place,
    groups::AllocGroup,
    live::Entry,
    observer::{BlockChangeKind, Observer},
    pool_table::{UNDECIDED, Undecided},
    pools::{LARGEST, SURE},
};
use crate::model::{Bytes, Device, EventKind, Key, MemKind, PoolId, Tag, ThreadId};

impl Ledger {
    /// Some block is undecided.
    #[inline]
    pub(crate) fn has_undecided(&self) -> bool {
        !self.pools.undecided.is_empty()
    }

    /// A pool reports how much it has from the driver. The ledger looks for undecided blocks of this thread, allocated one after the other, whose
    /// sum is exactly what the pool lacks, or exactly its growth since its last report. (If some blocks of the pool were not seen, it always
    /// lacks these.) The newest such blocks become the pool's, and the other undecided blocks of the thread become the program's. Without such
    /// blocks, nothing is decided: a smaller block may be the program's.
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
        self.flush_pending();
        let Some(of) = self.pools.get_mut(pool) else { return };
        let before = of.reserved.replace(bytes);
        let (since, is_below) = (of.since, bytes.get() < of.part_bytes);
        let (device, known) = (of.device, [Some(Bytes::new(of.block_bytes)), before]);
        if is_below {
            self.wrong_call(pool, since, |wrong| &mut wrong.below);
        }
        let mine = self.undecided_of(thread, device);
        let mut missing = known.into_iter().flatten().map(|known| bytes.get().saturating_sub(known.get()));
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

    /// The undecided blocks of a thread on a device and their sizes, the newest first.
    fn undecided_of(&self, thread: ThreadId, device: Option<Device>) -> Vec<(Key, u64)> {
        let mine = self.pools.undecided.iter().rev().filter(|of| of.thread == thread && Some(of.device) == device);
        mine.filter_map(|of| Some((of.key, self.live.get(of.key)?.bytes.get()))).collect()
    }

    pub(super) fn device_of(&self, entry: &Entry) -> Device {
        self.meters.0[usize::from(self.groups.get(entry.group()).meter)].device
    }

    /// A new block on a device with a pool.
    #[cold]
    pub(super) fn add_undecided<O: Observer>(&mut self, key: Key, entry: &Entry, thread: ThreadId, observer: &mut O) {
        // An allocation is two less than these events until the block is decided: it is not counted as an allocation yet.
        self.counts.events = self.counts.events.wrapping_add(2);
        self.tell(BlockChangeKind::Allocated, key, entry, observer);
        self.pools.insert_range(key, entry.bytes, UNDECIDED);
        self.pools.undecided.push(Undecided { thread, key, device: self.device_of(entry) });
        self.thread(thread).forget_newest();
    }

    /// This thread is about to allocate or to free a block with this key on this device. So the undecided blocks of other threads there are the
    /// program's, and also its own ones if `has_own` is true.
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

    /// The undecided blocks for which `is_decided` is true are the program's, because of an event of this thread.
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
            if self.is_watched
                && let Some(entry) = self.live.get(key).copied()
            {
                self.notice(&entry, false, by);
            }
        }
    }

    /// A block of the driver belongs to this pool from now on, or to none.
    pub(super) fn decide<O: Observer>(&mut self, key: Key, pool: PoolId, observer: &mut O) {
        self.pools.undecided.retain(|of| of.key != key);
        let Some(before) = self.live.get(key).copied() else { return };
        let group = *self.groups.get(before.group());
        self.flush_pending();
        let now = before.with_group(self.group_number(AllocGroup { pool, ..group }));
        if let Some(entry) = self.live.get_mut(key) {
            *entry = now;
        }
        self.remove_block(&before, Place::OUTSIDE);
        let is_new = group.pool == UNDECIDED;
        // If the summary was reset after the allocation, the sums of allocations do not have it any more.
        let is_counted = !is_new && before.number() > self.summary_since;
        if is_counted {
            self.pending_of(before.attribution()).take_back(before.bytes.get());
        }
        self.count(&now);
        if is_new || is_counted {
            self.pending.allocated(now.bytes.get());
        }
        if is_new {
            self.counts.events = self.counts.events.wrapping_sub(2);
        }
        if key.is_address()
            && let Some(range) = self.pools.ranges.get_mut(&key.get())
        {
            range.pool = pool;
        }
        let kind = if pool == PoolId::NONE { BlockChangeKind::GivenToProgram } else { BlockChangeKind::TakenByPool };
        self.tell(kind, key, &now, observer);
    }

    /// An event of a shortened recording was applied, which may lack the next event of the thread. If it allocates a block of the driver, the
    /// block belongs to this pool, or to none.
    pub(crate) fn decide_shortened<O: Observer>(&mut self, event: &EventKind, pool: PoolId, observer: &mut O) {
        match event {
            EventKind::Alloc { key, block } if block.kind != MemKind::Part => {
                let Some(now) = self.live.get(*key).map(|entry| self.groups.get(entry.group()).pool) else { return };
                let of = self.pools.get_mut(pool).filter(|of| of.device == Some(block.device));
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

    /// Whether a pool has this as a whole: then only the driver's view counts it. `meter` is that of the device.
    pub(super) fn pool_of_new(&self, tag: Tag, meter: u16) -> PoolId {
        if tag.kind() == MemKind::Part {
            return PoolId(tag.context());
        }
        let has_pool = tag.kind().is_on_device() && self.meters.0[usize::from(meter)].driver.is_some();
        if has_pool { UNDECIDED } else { PoolId::NONE }
    }
}

/// Returns the newest blocks in a row that have exactly these bytes, of a list that begins with the newest one.
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

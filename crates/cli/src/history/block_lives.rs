//! The lives of all blocks, stored in few bytes because a recording may contain millions.
//!
//! A change takes 12 bytes and a block takes 32. The number of bytes that a change adds is not stored: it follows from
//! the sizes of its block.

use std::collections::HashMap;

use gpumem_core::ledger::BlockChangeKind as ChangeKind;

/// A change of the live memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change {
    /// Nanoseconds since the recording started. The time never falls.
    pub(crate) time: u64,
    /// The number of the event.
    pub(crate) number: u64,
    /// The number of bytes by which the live memory grows.
    pub(crate) delta: i64,
    /// The id of the block, see [`Lives::block`].
    pub(crate) block: u32,
    /// The thread that made the change.
    pub(crate) thread: u16,
    pub(crate) kind: ChangeKind,
}

/// The life of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockLife {
    pub(crate) key: u64,
    /// Its size when it was allocated.
    pub(crate) bytes: u64,
    /// The change that allocated it.
    pub(crate) born: u32,
    /// The change that freed it; [`LIVE`] if it is still live.
    pub(crate) died: u32,
    /// The index of its origin in the history.
    pub(crate) origin: u32,
    /// The index of its device in the history.
    pub(crate) device: u16,
}

impl BlockLife {
    /// Returns whether the block was live after this change.
    pub(crate) fn is_live_after(&self, change: u32) -> bool {
        self.born <= change && change < self.died
    }
}

/// The `died` of a block that is still live.
pub(crate) const LIVE: u32 = u32::MAX;

/// The time, the number and the thread of an event.
#[derive(Clone, Copy, Debug)]
pub(super) struct When {
    pub(super) time: u64,
    pub(super) number: u64,
    pub(super) thread: u16,
}

/// The address, the size and the origin of a newly allocated block.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewBlock {
    pub(super) key: u64,
    pub(super) bytes: u64,
    pub(super) origin: u32,
    pub(super) device: u16,
}

/// All changes of the live memory, and all blocks that were ever live, each in order.
#[derive(Debug, Default)]
pub(crate) struct Lives {
    /// The times and the event numbers that the changes of each chunk are relative to.
    chunks: Vec<Chunk>,
    changes: Vec<PackedChange>,
    blocks: Vec<BlockLife>,
    /// How many changes of each kind there are, in the order of [`ChangeKind::ALL`].
    counts: [u64; ChangeKind::ALL.len()],
    /// Blocks that were partly freed, each with the change and the remaining bytes.
    shrunk: HashMap<u32, Vec<(u32, u64)>>,
}

/// A run of consecutive changes.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    /// The first of these changes.
    first: u32,
    time: u64,
    number: u64,
}

#[derive(Clone, Copy, Debug)]
struct PackedChange {
    /// Nanoseconds since the time of its chunk.
    time: u32,
    block: u32,
    thread: u16,
    /// The kind, in the lower 3 bits. The other bits contain the difference between the event number and the number of the
    /// chunk.
    number_and_kind: u16,
}

const KIND_BITS: u32 = 3;

const _: () = assert!(size_of::<PackedChange>() == 12 && size_of::<BlockLife>() == 32);

impl Lives {
    /// Returns the number of changes.
    pub(crate) fn change_count(&self) -> usize {
        self.changes.len()
    }

    /// Returns the last change; `None` if there is none.
    pub(crate) fn last_change(&self) -> Option<u32> {
        u32::try_from(self.changes.len()).unwrap_or(LIVE).checked_sub(1)
    }

    /// Returns the number of changes of this kind.
    pub(crate) fn count_of(&self, kind: ChangeKind) -> u64 {
        self.counts[kind as usize]
    }

    /// Returns the number of blocks that were ever live.
    pub(crate) fn block_count(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn block(&self, number: u32) -> BlockLife {
        self.blocks[number as usize]
    }

    /// Returns all blocks with their ids.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (u32, BlockLife)> {
        let end = u32::try_from(self.blocks.len()).unwrap_or(LIVE);
        (0..end).map(|number| (number, self.block(number)))
    }

    /// Returns the blocks that were allocated up to this change, with their ids.
    pub(crate) fn born_until(&self, change: u32) -> impl Iterator<Item = (u32, BlockLife)> {
        // Blocks are in the order of their allocations.
        self.blocks().take(self.blocks.partition_point(|block| block.born <= change))
    }

    /// Returns the last block that was allocated up to this change.
    pub(super) fn last_born_until(&self, change: u32) -> Option<BlockLife> {
        let count = self.blocks.partition_point(|block| block.born <= change);
        Some(self.blocks[count.checked_sub(1)?])
    }

    /// Returns the changes in order.
    pub(crate) fn changes(&self) -> impl Iterator<Item = Change> {
        let ends = self.chunks.iter().skip(1).map(|chunk| chunk.first as usize).chain([self.changes.len()]);
        let chunks = self.chunks.iter().zip(ends);
        chunks.flat_map(move |(chunk, end)| (chunk.first as usize..end).map(move |at| self.unpack(at, chunk)))
    }

    /// Returns a change.
    pub(crate) fn change(&self, at: u32) -> Change {
        self.unpack(at as usize, self.chunk_of(at))
    }

    /// Returns the time of a change. `None` if there is no such change, such as the free of a block that is still live.
    pub(crate) fn time_of(&self, change: u32) -> Option<u64> {
        let packed = self.changes.get(change as usize)?;
        Some(self.chunk_of(change).time + u64::from(packed.time))
    }

    /// Returns the index of the first change after this time.
    pub(super) fn first_after_time(&self, time: u64) -> usize {
        self.first_with(|chunk, packed| chunk.time + u64::from(packed.time) > time)
    }

    /// Returns the index of the first change whose event comes after the one with this number.
    pub(super) fn first_after_number(&self, number: u64) -> usize {
        self.first_with(|chunk, packed| chunk.number + u64::from(packed.number_and_kind >> KIND_BITS) > number)
    }

    /// Returns the index of the first change for which `is_after` is true. It must be true for all later changes as
    /// well.
    fn first_with(&self, is_after: impl Fn(&Chunk, &PackedChange) -> bool) -> usize {
        let (mut low, mut high) = (0, self.changes.len());
        while low < high {
            let middle = low.midpoint(high);
            let chunk = self.chunk_of(u32::try_from(middle).unwrap_or(LIVE));
            if is_after(chunk, &self.changes[middle]) { high = middle } else { low = middle + 1 }
        }
        low
    }

    fn chunk_of(&self, change: u32) -> &Chunk {
        &self.chunks[self.chunks.partition_point(|chunk| chunk.first <= change) - 1]
    }

    fn unpack(&self, at: usize, chunk: &Chunk) -> Change {
        let PackedChange { time, block, thread, number_and_kind } = self.changes[at];
        let kind = ChangeKind::ALL[usize::from(number_and_kind & ((1 << KIND_BITS) - 1))];
        let at = u32::try_from(at).unwrap_or(LIVE);
        let before = || self.bytes_before(block, at).cast_signed();
        let delta = match kind.blocks() {
            1.. => self.block(block).bytes.cast_signed(),
            0 => self.bytes_after(block, at).cast_signed() - before(),
            _ => -before(),
        };
        let (time, number) = (chunk.time + u64::from(time), chunk.number + u64::from(number_and_kind >> KIND_BITS));
        Change { time, number, delta, block, thread, kind }
    }

    /// Returns the size of a block after a change.
    pub(crate) fn bytes_after(&self, block: u32, change: u32) -> u64 {
        self.bytes_while(block, |at| at <= change)
    }

    /// Returns the size of a block before a change.
    fn bytes_before(&self, block: u32, change: u32) -> u64 {
        self.bytes_while(block, |at| at < change)
    }

    /// Returns the size of a block after the last change for which `is_before` is true.
    fn bytes_while(&self, block: u32, is_before: impl Fn(u32) -> bool) -> u64 {
        let shrunk = if self.shrunk.is_empty() { None } else { self.shrunk.get(&block) };
        let last = shrunk.and_then(|shrunk| {
            let until = shrunk.partition_point(|(at, _)| is_before(*at));
            Some(shrunk[until.checked_sub(1)?].1)
        });
        last.unwrap_or_else(|| self.block(block).bytes)
    }

    /// Adds a block that is now live. Returns the block's id and the change.
    pub(super) fn start(&mut self, when: When, block: NewBlock, kind: ChangeKind) -> (u32, u32) {
        let number = u32::try_from(self.blocks.len()).unwrap_or(LIVE);
        let born = self.push(when, number, kind);
        let NewBlock { key, bytes, origin, device } = block;
        self.blocks.push(BlockLife { key, bytes, born, died: LIVE, origin, device });
        (number, born)
    }

    /// Ends the life of a block. Returns the change.
    pub(super) fn end(&mut self, when: When, block: u32, kind: ChangeKind) -> u32 {
        let died = self.push(when, block, kind);
        self.blocks[block as usize].died = died;
        died
    }

    /// Shrinks a block to the bytes that remain. Returns the change.
    pub(super) fn shrink(&mut self, when: When, block: u32, left: u64) -> u32 {
        let at = self.push(when, block, ChangeKind::Shrunk);
        self.shrunk.entry(block).or_default().push((at, left));
        at
    }

    fn push(&mut self, When { time, number, thread }: When, block: u32, kind: ChangeKind) -> u32 {
        let at = u32::try_from(self.changes.len()).unwrap_or(LIVE);
        let since = |chunk: &Chunk| {
            let time = u32::try_from(time.checked_sub(chunk.time)?).ok()?;
            let number = u16::try_from(number.checked_sub(chunk.number)?).ok()?;
            (number < 1 << (u16::BITS - KIND_BITS)).then_some((time, number))
        };
        let (time, number) = self.chunks.last().and_then(since).unwrap_or_else(|| {
            self.chunks.push(Chunk { first: at, time, number });
            (0, 0)
        });
        self.counts[kind as usize] += 1;
        let number_and_kind = number << KIND_BITS | kind as u16;
        self.changes.push(PackedChange { time, block, thread, number_and_kind });
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_comes_out_as_it_went_in() {
        let mut lives = Lives::default();
        let steps = [0, 1, 5, u64::from(u32::MAX) + 7, 3, 1 << 40, 0];
        let (mut time, mut number, mut expected) = (0, 0, Vec::new());
        for (at, step) in (0_u64..).zip(steps.into_iter().cycle().take(20_000)) {
            (time, number) = (time + step, number + 1 + step % 9000);
            let when = When { time, number, thread: u16::try_from(at % 60_000).unwrap() };
            let block = NewBlock { key: u64::MAX - at, bytes: (1 << 46) - at, origin: u32::MAX, device: 511 };
            let (block, change) = lives.start(when, block, ChangeKind::Allocated);
            expected.push((change, block, time, number, (1_i64 << 46) - at.cast_signed()));
            if at % 3 == 0 {
                let change = lives.shrink(when, block, 7);
                expected.push((change, block, time, number, 7 - (1_i64 << 46) + at.cast_signed()));
                let change = lives.end(when, block, ChangeKind::RemovedWithContext);
                expected.push((change, block, time, number, -7));
            }
        }
        let known = |(at, change): (u32, Change)| (at, change.block, change.time, change.number, change.delta);
        assert_eq!((0..).zip(lives.changes()).map(known).collect::<Vec<_>>(), expected);
        for (at, block, time, number, _) in expected.iter().copied().step_by(97) {
            assert_eq!(lives.time_of(at), Some(time));
            assert_eq!(known((at, lives.change(at))).2, time);
            let BlockLife { key, bytes, born, died, device, origin } = lives.block(block);
            let gone = if block % 3 == 0 { born + 2 } else { LIVE };
            assert_eq!((key, bytes, died), (u64::MAX - u64::from(block), (1 << 46) - u64::from(block), gone));
            assert_eq!((device, origin), (511, u32::MAX));
            let later = expected.iter().position(|known| known.2 > time);
            assert_eq!(lives.first_after_time(time), later.unwrap_or(expected.len()));
            let later = expected.iter().position(|known| known.3 > number);
            assert_eq!(lives.first_after_number(number), later.unwrap_or(expected.len()));
        }
        assert_eq!((lives.time_of(LIVE), lives.block_count()), (None, 20_000));
        let counts = [ChangeKind::Allocated, ChangeKind::Shrunk, ChangeKind::Freed].map(|kind| lives.count_of(kind));
        assert_eq!(counts, [20_000, 6_667, 0]);
        let middle = lives.block(10_000).born;
        assert_eq!(lives.born_until(middle).count(), 10_001);
    }
}

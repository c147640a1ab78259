//! PyTorch's caching allocator (`c10/cuda/CUDACachingAllocator.cpp`) on one stream: with default settings, or with
//! `expandable_segments:True`.
//!
//! It takes segments from the driver and splits them into blocks. A request gets the smallest free block that is large enough. If
//! the rest of that block is small, the block is not split: then the request takes more than its rounded size, and torch counts
//! the whole block as allocated.
//!
//! With expandable segments there is one range of addresses for small blocks and one for large blocks. Memory is mapped at its end, and
//! wherever a part of it was returned to the driver. Blocks are always split.

use std::collections::BTreeSet;

use super::{
    placement::Placement,
    rounding::{PyTorchRounding, SMALL},
};

/// `kSmallBuffer`: the segments of the small pool.
const SMALL_SEGMENT: u64 = 2 << 20;
/// `kMinLargeAlloc`: requests of the large pool that are smaller than this get a segment of `LARGE_SEGMENT`.
const OWN_SEGMENT: u64 = 10 << 20;
/// `kLargeBuffer`.
const LARGE_SEGMENT: u64 = 20 << 20;
/// `kRoundLarge`: larger segments are multiples of this.
const SEGMENT_ROUNDING: u64 = 2 << 20;
/// The first address is far from 0, and a multiple of each unit.
const FIRST_ADDRESS: u64 = LARGE_SEGMENT << 22;
/// An expandable segment has addresses for 9/8 of the memory of the device, and here for no more than this.
const MOST_ADDRESSES: u64 = 1 << 50;

/// The number of a block.
type BlockId = u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    InUse,
    Free,
    /// Addresses of an expandable segment without memory.
    Unmapped,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    address: u64,
    bytes: u64,
    /// The neighbours in the same segment.
    before: Option<BlockId>,
    after: Option<BlockId>,
    is_small: bool,
    state: State,
}

#[derive(Debug, Default)]
struct Pool {
    /// The free blocks, ordered by size and then by address.
    free: BTreeSet<(u64, u64, BlockId)>,
    /// The ranges without memory, ordered by address.
    unmapped: BTreeSet<(u64, BlockId)>,
}

#[derive(Debug, Default)]
pub(crate) struct Caching {
    blocks: Vec<Block>,
    /// Numbers of `blocks` that are not in use.
    unused: Vec<BlockId>,
    small: Pool,
    large: Pool,
    rounding: PyTorchRounding,
    has_expandable_segments: bool,
    segments_end: u64,
    /// What the driver has for the segments.
    limit: u64,
    reserved: u64,
    /// The most that it was.
    pub(super) reserved_peak: u64,
}

impl Caching {
    pub(super) fn new(limit: u64) -> Self {
        Self { limit, ..Self::default() }
    }

    pub(super) fn expandable(limit: u64) -> Self {
        Self { has_expandable_segments: true, ..Self::new(limit) }
    }

    pub(super) fn alloc(&mut self, bytes: u64) -> Option<Placement> {
        let size = self.rounding.size(bytes)?;
        let is_small = size <= SMALL;
        let block = match self.best_fit(size, is_small) {
            Some(found) => found,
            None => self.add_memory(size, is_small).or_else(|| {
                self.return_free_memory();
                self.add_memory(size, is_small)
            })?,
        };
        self.remove(block);
        let Block { address, bytes: free, .. } = *self.at(block);
        let rest = free - size;
        if self.rounding.splits(size, rest, self.has_expandable_segments) {
            let rest = self.split(block, size);
            self.insert(rest, State::Free);
        }
        let taken = self.at(block);
        taken.state = State::InUse;
        Some(Placement { address, bytes: taken.bytes, block })
    }

    pub(super) fn free(&mut self, block: BlockId) {
        self.join(block, State::Free);
    }

    /// The smallest free block that is large enough. A block that can grow counts as large as it can become.
    fn best_fit(&mut self, size: u64, is_small: bool) -> Option<BlockId> {
        let pool = if is_small { &self.small } else { &self.large };
        let mut fitting = pool.free.range((size, 0, 0)..).map(|(_, _, block)| *block);
        let mut found = fitting.next()?;
        if self.has_expandable_segments {
            let expandable = |block: BlockId| {
                let Block { bytes, after, .. } = self.blocks[block as usize];
                let after = after.map(|after| self.blocks[after as usize]);
                bytes + after.filter(|after| after.state == State::Unmapped).map_or(0, |after| after.bytes)
            };
            for next in fitting {
                if expandable(next) >= expandable(found) {
                    break;
                }
                found = next;
            }
        }
        Some(found)
    }

    /// A free block of this size or more, with memory of the driver. `None` if the driver has not enough.
    fn add_memory(&mut self, size: u64, is_small: bool) -> Option<BlockId> {
        if self.has_expandable_segments { self.expand(size, is_small) } else { self.add_segment(size, is_small) }
    }

    fn add_segment(&mut self, size: u64, is_small: bool) -> Option<BlockId> {
        let bytes = if is_small {
            SMALL_SEGMENT
        } else if size < OWN_SEGMENT {
            LARGE_SEGMENT
        } else {
            size.checked_next_multiple_of(SEGMENT_ROUNDING)?
        };
        let address = self.segments_end.max(FIRST_ADDRESS);
        let end = address.checked_add(bytes)?;
        self.reserve(bytes)?;
        self.segments_end = end;
        Some(self.new_block(address, bytes, is_small, State::Free))
    }

    /// Maps memory at the lowest addresses where there is room for the size, in free and unmapped blocks.
    fn expand(&mut self, size: u64, is_small: bool) -> Option<BlockId> {
        let unmapped: Vec<_> = self.pool(is_small).unmapped.iter().map(|(_, block)| *block).collect();
        let has_room = |first: &BlockId| {
            let (mut room, mut next) = (0_u64, Some(*first));
            while let Some(Block { bytes, after, .. }) = next.map(|block| self.blocks[block as usize])
                && room < size
            {
                room += bytes;
                next = after.filter(|after| self.blocks[*after as usize].state != State::InUse);
            }
            room >= size
        };
        let with_free_before = unmapped.into_iter().map(|block| {
            let before = self.blocks[block as usize].before;
            before.filter(|before| self.blocks[*before as usize].state == State::Free).unwrap_or(block)
        });
        let mut with_free_before = with_free_before;
        let first = with_free_before.find(has_room);
        let mut block = match first {
            Some(block) => block,
            None => self.add_addresses(size, is_small)?,
        };
        if self.at(block).state == State::Unmapped {
            self.map(block, size)?;
        }
        while self.at(block).bytes < size {
            let rest = size - self.at(block).bytes;
            let next = self.at(block).after?;
            self.map(next, rest)?;
            // It is joined with the block before it.
            block = next;
        }
        Some(block)
    }

    /// A new expandable segment, without memory.
    fn add_addresses(&mut self, size: u64, is_small: bool) -> Option<BlockId> {
        let addresses = self.limit.saturating_add(self.limit / 8).min(MOST_ADDRESSES);
        let addresses = addresses.checked_next_multiple_of(Self::granule(is_small)).filter(|bytes| *bytes >= size)?;
        let address = self.segments_end.max(FIRST_ADDRESS).checked_next_multiple_of(Self::granule(is_small))?;
        self.segments_end = address.checked_add(addresses)?;
        Some(self.new_block(address, addresses, is_small, State::Unmapped))
    }

    /// Memory is mapped and unmapped in units of this.
    fn granule(is_small: bool) -> u64 {
        if is_small { SMALL_SEGMENT } else { LARGE_SEGMENT }
    }

    /// Maps at least `size` bytes at the begin of an unmapped block, or all of it.
    fn map(&mut self, block: BlockId, size: u64) -> Option<()> {
        let Block { bytes, is_small, .. } = *self.at(block);
        let mapped = size.checked_next_multiple_of(Self::granule(is_small))?.min(bytes);
        self.reserve(mapped)?;
        self.remove(block);
        if mapped < bytes {
            let rest = self.split(block, mapped);
            self.insert(rest, State::Unmapped);
        }
        self.join(block, State::Free);
        Some(())
    }

    fn reserve(&mut self, bytes: u64) -> Option<()> {
        self.reserved = self.reserved.checked_add(bytes).filter(|sum| *sum <= self.limit)?;
        self.reserved_peak = self.reserved_peak.max(self.reserved);
        Some(())
    }

    /// Returns memory without a block in use to the driver, as PyTorch does when the driver has no memory left: whole segments, or
    /// whole units of expandable segments.
    fn return_free_memory(&mut self) {
        let free = |pool: &Pool| pool.free.iter().map(|(_, _, block)| *block).collect::<Vec<_>>();
        for block in [free(&self.small), free(&self.large)].concat() {
            let Block { address, bytes, before, after, is_small, .. } = *self.at(block);
            if !self.has_expandable_segments {
                if before.is_none() && after.is_none() {
                    self.remove(block);
                    self.unused.push(block);
                    self.reserved -= bytes;
                }
                continue;
            }
            let (granule, end) = (Self::granule(is_small), address + bytes);
            let (begin_unmapped, end_unmapped) = (address.next_multiple_of(granule), end - end % granule);
            if begin_unmapped >= end_unmapped {
                continue;
            }
            self.remove(block);
            if end_unmapped < end {
                let rest = self.split(block, end_unmapped - address);
                self.insert(rest, State::Free);
            }
            let unmapped = if address < begin_unmapped {
                let unmapped = self.split(block, begin_unmapped - address);
                self.insert(block, State::Free);
                unmapped
            } else {
                block
            };
            self.reserved -= end_unmapped - begin_unmapped;
            self.join(unmapped, State::Unmapped);
        }
    }

    fn new_block(&mut self, address: u64, bytes: u64, is_small: bool, state: State) -> BlockId {
        let block = Block { address, bytes, before: None, after: None, is_small, state };
        let number = self.number(block);
        self.insert(number, state);
        number
    }

    /// A number for a block.
    fn number(&mut self, block: Block) -> BlockId {
        if let Some(number) = self.unused.pop() {
            *self.at(number) = block;
            return number;
        }
        self.blocks.push(block);
        BlockId::try_from(self.blocks.len() - 1).unwrap_or(BlockId::MAX)
    }

    /// Cuts a block that is in no set. Returns the part after `bytes`, which is in no set either.
    fn split(&mut self, block: BlockId, bytes: u64) -> BlockId {
        let whole = *self.at(block);
        let rest = Block {
            address: whole.address + bytes,
            bytes: whole.bytes - bytes,
            before: Some(block),
            state: State::InUse,
            ..whole
        };
        let number = self.number(rest);
        if let Some(after) = whole.after {
            self.at(after).before = Some(number);
        }
        let whole = self.at(block);
        (whole.bytes, whole.after) = (bytes, Some(number));
        number
    }

    /// Joins a block that is in no set with its neighbours in this state, and inserts it.
    fn join(&mut self, block: BlockId, state: State) {
        let Block { before, after, .. } = *self.at(block);
        if let Some(before) = before
            && self.at(before).state == state
        {
            self.remove(before);
            let Block { address, bytes, before: next, .. } = *self.at(before);
            let joined = self.at(block);
            (joined.address, joined.bytes, joined.before) = (address, joined.bytes + bytes, next);
            if let Some(next) = next {
                self.at(next).after = Some(block);
            }
            self.unused.push(before);
        }
        if let Some(after) = after
            && self.at(after).state == state
        {
            self.remove(after);
            let Block { bytes, after: next, .. } = *self.at(after);
            let joined = self.at(block);
            (joined.bytes, joined.after) = (joined.bytes + bytes, next);
            if let Some(next) = next {
                self.at(next).before = Some(block);
            }
            self.unused.push(after);
        }
        self.insert(block, state);
    }

    fn insert(&mut self, block: BlockId, state: State) {
        self.at(block).state = state;
        let Block { address, bytes, is_small, .. } = *self.at(block);
        match state {
            State::InUse => false,
            State::Free => self.pool(is_small).free.insert((bytes, address, block)),
            State::Unmapped => self.pool(is_small).unmapped.insert((address, block)),
        };
    }

    /// Removes a block from the set of its state. It counts as in use until it is inserted again.
    fn remove(&mut self, block: BlockId) {
        let Block { address, bytes, is_small, state, .. } = *self.at(block);
        match state {
            State::InUse => false,
            State::Free => self.pool(is_small).free.remove(&(bytes, address, block)),
            State::Unmapped => self.pool(is_small).unmapped.remove(&(address, block)),
        };
        self.at(block).state = State::InUse;
    }

    fn at(&mut self, block: BlockId) -> &mut Block {
        &mut self.blocks[block as usize]
    }

    fn pool(&mut self, is_small: bool) -> &mut Pool {
        if is_small { &mut self.small } else { &mut self.large }
    }
}

#[cfg(test)]
mod tests {
    use super::{Caching, FIRST_ADDRESS, Placement};

    const MIB: u64 = 1 << 20;

    fn alloc(caching: &mut Caching, bytes: u64) -> Placement {
        caching.alloc(bytes).unwrap()
    }

    /// Where the blocks begin, from the first address.
    fn begin(placement: Placement) -> u64 {
        placement.address - FIRST_ADDRESS
    }

    #[test]
    fn sizes_are_rounded_and_segments_have_steps() {
        let mut caching = Caching::new(u64::MAX);
        assert_eq!(alloc(&mut caching, 1).bytes, 512);
        assert_eq!(alloc(&mut caching, 513).bytes, 1024);
        assert_eq!(caching.reserved, 2 * MIB);
        assert_eq!(alloc(&mut caching, MIB + 1).bytes, MIB + 512);
        assert_eq!(caching.reserved, 22 * MIB, "small and large blocks have segments of their own");
        assert_eq!(alloc(&mut caching, 25 * MIB + 1).bytes, 26 * MIB, "a rest of 1 MiB or less is not split off");
        assert_eq!(caching.reserved, 48 * MIB);
    }

    #[test]
    fn the_smallest_free_block_is_used_and_neighbours_are_joined() {
        let mut caching = Caching::new(u64::MAX);
        let [first, second, third] = [4, 2, 6].map(|mib| alloc(&mut caching, mib * MIB));
        caching.free(first.block);
        caching.free(second.block);
        let joined = alloc(&mut caching, 5 * MIB);
        assert_eq!((begin(joined), joined.bytes), (0, 6 * MIB), "4 and 2 MiB were joined; 1 MiB is not split off");
        caching.free(third.block);
        caching.free(joined.block);
        let whole = alloc(&mut caching, 20 * MIB);
        assert_eq!((begin(whole), whole.bytes), (0, 20 * MIB), "the whole segment is free again");
        assert_eq!(caching.reserved, 20 * MIB);
    }

    #[test]
    fn free_segments_are_returned_when_memory_runs_out() {
        let mut caching = Caching::new(100 * MIB);
        let [first, second] = [30, 40].map(|mib| alloc(&mut caching, mib * MIB));
        assert_eq!(caching.alloc(50 * MIB), None, "both segments are in use");
        caching.free(first.block);
        assert_eq!(alloc(&mut caching, 60 * MIB).bytes, 60 * MIB);
        assert_eq!((caching.reserved, caching.reserved_peak), (100 * MIB, 100 * MIB));
        caching.free(second.block);
        let part = alloc(&mut caching, 20 * MIB);
        assert_eq!(caching.alloc(41 * MIB), None, "a part of the segment is in use");
        caching.free(part.block);
        assert!(caching.alloc(40 * MIB).is_some());
    }

    #[test]
    fn a_request_of_2_to_the_64_is_refused() {
        for mut caching in [Caching::new(u64::MAX), Caching::expandable(u64::MAX)] {
            assert_eq!(caching.alloc(u64::MAX), None);
            assert_eq!(caching.alloc(u64::MAX - 1023), None);
            assert_eq!(caching.reserved, 0);
        }
    }

    #[test]
    fn an_expandable_segment_grows_in_steps_and_blocks_are_always_split() {
        let mut caching = Caching::expandable(1000 * MIB);
        let first = alloc(&mut caching, MIB + 1);
        assert_eq!((begin(first), first.bytes, caching.reserved), (0, MIB + 512, 20 * MIB));
        let second = alloc(&mut caching, 30 * MIB);
        assert_eq!(
            (begin(second), second.bytes, caching.reserved),
            (MIB + 512, 30 * MIB, 40 * MIB),
            "it begins in the rest of the first 20 MiB"
        );
        assert_eq!((alloc(&mut caching, 1).bytes, caching.reserved), (512, 42 * MIB), "small blocks have their own");
        caching.free(second.block);
        let third = alloc(&mut caching, 29 * MIB);
        assert_eq!((begin(third), third.bytes), (MIB + 512, 29 * MIB));
        let fourth = alloc(&mut caching, 25 * MIB);
        assert_eq!((begin(fourth), caching.reserved), (30 * MIB + 512, 62 * MIB));
        caching.free(third.block);
        let fifth = alloc(&mut caching, 28 * MIB + 512);
        assert_eq!((begin(fifth), fifth.bytes), (MIB + 512, 28 * MIB + 512), "less than 1 MiB is split off");
    }

    #[test]
    fn a_block_that_can_grow_is_the_last_choice() {
        let mut caching = Caching::expandable(1000 * MIB);
        let [first, _second] = [6, 9].map(|mib| alloc(&mut caching, mib * MIB));
        caching.free(first.block);
        assert_eq!(begin(alloc(&mut caching, 4 * MIB)), 0, "5 MiB are free at the end, and can grow");
    }

    #[test]
    fn whole_units_are_returned_when_memory_runs_out() {
        let mut caching = Caching::expandable(84 * MIB);
        let [first, _second] = [25, 30].map(|mib| alloc(&mut caching, mib * MIB));
        assert_eq!(caching.reserved, 60 * MIB);
        caching.free(first.block);
        // 55 to 60 MiB are free, 39 MiB more are needed: two units of 20 MiB. One is returned: 0 to 20 MiB.
        assert_eq!(begin(alloc(&mut caching, 44 * MIB)), 55 * MIB);
        assert_eq!((caching.reserved, caching.reserved_peak), (80 * MIB, 80 * MIB));
        assert_eq!(caching.alloc(22 * MIB), None, "there are addresses, but no memory");
        assert_eq!(begin(alloc(&mut caching, 5 * MIB)), 20 * MIB, "the rest of the first block was kept");
    }

    /// Random requests: blocks do not overlap, and all memory is free at the end.
    #[test]
    fn blocks_never_overlap() {
        for mut caching in [Caching::new(300 * MIB), Caching::expandable(300 * MIB)] {
            let mut random = 1_u64;
            let mut live: Vec<Placement> = Vec::new();
            for _ in 0..3000 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let number = random >> 33;
                if number.is_multiple_of(2) && !live.is_empty() {
                    let at = usize::try_from(number / 2).unwrap() % live.len();
                    caching.free(live.swap_remove(at).block);
                } else if let Some(new) = caching.alloc((1 << (number % 25)) + number % 999) {
                    let is_apart = |old: &Placement| {
                        old.address + old.bytes <= new.address || new.address + new.bytes <= old.address
                    };
                    assert!(live.iter().all(is_apart), "{new:?} {live:?}");
                    live.push(new);
                }
                let in_use: u64 = live.iter().map(|block| block.bytes).sum();
                let free = [&caching.small, &caching.large].into_iter().flat_map(|pool| &pool.free);
                assert_eq!(caching.reserved, in_use + free.map(|(bytes, ..)| bytes).sum::<u64>());
            }
            assert!(live.len() > 5);
            for block in &live {
                caching.free(block.block);
            }
            caching.return_free_memory();
            assert_eq!(caching.reserved, 0);
        }
    }
}

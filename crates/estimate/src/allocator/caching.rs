//! PyTorch's caching allocator: `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.11. Names in backticks are those in
//! that file.
//!
//! The allocator gets segments from the driver and splits them into blocks. A request gets the smallest free block of
//! its stream that is large enough. If only a small rest of that block would remain, the block is not split: the request
//! then takes more than its rounded size, and PyTorch counts the whole block as allocated.
//!
//! With expandable segments, each stream has one address range for small blocks and one for large blocks. Memory is
//! mapped at the end of a range, and wherever a part of it was returned to the driver. Blocks are always split.

use std::collections::BTreeSet;

use gpumem_recording::AllocatorSettings;

use super::placement::{Allocator, Placement};

/// `kSmallBuffer`: the size of the segments of the small pool.
const SMALL_SEGMENT: u64 = 2 << 20;
/// `kMinLargeAlloc`: smaller requests of the large pool get a segment of `LARGE_SEGMENT`.
const OWN_SEGMENT: u64 = 10 << 20;
/// `kLargeBuffer`.
const LARGE_SEGMENT: u64 = 20 << 20;
/// `kRoundLarge`: larger segments are multiples of this.
const SEGMENT_ROUNDING: u64 = 2 << 20;
/// `max_non_split_rounding_size`: a block that is too large to be split exceeds the request by less than this.
const MOST_BESIDE: u64 = LARGE_SEGMENT;
/// The first address. It is far from 0, and a multiple of each unit.
const FIRST_ADDRESS: u64 = LARGE_SEGMENT << 22;
/// An expandable segment reserves addresses for 9/8 of the device's memory, and here for no more than this.
const MOST_ADDRESSES: u64 = 1 << 50;

/// The id of a block.
type BlockId = u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    InUse,
    Free,
    /// Addresses of an expandable segment without memory.
    Unmapped,
}

/// Determines which requests share free blocks: only those of the same stream and the same private pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sharing {
    /// The id of the stream.
    pub stream: u32,
    /// The id of the private pool, such as that of a CUDA graph. 0 is the pool of all other requests.
    pub pool: u32,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    address: u64,
    bytes: u64,
    /// The neighbours in the same segment.
    before: Option<BlockId>,
    after: Option<BlockId>,
    sharing: Sharing,
    is_small: bool,
    is_expandable: bool,
    state: State,
}

/// The blocks of a pool that are not in use: for each stream, first the free blocks, ordered by size and address, and then the
/// ranges without memory, ordered by address.
type Unused = BTreeSet<(u32, State, u64, u64, BlockId)>;

/// A request for a new block.
#[derive(Clone, Copy, Debug)]
struct BlockRequest {
    size: u64,
    is_small: bool,
    sharing: Sharing,
    /// See [`Caching::alloc_for`].
    segment: Option<(u64, u64)>,
}

#[derive(Debug, Default)]
pub(crate) struct Caching {
    settings: AllocatorSettings,
    blocks: Vec<Block>,
    /// Ids in `blocks` that are not in use.
    unused: Vec<BlockId>,
    /// The pools of large and of small blocks. The first pair is not private.
    pools: Vec<[Unused; 2]>,
    /// The blocks whose free was requested while work on other streams may still use them.
    awaiting: BTreeSet<BlockId>,
    segments_end: u64,
    /// The most bytes that segments from the driver may take.
    limit: u64,
    reserved: u64,
    /// The highest value of `reserved`.
    pub(super) reserved_peak: u64,
    /// The bytes that the program holds.
    allocated: u64,
    /// The part of `reserved_peak` that the program did not hold.
    pub(super) unused_at_peak: u64,
    /// The number of times that the cache was emptied.
    pub(super) emptied: u64,
    /// The number of times that the cache was emptied because the driver did not have enough memory: `num_alloc_retries`.
    pub(super) retries: u64,
}

impl Caching {
    pub(super) fn new(settings: AllocatorSettings, limit: u64) -> Self {
        Self { settings, limit, pools: vec![<[Unused; 2]>::default()], ..Self::default() }
    }

    /// Allocates a block (`malloc`). If this needs a new segment of the size of `segment`, the new segment gets the
    /// address of `segment`. Addresses matter, because the lowest one of several free blocks of equal size is used, and
    /// only the driver knows where it puts segments.
    pub(super) fn alloc_for(&mut self, bytes: u64, sharing: Sharing, segment: Option<(u64, u64)>) -> Option<Placement> {
        let size = self.settings.rounded(bytes)?;
        let request = BlockRequest { size, is_small: size <= AllocatorSettings::SMALL, sharing, segment };
        let peak = self.reserved_peak;
        let mut block = self.best_fit(request).or_else(|| self.add_memory(request));
        if block.is_none() && self.return_oversize(request) {
            block = self.add_memory(request);
        }
        if block.is_none() {
            self.empty_cache();
            self.retries += 1;
            block = self.add_memory(request);
        }
        let block = block?;
        self.remove(block);
        let rest = self.at(block).bytes - size;
        if self.settings.splits(size, rest, self.settings.is_expandable) {
            self.split(block, size, State::Free);
        }
        let placement = self.take(block);
        if self.reserved_peak > peak {
            self.unused_at_peak = self.reserved_peak - self.allocated;
        }
        Some(placement)
    }

    /// Counts a block, which is in no set, as held by the program.
    fn take(&mut self, block: BlockId) -> Placement {
        let Block { address, bytes, .. } = *self.at(block);
        self.allocated += bytes;
        Placement { address, bytes, block }
    }

    /// Adds a segment that the allocator held before its first request. `blocks` are the blocks that the program held,
    /// with their addresses and sizes, in ascending order. `None` if the driver does not have enough memory.
    pub(super) fn add_old(
        &mut self,
        (address, bytes): (u64, u64),
        sharing: Sharing,
        blocks: &[(u64, u64)],
    ) -> Option<Vec<Placement>> {
        self.reserve(bytes)?;
        let mut rest = self.new_block(address, bytes, (sharing, bytes == SMALL_SEGMENT), State::Free);
        let mut placements = Vec::new();
        for (start, length) in blocks {
            self.remove(rest);
            if let Some(before) = start.checked_sub(self.at(rest).address).filter(|bytes| *bytes > 0) {
                let block = self.split(rest, before, State::InUse);
                self.insert(rest, State::Free);
                rest = block;
            }
            let block = rest;
            if self.at(block).bytes > *length {
                rest = self.split(block, *length, State::Free);
            }
            placements.push(self.take(block));
        }
        self.unused_at_peak = self.reserved_peak - self.allocated;
        Some(placements)
    }

    /// Frees a block that work on another stream may still use.
    pub(super) fn request_free(&mut self, block: BlockId) {
        self.allocated -= self.at(block).bytes;
        self.awaiting.insert(block);
    }

    /// Frees a block after the work on other streams is done. [`empty_cache`](Self::empty_cache) also does this, because
    /// it waits for the work.
    pub(super) fn complete_free(&mut self, block: BlockId) {
        self.awaiting.remove(&block);
        self.join(block, State::Free);
    }

    /// Returns the smallest free block that is large enough (`get_free_block`). For a block that can grow, its largest
    /// size is used.
    fn best_fit(&self, request: BlockRequest) -> Option<BlockId> {
        let BlockRequest { size, is_small, sharing: Sharing { stream, pool }, .. } = request;
        let pool = &self.pools.get(pool as usize)?[usize::from(is_small)];
        let fitting = pool.range((stream, State::Free, size, 0, 0)..(stream, State::Unmapped, 0, 0, 0));
        let mut fitting = fitting.map(|(.., block)| *block);
        let mut found = fitting.next()?;
        let block = |number: BlockId| self.blocks[number as usize];
        let expandable = |number: BlockId| {
            let Block { bytes, after, .. } = block(number);
            bytes + after.map(block).filter(|after| after.state == State::Unmapped).map_or(0, |after| after.bytes)
        };
        while block(found).is_expandable {
            let Some(next) = fitting.next().filter(|next| expandable(*next) < expandable(found)) else { break };
            found = next;
        }
        let (most, bytes) = (self.settings.max_split, block(found).bytes);
        let is_too_large = if size < most { bytes >= most } else { bytes >= size.saturating_add(MOST_BESIDE) };
        Some(found).filter(|_| !is_too_large)
    }

    /// Returns a free block of this size or more, with memory from the driver (`alloc_block`). `None` if the driver
    /// does not have enough.
    fn add_memory(&mut self, request: BlockRequest) -> Option<BlockId> {
        if self.settings.is_expandable { self.expand(request) } else { self.add_segment(request) }
    }

    fn add_segment(&mut self, request: BlockRequest) -> Option<BlockId> {
        let BlockRequest { size, is_small, sharing, segment } = request;
        let bytes = if is_small {
            SMALL_SEGMENT
        } else if size < OWN_SEGMENT {
            LARGE_SEGMENT
        } else {
            size.checked_next_multiple_of(SEGMENT_ROUNDING)?
        };
        let next = self.segments_end.max(FIRST_ADDRESS);
        let end = next.checked_add(bytes)?;
        self.reserve(bytes)?;
        let address = match segment {
            Some((address, length)) if length == bytes => address,
            _ => {
                self.segments_end = end;
                next
            }
        };
        Some(self.new_block(address, bytes, (sharing, is_small), State::Free))
    }

    /// Maps memory at the lowest addresses with room for the size, in free and unmapped blocks (`try_allocate_expandable_block`).
    fn expand(&mut self, request: BlockRequest) -> Option<BlockId> {
        let BlockRequest { size, is_small, sharing, .. } = request;
        let stream = sharing.stream;
        let unmapped = (stream, State::Unmapped, 0, 0, 0)..(stream + 1, State::InUse, 0, 0, 0);
        let unmapped: Vec<_> = self.pool(sharing, is_small).range(unmapped).map(|(.., block)| *block).collect();
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
        let mut with_free_before = unmapped.into_iter().map(|block| {
            let before = self.blocks[block as usize].before;
            before.filter(|before| self.blocks[*before as usize].state == State::Free).unwrap_or(block)
        });
        let first = with_free_before.find(has_room);
        let mut block = match first {
            Some(block) => block,
            None => self.add_addresses(request)?,
        };
        if self.at(block).state == State::Unmapped {
            self.map(block, size)?;
        }
        while self.at(block).bytes < size {
            let rest = size - self.at(block).bytes;
            let next = self.at(block).after?;
            self.map(next, rest)?;
            // The block was joined with the block before it.
            block = next;
        }
        Some(block)
    }

    /// Creates an expandable segment without mapped memory.
    fn add_addresses(&mut self, request: BlockRequest) -> Option<BlockId> {
        let BlockRequest { size, is_small, sharing, .. } = request;
        let addresses = self.limit.saturating_add(self.limit / 8).min(MOST_ADDRESSES);
        let addresses = addresses.checked_next_multiple_of(Self::granule(is_small)).filter(|bytes| *bytes >= size)?;
        let address = self.segments_end.max(FIRST_ADDRESS).checked_next_multiple_of(Self::granule(is_small))?;
        self.segments_end = address.checked_add(addresses)?;
        Some(self.new_block(address, addresses, (sharing, is_small), State::Unmapped))
    }

    /// Returns the unit in which memory is mapped and unmapped.
    fn granule(is_small: bool) -> u64 {
        if is_small { SMALL_SEGMENT } else { LARGE_SEGMENT }
    }

    /// Maps at least `size` bytes at the start of an unmapped block, or all of it (`map_block`).
    fn map(&mut self, block: BlockId, size: u64) -> Option<()> {
        let Block { bytes, is_small, .. } = *self.at(block);
        let mapped = size.checked_next_multiple_of(Self::granule(is_small))?.min(bytes);
        self.reserve(mapped)?;
        self.remove(block);
        if mapped < bytes {
            self.split(block, mapped, State::Unmapped);
        }
        self.join(block, State::Free);
        Some(())
    }

    fn reserve(&mut self, bytes: u64) -> Option<()> {
        self.reserved = self.reserved.checked_add(bytes).filter(|sum| *sum <= self.limit)?;
        self.reserved_peak = self.reserved_peak.max(self.reserved);
        Some(())
    }

    /// Releases a block that is too large to be split and large enough for the request, or several such blocks that are
    /// large enough together (`release_available_cached_blocks`). Returns false if there are not enough of them.
    fn return_oversize(&mut self, request: BlockRequest) -> bool {
        let BlockRequest { size, is_small, sharing, .. } = request;
        let (stream, least) = (sharing.stream, self.settings.max_split);
        let size = size.max(least);
        let pool = self.pool(sharing, is_small);
        let blocks = |from, state, to| {
            pool.range((stream, State::Free, from, 0, 0)..(stream, state, to, 0, 0)).map(|(.., block)| *block)
        };
        let enough = blocks(size, State::Unmapped, 0).next();
        let smaller: Vec<_> = blocks(least, State::Free, size).rev().collect();
        // A segment of this size can only be split if it was allocated earlier with other settings.
        let is_segment = |block: &BlockId| self.is_segment(*block);
        if let Some(block) = enough.filter(is_segment) {
            self.return_segment(block);
            return true;
        }
        let before = self.reserved;
        for block in smaller.into_iter().filter(is_segment).collect::<Vec<_>>() {
            if before - self.reserved < size {
                self.return_segment(block);
            }
        }
        before - self.reserved >= size
    }

    /// Returns whether a block fills a segment that is not expandable.
    fn is_segment(&self, block: BlockId) -> bool {
        let Block { before, after, is_expandable, .. } = self.blocks[block as usize];
        !is_expandable && before.is_none() && after.is_none()
    }

    /// Returns a segment that consists of one free block to the driver.
    fn return_segment(&mut self, block: BlockId) {
        self.remove(block);
        self.unused.push(block);
        self.reserved -= self.at(block).bytes;
    }

    /// Returns memory that contains no used block to the driver, as whole segments or whole units of expandable
    /// segments (`release_cached_blocks`). Private pools keep their memory as long as they are used.
    pub(super) fn empty_cache(&mut self) {
        self.emptied += 1;
        for block in std::mem::take(&mut self.awaiting) {
            self.join(block, State::Free);
        }
        let free = self.pools[0].iter().flatten().filter(|(_, state, ..)| *state == State::Free);
        for block in free.map(|(.., block)| *block).collect::<Vec<_>>() {
            if self.is_segment(block) {
                self.return_segment(block);
            }
            let Block { address, bytes, is_small, is_expandable, .. } = *self.at(block);
            if !is_expandable {
                continue;
            }
            let (granule, end) = (Self::granule(is_small), address + bytes);
            let (start_unmapped, end_unmapped) = (address.next_multiple_of(granule), end - end % granule);
            if start_unmapped >= end_unmapped {
                continue;
            }
            self.remove(block);
            if end_unmapped < end {
                self.split(block, end_unmapped - address, State::Free);
            }
            let unmapped = if address < start_unmapped {
                let unmapped = self.split(block, start_unmapped - address, State::InUse);
                self.insert(block, State::Free);
                unmapped
            } else {
                block
            };
            self.reserved -= end_unmapped - start_unmapped;
            self.join(unmapped, State::Unmapped);
        }
    }

    /// Adds a segment. A segment without memory is expandable.
    fn new_block(&mut self, address: u64, bytes: u64, (sharing, is_small): (Sharing, bool), state: State) -> BlockId {
        let is_expandable = state == State::Unmapped;
        let (before, after) = (None, None);
        let block = Block { address, bytes, before, after, sharing, is_small, is_expandable, state: State::InUse };
        let number = self.number(block);
        self.insert(number, state);
        number
    }

    /// Stores a block and returns its id.
    fn number(&mut self, block: Block) -> BlockId {
        if let Some(number) = self.unused.pop() {
            *self.at(number) = block;
            return number;
        }
        self.blocks.push(block);
        BlockId::try_from(self.blocks.len() - 1).unwrap_or(BlockId::MAX)
    }

    /// Cuts a block that is in no set. Returns the part after `bytes`, which gets this state.
    fn split(&mut self, block: BlockId, bytes: u64, state: State) -> BlockId {
        let whole = *self.at(block);
        let (address, rest) = (whole.address + bytes, whole.bytes - bytes);
        let number = self.number(Block { address, bytes: rest, state: State::InUse, ..whole });
        self.link(Some(number), whole.after);
        self.link(Some(block), Some(number));
        self.at(block).bytes = bytes;
        self.insert(number, state);
        number
    }

    /// Makes two blocks neighbours. `None` is the start or the end of a segment.
    fn link(&mut self, before: Option<BlockId>, after: Option<BlockId>) {
        if let Some(before) = before {
            self.at(before).after = after;
        }
        if let Some(after) = after {
            self.at(after).before = before;
        }
    }

    /// Joins a block that is in no set with its neighbours that have this state, and inserts it.
    fn join(&mut self, block: BlockId, state: State) {
        let Block { before, after, .. } = *self.at(block);
        for other in [before, after].into_iter().flatten() {
            if self.at(other).state != state {
                continue;
            }
            self.remove(other);
            let ends = if Some(other) == before { [other, block] } else { [block, other] };
            let [first, last] = ends.map(|end| *self.at(end));
            self.link(first.before, Some(block));
            self.link(Some(block), last.after);
            let joined = self.at(block);
            (joined.address, joined.bytes) = (first.address, first.bytes + last.bytes);
            self.unused.push(other);
        }
        self.insert(block, state);
    }

    /// Gives a block another state, and moves it from the set of the old state to that of the new one.
    fn insert(&mut self, block: BlockId, state: State) {
        let Block { address, bytes, sharing, is_small, state: old, .. } = *self.at(block);
        let pool = self.pool(sharing, is_small);
        let key = |state| (sharing.stream, state, if state == State::Free { bytes } else { 0 }, address, block);
        pool.remove(&key(old));
        if state != State::InUse {
            pool.insert(key(state));
        }
        self.at(block).state = state;
    }

    /// Removes a block from the set of its state. It counts as in use until it is inserted again.
    fn remove(&mut self, block: BlockId) {
        self.insert(block, State::InUse);
    }

    fn at(&mut self, block: BlockId) -> &mut Block {
        &mut self.blocks[block as usize]
    }

    fn pool(&mut self, sharing: Sharing, is_small: bool) -> &mut Unused {
        let pool = sharing.pool as usize;
        if self.pools.len() <= pool {
            self.pools.resize_with(pool + 1, Default::default);
        }
        &mut self.pools[pool][usize::from(is_small)]
    }
}

impl Allocator for Caching {
    fn alloc(&mut self, bytes: u64) -> Option<Placement> {
        self.alloc_for(bytes, Sharing::default(), None)
    }

    fn free(&mut self, Placement { block, .. }: Placement) {
        self.allocated -= self.at(block).bytes;
        self.join(block, State::Free);
    }

    fn reserved_peak(&self) -> u64 {
        self.reserved_peak
    }
}

#[cfg(test)]
mod tests {
    use super::{Allocator, AllocatorSettings, Caching, Placement, Sharing};

    const MIB: u64 = 1 << 20;

    fn plain(limit: u64) -> Caching {
        Caching::new(AllocatorSettings::default(), limit)
    }

    fn expandable(limit: u64) -> Caching {
        Caching::new(AllocatorSettings { is_expandable: true, ..AllocatorSettings::default() }, limit)
    }

    #[test]
    fn a_request_of_2_to_the_64_is_rejected() {
        for mut caching in [plain(u64::MAX), expandable(u64::MAX)] {
            assert_eq!(caching.alloc(u64::MAX), None);
            assert_eq!(caching.alloc(u64::MAX - 1023), None);
            assert_eq!(caching.reserved, 0);
        }
    }

    /// After random requests, blocks do not overlap, and all memory is free at the end.
    #[test]
    fn blocks_never_overlap() {
        let oversize = AllocatorSettings { max_split: 24 * MIB, ..AllocatorSettings::default() };
        for mut caching in [plain(300 * MIB), expandable(300 * MIB), Caching::new(oversize, 300 * MIB)] {
            let mut random = fastrand::Rng::with_seed(1);
            let mut live: Vec<Placement> = Vec::new();
            for _ in 0..3000 {
                let number = random.u64(..1 << 31);
                if number.is_multiple_of(2) && !live.is_empty() {
                    let at = usize::try_from(number / 2).unwrap() % live.len();
                    caching.free(live.swap_remove(at));
                } else if let Some(new) = caching.alloc_for(
                    (1 << (number % 25)) + number % 999,
                    Sharing { stream: u32::try_from(number % 3).unwrap(), pool: 0 },
                    None,
                ) {
                    let is_apart = |old: &Placement| {
                        old.address + old.bytes <= new.address || new.address + new.bytes <= old.address
                    };
                    assert!(live.iter().all(is_apart), "{new:?} {live:?}");
                    live.push(new);
                }
                let in_use: u64 = live.iter().map(|block| block.bytes).sum();
                // Ranges without memory count as 0 bytes.
                let free = caching.pools[0].iter().flatten().map(|(_, _, bytes, ..)| bytes);
                assert_eq!(caching.reserved, in_use + free.sum::<u64>());
            }
            assert!(live.len() > 5);
            for block in live {
                caching.free(block);
            }
            caching.empty_cache();
            assert_eq!(caching.reserved, 0);
        }
    }
}

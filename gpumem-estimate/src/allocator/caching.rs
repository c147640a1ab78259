//! PyTorch's caching allocator (`c10/cuda/CUDACachingAllocator.cpp`) on one stream, with default settings.
//!
//! It takes segments from the driver and splits them into blocks. A request gets the smallest free block that is large enough. If
//! the rest of that block is small, the block is not split: then the request takes more than its rounded size, and torch counts
//! the whole block as allocated.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::Placement;

/// Sizes are multiples of this.
const ROUNDING: u64 = 512;
/// Larger requests are of the large pool.
const SMALL: u64 = 1 << 20;
/// The segments of the small pool.
const SMALL_SEGMENT: u64 = 2 << 20;
/// Requests of the large pool that are smaller than this get a segment of `LARGE_SEGMENT`.
const OWN_SEGMENT: u64 = 10 << 20;
const LARGE_SEGMENT: u64 = 20 << 20;
/// Larger segments are multiples of this.
const SEGMENT_ROUNDING: u64 = 2 << 20;
/// Far from 0 and a multiple of each unit. A gap between segments keeps their blocks apart.
const FIRST_ADDRESS: u64 = 0x7000_0000_0000;

#[derive(Clone, Copy, Debug)]
struct Block {
    bytes: u64,
    segment: u64,
    is_small: bool,
    is_free: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Caching {
    /// All blocks, by address.
    blocks: BTreeMap<u64, Block>,
    /// Free blocks by size, then address: one set for each pool.
    free_small: BTreeSet<(u64, u64)>,
    free_large: BTreeSet<(u64, u64)>,
    /// The sizes of segments by address.
    segments: HashMap<u64, u64>,
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

    pub(super) fn alloc(&mut self, bytes: u64) -> Option<Placement> {
        let size = bytes.max(1).checked_next_multiple_of(ROUNDING)?;
        let is_small = size <= SMALL;
        let found = self.pool(is_small).range((size, 0)..).next().copied();
        let (free, address) = match found {
            Some(found) => found,
            None => self.add_segment(size, is_small)?,
        };
        self.pool(is_small).remove(&(free, address));
        let rest = free - size;
        let splits = if is_small { rest >= ROUNDING } else { rest > SMALL };
        let taken = if splits { size } else { free };
        let block = self.blocks.get_mut(&address)?;
        (block.bytes, block.is_free) = (taken, false);
        let segment = block.segment;
        if splits {
            self.insert_free(address + size, Block { bytes: rest, segment, is_small, is_free: true });
        }
        Some(Placement { address, bytes: taken })
    }

    pub(super) fn free(&mut self, address: u64) {
        let Some(mut block) = self.blocks.remove(&address) else { return };
        let mut start = address;
        if let Some((&before, &other)) = self.blocks.range(..address).next_back()
            && other.is_free
            && other.segment == block.segment
        {
            self.remove_free(before, other);
            (start, block.bytes) = (before, block.bytes + other.bytes);
        }
        let after = start + block.bytes;
        if let Some(&other) = self.blocks.get(&after)
            && other.is_free
            && other.segment == block.segment
        {
            self.remove_free(after, other);
            block.bytes += other.bytes;
        }
        block.is_free = true;
        self.insert_free(start, block);
    }

    /// Returns all segments to the driver that have no block in use, as PyTorch does when the driver has no memory left.
    fn return_free_segments(&mut self) {
        let is_free = |(address, bytes): (&u64, &u64)| {
            let block = self.blocks.get(address)?;
            (block.is_free && block.bytes == *bytes).then_some((*address, *block))
        };
        let free: Vec<_> = self.segments.iter().filter_map(is_free).collect();
        for (address, block) in free {
            self.remove_free(address, block);
            self.segments.remove(&address);
            self.reserved -= block.bytes;
        }
    }

    fn add_segment(&mut self, size: u64, is_small: bool) -> Option<(u64, u64)> {
        let bytes = if is_small {
            SMALL_SEGMENT
        } else if size < OWN_SEGMENT {
            LARGE_SEGMENT
        } else {
            size.checked_next_multiple_of(SEGMENT_ROUNDING)?
        };
        let fits = |reserved: u64| reserved.checked_add(bytes).is_some_and(|sum| sum <= self.limit);
        if !fits(self.reserved) {
            self.return_free_segments();
            self.reserved.checked_add(bytes).filter(|sum| *sum <= self.limit)?;
        }
        let address = self.segments_end.max(FIRST_ADDRESS);
        self.segments_end = address.checked_add(bytes)?.checked_add(SEGMENT_ROUNDING)?;
        self.reserved += bytes;
        self.reserved_peak = self.reserved_peak.max(self.reserved);
        self.segments.insert(address, bytes);
        self.insert_free(address, Block { bytes, segment: address, is_small, is_free: true });
        Some((bytes, address))
    }

    fn insert_free(&mut self, address: u64, block: Block) {
        self.pool(block.is_small).insert((block.bytes, address));
        self.blocks.insert(address, block);
    }

    fn remove_free(&mut self, address: u64, block: Block) {
        self.pool(block.is_small).remove(&(block.bytes, address));
        self.blocks.remove(&address);
    }

    fn pool(&mut self, is_small: bool) -> &mut BTreeSet<(u64, u64)> {
        if is_small { &mut self.free_small } else { &mut self.free_large }
    }
}

#[cfg(test)]
mod tests {
    use super::Caching;

    const MIB: u64 = 1 << 20;

    fn bytes(caching: &mut Caching, bytes: u64) -> (u64, u64) {
        let placement = caching.alloc(bytes).unwrap();
        (placement.address, placement.bytes)
    }

    #[test]
    fn sizes_are_rounded_and_segments_have_steps() {
        let mut caching = Caching::new(u64::MAX);
        assert_eq!(bytes(&mut caching, 1).1, 512);
        assert_eq!(bytes(&mut caching, 513).1, 1024);
        assert_eq!(caching.reserved, 2 * MIB);
        assert_eq!(bytes(&mut caching, MIB + 1).1, MIB + 512);
        assert_eq!(caching.reserved, 22 * MIB, "small and large blocks have segments of their own");
        assert_eq!(bytes(&mut caching, 25 * MIB + 1).1, 26 * MIB, "a rest of 1 MiB or less is not split off");
        assert_eq!(caching.reserved, 48 * MIB);
    }

    #[test]
    fn the_smallest_free_block_is_used_and_neighbours_are_joined() {
        let mut caching = Caching::new(u64::MAX);
        let [first, second, third] = [4, 2, 6].map(|mib| bytes(&mut caching, mib * MIB).0);
        caching.free(first);
        caching.free(second);
        assert_eq!(bytes(&mut caching, 5 * MIB), (first, 6 * MIB), "4 and 2 MiB were joined; 1 MiB is not split off");
        caching.free(first);
        caching.free(third);
        assert_eq!(bytes(&mut caching, 20 * MIB), (first, 20 * MIB), "the whole segment is free again");
        assert_eq!(caching.reserved, 20 * MIB);
    }

    #[test]
    fn free_segments_are_returned_when_memory_runs_out() {
        let mut caching = Caching::new(100 * MIB);
        let [first, second] = [30, 40].map(|mib| bytes(&mut caching, mib * MIB).0);
        assert_eq!(caching.alloc(50 * MIB), None, "both segments are in use");
        caching.free(first);
        assert_eq!(bytes(&mut caching, 60 * MIB).1, 60 * MIB);
        assert_eq!((caching.reserved, caching.reserved_peak), (100 * MIB, 100 * MIB));
        caching.free(second);
        let part = bytes(&mut caching, 20 * MIB).0;
        assert_eq!(caching.alloc(41 * MIB), None, "a part of the segment is in use");
        caching.free(part);
        assert!(caching.alloc(40 * MIB).is_some());
    }

    #[test]
    fn a_request_of_2_to_the_64_is_refused() {
        assert_eq!(Caching::new(u64::MAX).alloc(u64::MAX), None);
        assert_eq!(Caching::new(u64::MAX).alloc(u64::MAX - 1023), None);
    }
}

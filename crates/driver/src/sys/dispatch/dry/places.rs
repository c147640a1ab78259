//! The addresses of dry blocks.
//!
//! If several free blocks have the same size, PyTorch's allocator takes the one with the lowest address. Therefore the order of addresses
//! determines how its memory is divided, and must be as in the driver. On an H200 (driver 580), the driver reserves chunks of multiples of
//! 32 MiB. A block goes into the newest chunk with a hole that is large enough, and there into the smallest such hole. Without such a
//! chunk, the block starts a new one at the end of the highest gap that is larger than it. A chunk that becomes empty is a gap again. (In
//! 1,334 allocations of random sequences, one was elsewhere, in a chunk that was older than the sequence.)
//!
//! The addresses are far from those that the driver would choose, which may be `0x4_0000_0000`: in a kernel's parameters, the numbers 0 and
//! 4 look like that address.
//!
//! A range stays reserved, with memory behind it, because a kernel may still use an address that is free.

use std::{collections::BTreeMap, ops::Range};

/// Addresses are reserved in steps of this size, and physical memory is created in them.
pub(super) const PAGE: u64 = 2 << 20;

/// The range that contains all places. Memory of the host starts at 0x55 and ends with 0x7f. Near the end of the range, the upper halves of
/// addresses are not multiples of 256, which sizes often are. The lower half is for addresses that the program reserves.
const START: u64 = 0x5700 << 32;
const MIDDLE: u64 = 0x6880 << 32;
const END: u64 = 0x7a00 << 32;
/// A chunk has a multiple of this size.
const STEP: u64 = 32 << 20;

#[derive(Debug)]
pub(super) struct Places {
    range: Range<u64>,
    /// No chunk was ever below this address.
    lowest: u64,
    /// The oldest one comes first.
    chunks: Vec<Chunk>,
    /// The free places in the driver's own chunks, which are older than all others.
    of_driver: Holes,
}

#[derive(Debug)]
struct Chunk {
    range: Range<u64>,
    holes: Holes,
}

/// The end addresses of free ranges, by start address.
#[derive(Debug, Default)]
struct Holes(BTreeMap<u64, u64>);

impl Places {
    pub(super) const OF_BLOCKS: Self = Self::within(MIDDLE..END);
    pub(super) const OF_PROGRAM: Self = Self::within(START..MIDDLE);

    const fn within(range: Range<u64>) -> Self {
        Self { lowest: range.end, range, chunks: Vec::new(), of_driver: Holes(BTreeMap::new()) }
    }

    /// Takes a place for this many bytes in one of the chunks. Returns `None` if no hole is large enough.
    pub(super) fn take_hole(&mut self, bytes: u64) -> Option<u64> {
        let bytes = bytes.checked_next_multiple_of(PAGE)?;
        let holes = self.chunks.iter_mut().rev().map(|chunk| &mut chunk.holes).chain([&mut self.of_driver]);
        holes.into_iter().find_map(|holes| holes.take(bytes))
    }

    /// Starts a chunk with a place for this many bytes. Returns the start of the place, and the part of the chunk that must be reserved. `None`
    /// if there is no room.
    pub(super) fn take_chunk(&mut self, bytes: u64) -> Option<(u64, Range<u64>)> {
        let bytes = bytes.checked_next_multiple_of(PAGE)?;
        let range = self.highest_gap(bytes.checked_next_multiple_of(STEP)?)?;
        let (start, lowest) = (range.start, self.lowest);
        self.lowest = lowest.min(start);
        let mut holes = Holes::default();
        holes.add(start + bytes..range.end);
        let new = start..range.end.min(lowest).max(start);
        self.chunks.push(Chunk { range, holes });
        Some((start, new))
    }

    /// Returns the last `size` bytes of the highest gap between chunks that is larger than `size`. The lowest gap reaches down to the start of
    /// the range.
    fn highest_gap(&self, size: u64) -> Option<Range<u64>> {
        let mut used: Vec<_> = self.chunks.iter().map(|chunk| chunk.range.clone()).collect();
        used.sort_by_key(|range| range.start);
        let mut end = self.range.end;
        for range in used.iter().rev() {
            if end - range.end > size {
                break;
            }
            end = range.start;
        }
        end.checked_sub(size).filter(|start| *start >= self.range.start).map(|start| start..end)
    }

    /// Returns an address where nothing of this size is reserved.
    pub(super) fn unused(&self, bytes: u64) -> Option<u64> {
        self.lowest.checked_sub(bytes.checked_next_multiple_of(STEP)?).filter(|start| *start >= self.range.start)
    }

    /// Discards the chunk of a place, because a part of it cannot be reserved. No block gets a place there any more.
    pub(super) fn discard(&mut self, start: u64) {
        if let Some(chunk) = self.chunks.iter_mut().find(|chunk| chunk.range.contains(&start)) {
            chunk.holes = Holes::default();
        }
    }

    /// Frees a place.
    pub(super) fn release(&mut self, start: u64, bytes: u64) {
        let place = start..start + bytes.next_multiple_of(PAGE);
        let Some(at) = self.chunks.iter().position(|chunk| chunk.range.contains(&start)) else {
            return self.of_driver.add(place);
        };
        let chunk = &mut self.chunks[at];
        chunk.holes.add(place);
        if chunk.holes.0.get(&chunk.range.start) == Some(&chunk.range.end) {
            self.chunks.remove(at);
        }
    }
}

impl Holes {
    /// Takes this many bytes from the start of the smallest hole that is large enough. Returns their address.
    fn take(&mut self, bytes: u64) -> Option<u64> {
        let sizes = self.0.iter().map(|(start, end)| (end - start, *start));
        let (size, start) = sizes.filter(|(size, _)| *size >= bytes).min()?;
        self.0.remove(&start);
        self.add(start + bytes..start + size);
        Some(start)
    }

    /// Adds a free range, which becomes one with those that it touches.
    fn add(&mut self, Range { mut start, mut end }: Range<u64>) {
        if start == end {
            return;
        }
        end = self.0.remove(&end).unwrap_or(end);
        if let Some((before, _)) = self.0.range(..start).next_back().filter(|(_, before)| **before == start) {
            start = *before;
        }
        self.0.insert(start, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Returns the distance of a place from the end, in MiB.
    fn below(place: u64) -> u64 {
        (END - place) / MIB
    }

    /// Takes a place, and returns the distance of its start from the end, in MiB.
    fn take(places: &mut Places, mib: u64) -> u64 {
        let start = places.take_hole(mib * MIB).or_else(|| Some(places.take_chunk(mib * MIB)?.0));
        start.map_or(0, below)
    }

    /// Sequences of random allocations and frees on an H200 with driver 580, one on each line: `+PAGES@PLACE` and `-PLACE`. A place is its
    /// distance from the end of the first chunk, in pages. Blocks in older chunks are not in it.
    const ON_H200: &str = include_str!("places.txt");

    #[test]
    fn places_are_those_of_the_driver() {
        let number = |text: &str| text.parse::<u64>().unwrap();
        for sequence in ON_H200.lines() {
            let (mut places, mut live) = (Places::OF_BLOCKS, BTreeMap::new());
            for (at, step) in sequence.split(' ').enumerate() {
                if let Some((pages, place)) = step.split_once('@') {
                    let (place, bytes) = (number(place), number(&pages[1..]) * PAGE);
                    assert_eq!(take(&mut places, bytes / MIB), place * PAGE / MIB, "step {at}: {step}");
                    live.insert(place, bytes);
                } else {
                    let place = number(&step[1..]);
                    places.release(END - place * PAGE, live.remove(&place).unwrap());
                }
            }
            assert!(live.is_empty() && places.chunks.is_empty());
        }
    }

    #[test]
    fn only_what_was_never_reserved_is_new() {
        let mut places = Places::OF_BLOCKS;
        let chunk = |places: &mut Places, mib: u64| {
            let (start, new) = places.take_chunk(mib * MIB).unwrap();
            (below(start), below(new.start), below(new.end))
        };
        assert_eq!(chunk(&mut places, 20), (32, 32, 0));
        assert_eq!(chunk(&mut places, 50), (96, 96, 32));
        // The chunk becomes a gap, which is followed by free addresses.
        places.release(END - 96 * MIB, 50 * MIB);
        assert_eq!(chunk(&mut places, 90), (128, 128, 96));
        places.release(END - 128 * MIB, 90 * MIB);
        assert_eq!(chunk(&mut places, 32), (64, 64, 64), "it is reserved already");
    }

    #[test]
    fn a_range_that_cannot_be_reserved_is_not_used() {
        let mut places = Places::OF_BLOCKS;
        let (start, _) = places.take_chunk(2 * MIB).unwrap();
        places.discard(start);
        assert_eq!([take(&mut places, 2), places.unused(40 * MIB).map_or(0, below)], [64, 128]);
    }

    #[test]
    fn what_does_not_fit_gets_no_place() {
        let mut places = Places::OF_BLOCKS;
        assert_eq!(
            [END, u64::MAX].map(|bytes| (places.take_hole(bytes), places.take_chunk(bytes))),
            [const { (None, None) }; 2]
        );
        assert_eq!(take(&mut places, (END - MIDDLE) / MIB), (END - MIDDLE) / MIB);
        assert_eq!((take(&mut places, 2), places.unused(1)), (0, None));
    }

    #[test]
    fn a_place_that_the_driver_chose_is_used_last() {
        let mut places = Places::OF_BLOCKS;
        places.release(16 << 30, 8 * MIB);
        assert_eq!(places.take_hole(6 * MIB), Some(16 << 30));
        assert_eq!([20, 6].map(|mib| take(&mut places, mib)), [32, 12]);
    }
}

//! The addresses of dry blocks.
//!
//! If several free blocks have the same size, PyTorch's allocator takes the one with the lowest address. Therefore the order of addresses
//! determines how its memory is divided, and must be as in the driver. On an H200 (driver 580), a block goes into the first hole that is
//! large enough, and a new range, in steps of 32 MiB, is below all others. (If the program leaves gaps in its own addresses, the driver
//! fills these as well.)
//!
//! The addresses are far from those that the driver would choose, which may be `0x4_0000_0000`: in a kernel's parameters, the numbers 0 and
//! 4 look like that address.
//!
//! A range stays reserved, with memory behind it, because a kernel may still use an address that is free.

use std::{collections::BTreeMap, mem};

/// Addresses are reserved in steps of this size, and physical memory is created in them.
pub(super) const PAGE: u64 = 2 << 20;

/// The range that contains all places. Memory of the host starts at 0x55 and ends with 0x7f. Near the end of the range, the upper halves of
/// addresses are not multiples of 256, which sizes often are. The lower half is for addresses that the program reserves.
const START: u64 = 0x5700 << 32;
const MIDDLE: u64 = 0x6880 << 32;
const END: u64 = 0x7a00 << 32;
/// A new range has a multiple of this size.
const STEP: u64 = 32 << 20;

#[derive(Debug)]
pub(super) struct Places {
    first: u64,
    /// Everything below is free.
    lowest: u64,
    /// The end addresses of the free ranges above that, by start address.
    holes: BTreeMap<u64, u64>,
}

/// A place for a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) start: u64,
    /// The end of a new range, which starts with this place and must be reserved.
    pub(super) new: Option<u64>,
}

impl Places {
    pub(super) const OF_BLOCKS: Self = Self { first: MIDDLE, lowest: END, holes: BTreeMap::new() };
    pub(super) const OF_PROGRAM: Self = Self { first: START, lowest: MIDDLE, holes: BTreeMap::new() };

    /// Returns a place for this many bytes, or `None` if there is none.
    pub(super) fn take(&mut self, bytes: u64) -> Option<Place> {
        let bytes = bytes.checked_next_multiple_of(PAGE)?;
        let hole = self.first_hole(bytes);
        let (start, end) = hole.or_else(|| self.new_range(bytes))?;
        self.holes.remove(&start);
        if start + bytes < end {
            self.holes.insert(start + bytes, end);
        }
        Some(Place { start, new: hole.is_none().then_some(end) })
    }

    /// Removes the free part of a range that cannot be reserved.
    pub(super) fn discard(&mut self, start: u64, end: u64) {
        self.holes.retain(|hole, _| !(start..end).contains(hole));
    }

    fn first_hole(&self, bytes: u64) -> Option<(u64, u64)> {
        self.holes.iter().map(|(start, end)| (*start, *end)).find(|(start, end)| end - start >= bytes)
    }

    fn new_range(&mut self, bytes: u64) -> Option<(u64, u64)> {
        let start =
            self.lowest.checked_sub(bytes.checked_next_multiple_of(STEP)?).filter(|start| *start >= self.first)?;
        Some((start, mem::replace(&mut self.lowest, start)))
    }

    /// Frees a place.
    pub(super) fn release(&mut self, start: u64, bytes: u64) {
        if start < self.lowest || start >= END || start < self.first {
            return;
        }
        let mut hole = (start, start + bytes.next_multiple_of(PAGE));
        if let Some(end) = self.holes.remove(&hole.1) {
            hole.1 = end;
        }
        match self.holes.range_mut(..start).next_back() {
            Some((_, end)) if *end == start => *end = hole.1,
            _ => _ = self.holes.insert(hole.0, hole.1),
        }
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

    /// Takes a place, which is new if it is not in a hole. Returns the distance of its start from the end, in MiB.
    fn take(places: &mut Places, mib: u64) -> u64 {
        places.take(mib * MIB).map_or(0, |place| below(place.start))
    }

    #[test]
    fn a_place_is_in_the_first_hole_or_below_all_others() {
        let mut places = Places::OF_BLOCKS;
        // These are the driver's places for the segments of a training step.
        let taken = [20, 20, 50, 14, 12, 6, 2].map(|mib| places.take(mib * MIB).unwrap());
        assert_eq!(taken.map(|place| below(place.start)), [32, 64, 128, 78, 44, 12, 6]);
        let new = taken.map(|place| place.new.map(below));
        assert_eq!(new, [Some(0), Some(32), Some(64), None, None, None, None]);
        places.release(taken[2].start, 50 * MIB);
        places.release(taken[3].start, 14 * MIB);
        assert_eq!(take(&mut places, 60), 128, "two holes that touch are one");
        places.release(taken[0].start, 20 * MIB);
        assert_eq!([4, 4, 20].map(|mib| take(&mut places, mib)), [68, 32, 160]);
    }

    #[test]
    fn a_range_that_cannot_be_reserved_is_not_used() {
        let mut places = Places::OF_BLOCKS;
        let Place { start, new } = places.take(2 * MIB).unwrap();
        places.discard(start, new.unwrap());
        assert_eq!(take(&mut places, 2), 64);
    }

    #[test]
    fn what_does_not_fit_gets_no_place() {
        let mut places = Places::OF_BLOCKS;
        assert_eq!([END, u64::MAX].map(|bytes| places.take(bytes)), [None, None]);
        assert_eq!(take(&mut places, (END - MIDDLE) / MIB), (END - MIDDLE) / MIB);
        assert_eq!(places.take(2 * MIB), None);
        // A place that the driver chose is ignored.
        places.release(16 << 30, 2 * MIB);
        assert_eq!(places.take(2 * MIB), None);
    }
}

//! The addresses of dry blocks.
//!
//! If several free blocks have the same size, PyTorch's allocator takes the one with the lowest address. Therefore the order of addresses
//! determines how its memory is divided, and must be as in the driver. On an H200 (driver 580), a block goes into the first hole that is
//! large enough, and a new range, in steps of 32 MiB, is below all others. (If the program leaves gaps in its own addresses, the driver
//! fills these as well.)
//!
//! The addresses are far from those that the driver would choose, which may be `0x4_0000_0000`: in a kernel's parameters, the numbers 0 and
//! 4 look like that address.

use std::{collections::BTreeMap, mem};

/// Addresses are reserved in steps of this size, and physical memory is created in them.
pub(super) const PAGE: u64 = 2 << 20;

/// The range that contains all places. Memory of the host starts at 0x55 and ends with 0x7f. Near the end of the range, the upper halves of
/// addresses are not multiples of 256, which sizes often are.
const START: u64 = 0x5700 << 32;
const END: u64 = 0x7a00 << 32;
/// A new range has a multiple of this size.
const STEP: u64 = 32 << 20;

#[derive(Debug)]
pub(super) struct Places {
    /// Everything below is free.
    lowest: u64,
    /// The end addresses of the free ranges above that, by start address.
    holes: BTreeMap<u64, u64>,
}

impl Places {
    pub(super) const fn new() -> Self {
        Self { lowest: END, holes: BTreeMap::new() }
    }

    /// Returns a place for this many bytes, or 0 if there is none, which lets the driver choose.
    pub(super) fn take(&mut self, bytes: u64) -> u64 {
        let Some(bytes) = bytes.checked_next_multiple_of(PAGE) else { return 0 };
        let Some((start, end)) = self.first_hole(bytes).or_else(|| self.new_range(bytes)) else { return 0 };
        self.holes.remove(&start);
        if start + bytes < end {
            self.holes.insert(start + bytes, end);
        }
        start
    }

    fn first_hole(&self, bytes: u64) -> Option<(u64, u64)> {
        self.holes.iter().map(|(start, end)| (*start, *end)).find(|(start, end)| end - start >= bytes)
    }

    fn new_range(&mut self, bytes: u64) -> Option<(u64, u64)> {
        let start = self.lowest.checked_sub(bytes.checked_next_multiple_of(STEP)?).filter(|start| *start >= START)?;
        Some((start, mem::replace(&mut self.lowest, start)))
    }

    /// Frees a place.
    pub(super) fn release(&mut self, start: u64, bytes: u64) {
        if start < self.lowest || start >= END {
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

    #[test]
    fn a_place_is_in_the_first_hole_or_below_all_others() {
        let mut places = Places::new();
        // These are the driver's places for the segments of a training step.
        let taken = [20, 20, 50, 14, 12, 6, 2].map(|mib| places.take(mib * MIB));
        assert_eq!(taken.map(below), [32, 64, 128, 78, 44, 12, 6]);
        places.release(taken[2], 50 * MIB);
        places.release(taken[3], 14 * MIB);
        assert_eq!(below(places.take(60 * MIB)), 128, "two holes that touch are one");
        places.release(taken[0], 20 * MIB);
        assert_eq!([4, 4, 20].map(|mib| below(places.take(mib * MIB))), [68, 32, 160]);
    }

    #[test]
    fn the_driver_chooses_what_does_not_fit() {
        let mut places = Places::new();
        assert_eq!([END, u64::MAX].map(|bytes| places.take(bytes)), [0, 0]);
        assert_eq!(below(places.take(END - START)), (END - START) / MIB);
        assert_eq!(places.take(2 * MIB), 0);
        // A place that the driver chose is ignored.
        places.release(16 << 30, 2 * MIB);
        assert_eq!(places.take(2 * MIB), 0);
    }
}

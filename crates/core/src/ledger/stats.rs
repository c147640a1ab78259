//! The statistics of an allocator: bytes and blocks in use, their peaks, and their totals.

use super::delta::{Delta, GroupDelta};

/// A number that rises and falls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    pub current: u64,
    /// The highest value since the start, or since the last reset of the peaks.
    pub peak: u64,
    /// The sum of everything that was ever added.
    pub allocated: u64,
}

/// Blocks and bytes of one kind of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Requested bytes.
    pub bytes: Count,
    /// Numbers of blocks.
    pub blocks: Count,
}

impl Count {
    /// Returns the sum of everything that was ever removed.
    pub const fn freed(self) -> u64 {
        self.allocated - self.current
    }

    #[inline]
    fn apply(&mut self, delta: Delta, allocated: i64) {
        self.peak = self.peak.max(add_signed(self.current, delta.high));
        self.current = add_signed(self.current, delta.net);
        self.allocated = self.allocated.saturating_add_signed(allocated);
    }
}

impl Stat {
    #[inline]
    pub(super) fn apply(&mut self, delta: &GroupDelta) {
        self.bytes.apply(delta.bytes, delta.allocated);
        self.blocks.apply(delta.blocks, delta.allocations);
    }

    pub(super) fn reset_peaks(&mut self) {
        self.bytes.peak = self.bytes.current;
        self.blocks.peak = self.blocks.current;
    }
}

/// Adds a change. The result is never below 0, because only counted blocks are removed.
#[inline]
pub(super) fn add_signed(from: u64, by: i64) -> u64 {
    debug_assert!(from.checked_add_signed(by).is_some(), "{from} and {by}");
    from.wrapping_add_signed(by)
}

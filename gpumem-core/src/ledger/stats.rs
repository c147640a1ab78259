//! What an allocator would say of itself: bytes and blocks, now, at most, and in all.

use super::pending::{Delta, GroupDelta};

/// A figure that goes up and down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    pub current: u64,
    /// Since the start, or the last reset of the peaks.
    pub peak: u64,
    /// All that was ever added.
    pub allocated: u64,
}

/// Blocks and bytes of one kind of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    pub bytes: Count,
    pub blocks: Count,
}

impl Count {
    /// All that was ever taken away.
    pub const fn freed(self) -> u64 {
        self.allocated - self.current
    }

    #[inline]
    fn apply(&mut self, sum: Delta, allocated: u64) {
        self.peak = self.peak.max(moved(self.current, sum.high));
        self.current = moved(self.current, sum.net);
        self.allocated = self.allocated.saturating_add(allocated);
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

/// Nothing is taken away that was not there.
#[inline]
pub(super) fn moved(from: u64, by: i64) -> u64 {
    debug_assert!(from.checked_add_signed(by).is_some(), "{from} and {by}");
    from.wrapping_add_signed(by)
}

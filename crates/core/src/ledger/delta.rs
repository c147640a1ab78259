//! The sum of several changes.

/// The sum of several changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Delta {
    pub(super) net: i64,
    /// The highest value of `net` so far; at least 0.
    pub(super) high: i64,
}

impl Delta {
    pub(super) const ZERO: Self = Self { net: 0, high: 0 };

    #[inline]
    pub(super) fn add(&mut self, by: i64) {
        self.net += by;
        self.high = self.high.max(self.net);
    }

    /// Appends later changes.
    pub(super) fn append(&mut self, next: Self) {
        self.high = self.high.max(self.net + next.high);
        self.net += next.net;
    }
}

/// The sum of several events of one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GroupDelta {
    pub(super) bytes: Delta,
    pub(super) blocks: Delta,
    /// The sum of the bytes of all allocations. Below 0 if allocations are undone.
    pub(super) allocated: i64,
    pub(super) allocations: i64,
}

impl GroupDelta {
    /// Returns the delta of a block that is added or subtracted without an allocation.
    pub(super) fn of_block(blocks: i64, bytes: i64) -> Self {
        let [blocks, bytes] = [blocks, bytes].map(|net| Delta { net, high: net.max(0) });
        Self { bytes, blocks, ..Self::default() }
    }

    /// Returns the number of allocations and frees. Each block that was allocated and is not live was freed.
    #[inline]
    pub(super) fn events(&self) -> i64 {
        2 * self.allocations - self.blocks.net
    }
}

//! What an allocator would say of itself: bytes and blocks, now, at most, and in all.

/// A figure that goes up and down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) current: u64,
    /// Since the start, or the last reset of the peaks.
    pub(crate) peak: u64,
    /// All that was ever added.
    pub(crate) allocated: u64,
}

/// Blocks and bytes of one kind of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stat {
    pub(crate) bytes: Count,
    pub(crate) blocks: Count,
}

impl Count {
    /// All that was ever taken away.
    pub(crate) const fn freed(self) -> u64 {
        self.allocated - self.current
    }

    #[inline]
    fn add(&mut self, by: u64) {
        self.current += by;
        self.peak = self.peak.max(self.current);
        self.allocated += by;
    }

    #[inline]
    fn remove(&mut self, by: u64) {
        self.current -= by;
    }

    /// What was taken away is there after all.
    fn restore(&mut self, by: u64) {
        self.current += by;
        self.peak = self.peak.max(self.current);
    }
}

impl Stat {
    #[inline]
    pub(super) fn add(&mut self, bytes: u64) {
        self.bytes.add(bytes);
        self.blocks.add(1);
    }

    #[inline]
    pub(super) fn remove(&mut self, bytes: u64) {
        self.bytes.remove(bytes);
        self.blocks.remove(1);
    }

    pub(super) fn restore(&mut self, bytes: u64) {
        self.bytes.restore(bytes);
        self.blocks.restore(1);
    }

    pub(super) fn reset_peaks(&mut self) {
        self.bytes.peak = self.bytes.current;
        self.blocks.peak = self.blocks.current;
    }
}

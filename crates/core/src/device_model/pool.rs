//! The stream-ordered pool of a device.

use std::ops::Range;

use super::{
    blocks::Blocks,
    units::{POOL_STEP, round_up},
};

/// The device's stream-ordered pool.
#[derive(Debug, Clone)]
pub(super) struct StreamPool {
    pub(super) blocks: Blocks,
    pub(super) used: u64,
    /// The memory that was freed in stream order since the last synchronization. It is not in use, but cannot be
    /// returned to the device yet.
    pub(super) freed: u64,
    pub(super) reserved: u64,
    pub(super) used_high: u64,
    pub(super) reserved_high: u64,
    pub(super) release_threshold: u64,
}

impl StreamPool {
    pub(super) fn within(addresses: Range<u64>) -> Self {
        Self {
            blocks: Blocks::within(addresses),
            used: 0,
            freed: 0,
            reserved: 0,
            used_high: 0,
            reserved_high: 0,
            release_threshold: 0,
        }
    }

    /// Returns unused backing to the device, except `keep` bytes.
    pub(super) fn shrink_to(&mut self, keep: u64) {
        let keep = round_up(keep.max(self.used + self.freed), POOL_STEP).unwrap_or(u64::MAX);
        self.reserved = self.reserved.min(keep);
    }
}

//! The pending delta: the sum of the latest events, as long as all of them belong to one group and count in the same accounts.
//!
//! A block counts in a dozen places: for its kind, its device and all scopes around it. While events of one group follow each
//! other, all these counters change by the same amounts. Therefore the events are added up here, and the sum is applied to the
//! counters later. The sum consists of the net change and the highest value on the way (`Delta`). The peak of a counter is its
//! old value plus `high`.

use super::{
    delta::{Delta, GroupDelta},
    groups::GroupId,
    live::Attribution,
};
use crate::model::OwnerThread;

/// The sum of the latest events. It shares a cache line with the lock and the number of events, because each cache line that
/// several threads write moves between their processors.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct PendingDelta {
    pub(super) group: GroupId,
    /// The owner thread of the events. [`OwnerThread::LAST`] if the owner does not matter, because no account is open or because
    /// all events come from threads in no scope.
    pub(super) owner: OwnerThread,
    /// Allocated minus freed blocks, and the highest value of that. No computer has room for 2^31 live blocks.
    blocks: i32,
    high_blocks: i32,
    bytes: Delta,
    allocated: i64,
    allocations: i64,
}

const _: () = assert!(size_of::<PendingDelta>() == 48);

impl PendingDelta {
    /// The group and the sum; `None` if there is no event.
    #[inline]
    pub(super) fn delta(&self) -> Option<(GroupId, GroupDelta)> {
        let delta = GroupDelta {
            bytes: self.bytes,
            blocks: Delta { net: self.blocks.into(), high: self.high_blocks.into() },
            allocated: self.allocated,
            allocations: self.allocations,
        };
        (self.group != GroupId::default()).then_some((self.group, delta))
    }

    /// Returns whether events of this attribution can be added.
    #[inline]
    pub(super) fn is_of(&self, attribution: Attribution) -> bool {
        self.group == attribution.group() && (self.owner == OwnerThread::LAST || self.owner == attribution.owner())
    }

    /// Adds a block: a new one, or one whose free failed.
    #[inline]
    pub(super) fn add(&mut self, bytes: i64) {
        self.bytes.add(bytes);
        self.blocks += 1;
        self.high_blocks = self.high_blocks.max(self.blocks);
    }

    /// Subtracts a block.
    #[inline]
    pub(super) fn subtract(&mut self, bytes: i64) {
        self.bytes.net -= bytes;
        self.blocks -= 1;
    }

    /// Counts an allocation. Its block is added by [`add`](Self::add).
    #[inline]
    pub(super) fn allocated(&mut self, bytes: u64) {
        // The sum wraps: a hook must not panic, even in a debug build.
        self.allocated = self.allocated.wrapping_add_unsigned(bytes);
        self.allocations += 1;
    }

    /// Takes an allocation back, because it now counts for another group.
    pub(super) fn take_back(&mut self, bytes: u64) {
        self.allocated = self.allocated.wrapping_sub_unsigned(bytes);
        self.allocations -= 1;
    }
}

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

#[cfg(test)]
mod tests {
    use super::{
        super::{stats::Stat, tests::numbers},
        *,
    };

    fn delta(pending: &PendingDelta) -> GroupDelta {
        let (_, delta) = PendingDelta { group: GroupId(1), ..*pending }.delta().expect("a group");
        delta
    }

    /// The results do not depend on how many events are applied at once.
    #[test]
    fn several_events_at_once_give_the_figures_of_single_events() {
        let mut random = numbers(1);
        for _ in 0..300 {
            let (mut by_event, mut by_delta) = (Stat::default(), Stat::default());
            let (mut appended, mut expected) = (Delta::ZERO, Delta::ZERO);
            let mut pending = PendingDelta::default();
            let mut live = Vec::new();
            for _ in 0..100 {
                let mut event = PendingDelta::default();
                if live.is_empty() || random(2) == 0 {
                    let bytes = random(1000);
                    live.push(bytes);
                    for pending in [&mut event, &mut pending] {
                        pending.add(bytes.cast_signed());
                        pending.allocated(bytes);
                    }
                } else {
                    let bytes = live.swap_remove(usize::try_from(random(live.len() as u64)).unwrap());
                    for pending in [&mut event, &mut pending] {
                        pending.subtract(bytes.cast_signed());
                    }
                }
                by_event.apply(&delta(&event));
                expected.append(event.bytes);
                if random(4) == 0 {
                    appended.append(pending.bytes);
                    by_delta.apply(&delta(&std::mem::take(&mut pending)));
                    assert_eq!((by_delta, appended), (by_event, expected));
                }
            }
        }
    }
}

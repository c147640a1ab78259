//! Neighbouring events of one group, before they are counted.
//!
//! Whatever counts the blocks of a group (its kind, its device, its scopes) moves by the same amounts while no other
//! group's events come between. So an event is added up here, once, and the counters are told later what all came to, and the
//! highest that it came to on the way: their peak is what they had before, and that.

use super::groups::GroupId;

/// What several changes come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Delta {
    pub(super) net: i64,
    /// The highest that `net` was, from 0.
    pub(super) high: i64,
}

impl Delta {
    pub(super) const NOTHING: Self = Self { net: 0, high: 0 };

    #[inline]
    fn add(&mut self, by: i64) {
        self.net += by;
        self.high = self.high.max(self.net);
    }

    /// More changes, after these.
    pub(super) fn append(&mut self, next: Self) {
        self.high = self.high.max(self.net + next.high);
        self.net += next.net;
    }
}

/// What several blocks that came and went come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GroupDelta {
    pub(super) bytes: Delta,
    pub(super) blocks: Delta,
    /// Bytes in all of those that were allocated, and how many they are.
    pub(super) allocated: u64,
    pub(super) allocations: u64,
}

impl GroupDelta {
    /// Allocations and frees. Every block that did not stay was freed.
    #[inline]
    pub(super) fn events(&self) -> i64 {
        2 * self.allocations.cast_signed() - self.blocks.net
    }
}

/// Events of this group. It lies in one line of the cache, with the lock and the number of events: when threads allocate by
/// turns, all that is written travels between their processors.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct PendingDelta {
    pub(super) group: GroupId,
    /// Blocks that came less those that went, and the high of them. There is no room for 2^31 live blocks in a computer.
    blocks: i32,
    high_blocks: i32,
    bytes: Delta,
    allocated: u64,
    allocations: u64,
}

const _: () = assert!(size_of::<PendingDelta>() == 48);

impl PendingDelta {
    /// What it came to, if there was one.
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

    /// A block is there, for the first time or still.
    #[inline]
    pub(super) fn add(&mut self, bytes: i64) {
        self.bytes.add(bytes);
        self.blocks += 1;
        self.high_blocks = self.high_blocks.max(self.blocks);
    }

    /// A block is there no more.
    #[inline]
    pub(super) fn subtract(&mut self, bytes: i64) {
        self.bytes.net -= bytes;
        self.blocks -= 1;
    }

    /// The newest net was an allocation.
    #[inline]
    pub(super) fn allocated(&mut self, bytes: u64) {
        // A hook must not panic, in debug builds as well.
        self.allocated = self.allocated.wrapping_add(bytes);
        self.allocations += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{stats::Stat, tests::numbers},
        *,
    };

    fn delta(pending: &PendingDelta) -> GroupDelta {
        let (_, delta) = PendingDelta { group: GroupId(1), ..*pending }.delta().expect("it has a group");
        delta
    }

    /// However events are split into runs, the figures are those of each event told by itself.
    #[test]
    fn runs_come_to_what_their_events_come_to() {
        let mut random = numbers(1);
        for _ in 0..if cfg!(miri) { 5 } else { 300 } {
            let (mut by_event, mut by_run) = (Stat::default(), Stat::default());
            let (mut unapplied, mut told) = (Delta::NOTHING, Delta::NOTHING);
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
                told.append(event.bytes);
                if random(4) == 0 {
                    unapplied.append(pending.bytes);
                    by_run.apply(&delta(&std::mem::take(&mut pending)));
                    assert_eq!((by_run, unapplied), (by_event, told));
                }
            }
        }
    }
}

//! Neighbouring events of one origin, before they are counted.
//!
//! Whatever counts the blocks of an origin (its kind, its device, its scopes) moves by the same amounts while no other
//! origin's events come between. So an event is added up here, once, and the counters are told later what all came to, and the
//! highest that it came to on the way: their peak is what they had before, and that.

use super::origins::OriginId;

/// What several changes come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) change: i64,
    /// The highest that `change` was, from 0.
    pub(super) most: i64,
}

impl Sum {
    pub(super) const NOTHING: Self = Self { change: 0, most: 0 };

    #[inline]
    fn add(&mut self, by: i64) {
        self.change += by;
        self.most = self.most.max(self.change);
    }

    /// More changes, after these.
    pub(super) fn append(&mut self, next: Self) {
        self.most = self.most.max(self.change + next.most);
        self.change += next.change;
    }
}

/// What several blocks that came and went come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sums {
    pub(super) bytes: Sum,
    pub(super) blocks: Sum,
    /// Bytes in all of those that were allocated, and how many they are.
    pub(super) allocated: u64,
    pub(super) allocations: u64,
}

impl Sums {
    /// Allocations and frees. Every block that did not stay was freed.
    #[inline]
    pub(super) fn events(&self) -> i64 {
        2 * self.allocations.cast_signed() - self.blocks.change
    }
}

/// Events of this origin. It lies in one line of the cache, with the lock and the number of events: when threads allocate by
/// turns, all that is written travels between their processors.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Run {
    pub(super) origin: OriginId,
    /// Blocks that came less those that went, and the most of them. There is no room for 2^31 live blocks in a computer.
    blocks: i32,
    most_blocks: i32,
    bytes: Sum,
    allocated: u64,
    allocations: u64,
}

const _: () = assert!(size_of::<Run>() == 48);

impl Run {
    /// What it came to, if there was one.
    #[inline]
    pub(super) fn sums(&self) -> Option<(OriginId, Sums)> {
        let sums = Sums {
            bytes: self.bytes,
            blocks: Sum { change: self.blocks.into(), most: self.most_blocks.into() },
            allocated: self.allocated,
            allocations: self.allocations,
        };
        (self.origin != OriginId::default()).then_some((self.origin, sums))
    }

    /// A block is there, for the first time or still.
    #[inline]
    pub(super) fn add(&mut self, bytes: i64) {
        self.bytes.add(bytes);
        self.blocks += 1;
        self.most_blocks = self.most_blocks.max(self.blocks);
    }

    /// A block is there no more.
    #[inline]
    pub(super) fn subtract(&mut self, bytes: i64) {
        self.bytes.change -= bytes;
        self.blocks -= 1;
    }

    /// The newest change was an allocation.
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

    fn sums(run: &Run) -> Sums {
        let (_, sums) = Run { origin: OriginId(1), ..*run }.sums().expect("it has an origin");
        sums
    }

    /// However events are split into runs, the figures are those of each event told by itself.
    #[test]
    fn runs_come_to_what_their_events_come_to() {
        let mut random = numbers(1);
        for _ in 0..if cfg!(miri) { 5 } else { 300 } {
            let (mut by_event, mut by_run) = (Stat::default(), Stat::default());
            let (mut untold, mut told) = (Sum::NOTHING, Sum::NOTHING);
            let mut run = Run::default();
            let mut live = Vec::new();
            for _ in 0..100 {
                let mut event = Run::default();
                if live.is_empty() || random(2) == 0 {
                    let bytes = random(1000);
                    live.push(bytes);
                    for run in [&mut event, &mut run] {
                        run.add(bytes.cast_signed());
                        run.allocated(bytes);
                    }
                } else {
                    let bytes = live.swap_remove(usize::try_from(random(live.len() as u64)).unwrap());
                    for run in [&mut event, &mut run] {
                        run.subtract(bytes.cast_signed());
                    }
                }
                by_event.take(&sums(&event));
                told.append(event.bytes);
                if random(4) == 0 {
                    untold.append(run.bytes);
                    by_run.take(&sums(&std::mem::take(&mut run)));
                    assert_eq!((by_run, untold), (by_event, told));
                }
            }
        }
    }
}

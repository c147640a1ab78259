//! What was live at one moment, and what came and went between two.

use std::{cmp::Reverse, collections::BTreeMap};

use gpumem_core::model::MemKind;

use super::{BlockLife, ChangeKind, History, LIVE, Moment, Origin};

/// Blocks of one origin on one device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held<'a> {
    /// In [`History::devices`].
    pub(crate) device: u16,
    pub(crate) origin: &'a Origin,
    /// Between two moments: below 0 if more was freed than allocated.
    pub(crate) bytes: i64,
    pub(crate) blocks: i64,
}

impl History {
    /// The last change up to a moment, of each device: each has its own peak.
    pub(crate) fn changes_at(&self, moment: Moment) -> Vec<Option<u32>> {
        let change = self.change_at(moment);
        self.devices.iter().map(|device| if moment == Moment::Peak { device.peak_at } else { change }).collect()
    }

    /// What was live on each device after a change, the largest first. `None`: at the beginning.
    pub(crate) fn held_after(&self, changes: &[Option<u32>]) -> Vec<Vec<Held<'_>>> {
        let mut sums = Sums::new(self);
        // Blocks stand in the order in which they came.
        let last = changes.iter().flatten().max();
        let born = last.map_or(0, |last| self.blocks.partition_point(|block| block.born <= *last));
        for (number, block) in (0_u32..).zip(&self.blocks[..born]) {
            if let Some(change) = changes[usize::from(block.device)]
                && block.born <= change
                && change < block.died
            {
                sums.add(block, self.bytes_after(number, change).cast_signed(), 1);
            }
        }
        sums.held(self)
    }

    /// What more was live on each device after the second change than after the first.
    pub(crate) fn held_between(&self, changes: &[(Option<u32>, Option<u32>)]) -> Vec<Vec<Held<'_>>> {
        // The changes between them, and the sign of these.
        let between = |(from, to): &(Option<u32>, Option<u32>)| {
            let [from, to] = [from, to].map(|change| change.map_or(0, |change| change as usize + 1));
            (from.min(to), from.max(to), if from <= to { 1 } else { -1 })
        };
        let between: Vec<_> = changes.iter().map(between).collect();
        let mut sums = Sums::new(self);
        for (at, change) in self.changes.iter().enumerate() {
            let block = &self.blocks[change.block as usize];
            let (first, end, sign) = between[usize::from(block.device)];
            if !(first..end).contains(&at) {
                continue;
            }
            sums.add(block, sign * change.delta, sign * change.kind.blocks());
        }
        sums.held(self)
    }

    /// All that was ever allocated.
    pub(crate) fn allocated(&self) -> Vec<Held<'_>> {
        let mut sums = Sums::new(self);
        for block in &self.blocks {
            if self.changes[block.born as usize].kind == ChangeKind::Alloc {
                sums.add(block, block.bytes.cast_signed(), 1);
            }
        }
        sums.held(self).into_iter().flatten().collect()
    }

    /// The most that was live on each device of each kind that is not in its memory, each at its own moment: bytes and blocks.
    pub(crate) fn most_besides(&self) -> Vec<Vec<(String, i64, i64)>> {
        let mut sums = vec![[[(0_i64, 0_i64); 2]; MemKind::ALL.len()]; self.devices.len()];
        for change in &self.changes {
            let block = &self.blocks[change.block as usize];
            let kind = self.origins[block.origin as usize].kind;
            let at = MemKind::ALL.iter().position(|known| *known == kind);
            let Some(at) = at.filter(|_| !kind.is_on_device()) else { continue };
            let [now, most] = &mut sums[usize::from(block.device)][at];
            *now = (now.0 + change.delta, now.1 + change.kind.blocks());
            *most = (*most).max(*now);
        }
        let of_device = |kinds: &[[(i64, i64); 2]; MemKind::ALL.len()]| {
            let used = MemKind::ALL.iter().zip(kinds).filter(|(_, [_, (bytes, _)])| *bytes > 0);
            used.map(|(kind, [_, (bytes, blocks)])| (kind.name().to_owned(), *bytes, *blocks)).collect()
        };
        sums.iter().map(of_device).collect()
    }

    /// The numbers of the blocks that are live after a change.
    pub(crate) fn blocks_after(&self, change: u32) -> impl Iterator<Item = u32> {
        let born = self.blocks.partition_point(|block| block.born <= change);
        (0_u32..).zip(&self.blocks[..born]).filter(move |(_, block)| block.died > change).map(|(number, _)| number)
    }

    /// The last change; `None` if there is none.
    pub(crate) fn last_change(&self) -> Option<u32> {
        u32::try_from(self.changes.len()).unwrap_or(LIVE).checked_sub(1)
    }
}

/// Sums by origin. An origin is on one device.
struct Sums(Vec<Sum>);

#[derive(Clone, Copy, Default)]
struct Sum {
    bytes: i64,
    blocks: i64,
    device: u16,
}

impl Sums {
    fn new(history: &History) -> Self {
        Self(vec![Sum::default(); history.origins.len()])
    }

    fn add(&mut self, block: &BlockLife, bytes: i64, blocks: i64) {
        let sum = &mut self.0[block.origin as usize];
        *sum = Sum { bytes: sum.bytes + bytes, blocks: sum.blocks + blocks, device: block.device };
    }

    /// By device.
    fn held(self, history: &History) -> Vec<Vec<Held<'_>>> {
        let mut held: Vec<Vec<Held<'_>>> = history.devices.iter().map(|_| Vec::new()).collect();
        for (Sum { bytes, blocks, device }, origin) in self.0.into_iter().zip(&history.origins) {
            if (bytes, blocks) != (0, 0) {
                held[usize::from(device)].push(Held { device, origin, bytes, blocks });
            }
        }
        for held in &mut held {
            held.sort_by_key(|held| Reverse(held.bytes));
        }
        held
    }
}

/// Bytes and blocks by what `name` says, the most bytes first.
pub(crate) fn sums_by(held: &[Held<'_>], name: impl Fn(&Origin) -> String) -> Vec<(String, i64, i64)> {
    let mut sums: BTreeMap<String, (i64, i64)> = BTreeMap::new();
    for held in held {
        let sum = sums.entry(name(held.origin)).or_default();
        sum.0 += held.bytes;
        sum.1 += held.blocks;
    }
    let mut sums: Vec<_> = sums.into_iter().map(|(name, (bytes, blocks))| (name, bytes, blocks)).collect();
    sums.sort_by_key(|(_, bytes, _)| Reverse(bytes.unsigned_abs()));
    sums
}

//! What was live at one moment, and what came and went between two.

use std::{cmp::Reverse, collections::BTreeMap};

use gpumem_core::model::MemKind;

use super::{ChangeKind, History, LIVE, Origin};

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
    /// What was live after a change, the largest first. `None`: at the beginning.
    pub(crate) fn held_after(&self, change: Option<u32>) -> Vec<Held<'_>> {
        let Some(change) = change else { return Vec::new() };
        let mut sums = Sums::default();
        // Blocks stand in the order in which they came.
        let born = self.blocks.partition_point(|block| block.born <= change);
        for (number, block) in (0_u32..).zip(&self.blocks[..born]) {
            if block.died > change {
                sums.add(block.device, block.origin, self.bytes_after(number, change).cast_signed(), 1);
            }
        }
        sums.held(self)
    }

    /// What more was live after the second change than after the first.
    pub(crate) fn held_between(&self, from: Option<u32>, to: Option<u32>) -> Vec<Held<'_>> {
        if from > to {
            let mut held = self.held_between(to, from);
            for held in &mut held {
                (held.bytes, held.blocks) = (-held.bytes, -held.blocks);
            }
            held.sort_by_key(|held| Reverse(held.bytes));
            return held;
        }
        let first = from.map_or(0, |from| from as usize + 1);
        let end = to.map_or(0, |to| to as usize + 1);
        let mut sums = Sums::default();
        for change in self.changes.get(first..end).unwrap_or_default() {
            let block = &self.blocks[change.block as usize];
            let blocks = change.kind.blocks();
            sums.add(block.device, block.origin, change.delta, blocks);
        }
        sums.held(self)
    }

    /// All that was ever allocated.
    pub(crate) fn allocated(&self) -> Vec<Held<'_>> {
        let mut sums = Sums::default();
        for block in &self.blocks {
            if self.changes[block.born as usize].kind == ChangeKind::Alloc {
                sums.add(block.device, block.origin, block.bytes.cast_signed(), 1);
            }
        }
        sums.held(self)
    }

    /// The most that was live of each kind that is not on the device, each at its own moment: bytes and blocks.
    pub(crate) fn most_besides(&self, device: u16) -> Vec<(String, i64, i64)> {
        let mut now = [(0_i64, 0_i64); MemKind::ALL.len()];
        let mut most = now;
        for change in &self.changes {
            let block = &self.blocks[change.block as usize];
            let kind = self.origins[block.origin as usize].kind;
            let at = MemKind::ALL.iter().position(|known| *known == kind);
            let Some(at) = at.filter(|_| block.device == device && !kind.is_on_device()) else { continue };
            now[at].0 += change.delta;
            now[at].1 += change.kind.blocks();
            most[at] = most[at].max(now[at]);
        }
        let kinds = MemKind::ALL.iter().zip(most).filter(|(_, (bytes, _))| *bytes > 0);
        kinds.map(|(kind, (bytes, blocks))| (kind.name().to_owned(), bytes, blocks)).collect()
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

#[derive(Default)]
struct Sums {
    /// By device, then by origin.
    by_device: Vec<Vec<(i64, i64)>>,
}

impl Sums {
    fn add(&mut self, device: u16, origin: u32, bytes: i64, blocks: i64) {
        let (device, origin) = (usize::from(device), origin as usize);
        if self.by_device.len() <= device {
            self.by_device.resize(device + 1, Vec::new());
        }
        let sums = &mut self.by_device[device];
        if sums.len() <= origin {
            sums.resize(origin + 1, (0, 0));
        }
        sums[origin].0 += bytes;
        sums[origin].1 += blocks;
    }

    fn held(self, history: &History) -> Vec<Held<'_>> {
        let mut held = Vec::new();
        for (device, sums) in (0_u16..).zip(self.by_device) {
            for ((bytes, blocks), origin) in sums.into_iter().zip(&history.origins) {
                if (bytes, blocks) != (0, 0) {
                    held.push(Held { device, origin, bytes, blocks });
                }
            }
        }
        held.sort_by_key(|held| Reverse(held.bytes));
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

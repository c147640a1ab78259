//! The memory that was live at one moment, and the changes between two moments.

use std::collections::HashMap;

use gpumem_core::model::MemKind;

use super::{
    ChangeKind,
    block_lives::BlockLife,
    names::Origin,
    origin_sums::{OriginSum, Sum, Sums},
    recorded::History,
    time::Moment,
};

impl History {
    /// Returns the last change up to a moment, for each device in the order of [`History::devices`]. `None` if the
    /// moment is before the first change. Each device has its own peak.
    pub(crate) fn changes_at(&self, moment: Moment) -> Vec<Option<u32>> {
        let change = self.change_at(moment);
        self.devices.iter().map(|device| if moment == Moment::Peak { device.peak_at } else { change }).collect()
    }

    /// Returns the blocks of each device that were live after its change in `changes`, each with its size at that time.
    /// [`changes_at`](Self::changes_at) describes the list.
    pub(crate) fn live_blocks(&self, changes: &[Option<u32>]) -> impl Iterator<Item = (BlockLife, u64)> {
        let last = changes.iter().copied().flatten().max();
        let born = last.into_iter().flat_map(move |last| self.lives.born_until(last));
        born.filter_map(move |(number, block)| {
            let change = changes[usize::from(block.device)].filter(|change| block.is_live_after(*change))?;
            Some((block, self.lives.bytes_after(number, change)))
        })
    }

    /// Returns the sums of [`live_blocks`](Self::live_blocks) for each device, the largest first.
    pub(crate) fn held_after(&self, changes: &[Option<u32>]) -> Vec<Vec<OriginSum<'_>>> {
        let mut sums = Sums::new(self.origins.len());
        for (block, bytes) in self.live_blocks(changes) {
            sums.add((block.device, block.origin), bytes.cast_signed(), 1);
        }
        sums.held(&self.origins, self.devices.len())
    }

    /// Returns how much the live memory of each device grew from the first change to the second one.
    pub(crate) fn held_between(&self, changes: &[(Option<u32>, Option<u32>)]) -> Vec<Vec<OriginSum<'_>>> {
        // The changes between the two, and the sign with which they count.
        let between = |(from, to): &(Option<u32>, Option<u32>)| {
            let [from, to] = [from, to].map(|change| change.map_or(0, |change| change as usize + 1));
            (from.min(to), from.max(to), if from <= to { 1 } else { -1 })
        };
        let between: Vec<_> = changes.iter().map(between).collect();
        let mut sums = Sums::new(self.origins.len());
        for (at, change) in self.lives.changes().enumerate() {
            let block = self.lives.block(change.block);
            let (first, end, sign) = between[usize::from(block.device)];
            if !(first..end).contains(&at) {
                continue;
            }
            let origin = (block.device, block.origin);
            sums.add(origin, sign * change.delta, sign * change.kind.blocks());
        }
        sums.held(&self.origins, self.devices.len())
    }

    /// Returns all memory that each origin allocated.
    pub(crate) fn allocated(&self) -> Vec<OriginSum<'_>> {
        let mut sums = Sums::new(self.origins.len());
        for change in self.lives.changes().filter(|change| change.kind == ChangeKind::Allocated) {
            let block = self.lives.block(change.block);
            sums.add((block.device, block.origin), change.delta, 1);
        }
        sums.held(&self.origins, self.devices.len()).into_iter().flatten().collect()
    }

    /// Returns the peak of each kind of memory outside the device (such as pinned host memory), for each device.
    pub(crate) fn peaks_off_device(&self) -> Vec<Vec<Sum>> {
        let mut sums = vec![[[(0_i64, 0_i64); 2]; MemKind::ALL.len()]; self.devices.len()];
        let is_used = self.origins.iter().any(|origin| !origin.kind.is_on_device());
        for change in is_used.then(|| self.lives.changes()).into_iter().flatten() {
            let block = self.lives.block(change.block);
            let kind = self.origins[block.origin as usize].kind;
            let at = MemKind::ALL.iter().position(|known| *known == kind);
            let Some(at) = at.filter(|_| !kind.is_on_device()) else { continue };
            let [now, most] = &mut sums[usize::from(block.device)][at];
            *now = (now.0 + change.delta, now.1 + change.kind.blocks());
            *most = (*most).max(*now);
        }
        let of_device = |kinds: &[[(i64, i64); 2]; MemKind::ALL.len()]| {
            let used = MemKind::ALL.iter().zip(kinds).filter(|(_, [_, (bytes, _)])| *bytes > 0);
            used.map(|(kind, [_, (bytes, blocks)])| Sum {
                name: kind.name().to_owned(),
                bytes: *bytes,
                blocks: *blocks,
            })
            .collect()
        };
        sums.iter().map(of_device).collect()
    }

    /// Returns the pinned memory of PyTorch's allocator at its peak, by place, for each device. These are the blocks
    /// whose sizes are powers of two, because the allocator rounds each request up to one.
    pub(crate) fn rounded_pinned(&self) -> Vec<Vec<Sum>> {
        let is_pinned =
            |origin: &Origin| origin.kind == MemKind::PinnedHost && origin.library.as_deref() == Some("PyTorch");
        let is_of_pytorch: Vec<bool> = self.origins.iter().map(is_pinned).collect();
        let mut sums = vec![Vec::new(); self.devices.len()];
        if !is_of_pytorch.contains(&true) {
            return sums;
        }
        let is_rounded = |block: &BlockLife| is_of_pytorch[block.origin as usize] && block.bytes.is_power_of_two();
        // The current sum, the highest sum, and the change that reached it.
        let mut peaks = vec![(0_i64, 0_i64, 0_u32); self.devices.len()];
        for (at, change) in (0..).zip(self.lives.changes()) {
            let block = self.lives.block(change.block);
            let (now, most, change_of_most) = &mut peaks[usize::from(block.device)];
            if is_rounded(&block) {
                *now += change.delta;
                if *now > *most {
                    (*most, *change_of_most) = (*now, at);
                }
            }
        }
        let changes: Vec<_> = peaks.iter().map(|(_, most, change)| (*most > 0).then_some(*change)).collect();
        let mut by_place: Vec<HashMap<String, (i64, i64)>> = vec![HashMap::new(); self.devices.len()];
        for (block, bytes) in self.live_blocks(&changes).filter(|(block, _)| is_rounded(block)) {
            let place = self.origins[block.origin as usize].place();
            let sum = by_place[usize::from(block.device)].entry(place).or_default();
            *sum = (sum.0 + bytes.cast_signed(), sum.1 + 1);
        }
        for (sums, by_place) in sums.iter_mut().zip(by_place) {
            sums.extend(by_place.into_iter().map(|(name, (bytes, blocks))| Sum { name, bytes, blocks }));
            sums.sort_by(|a: &Sum, b: &Sum| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
        }
        sums
    }
}

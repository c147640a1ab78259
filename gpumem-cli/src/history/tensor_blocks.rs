//! The tensors of PyTorch and their segments as blocks that come and go, as those of the driver do. What shows blocks can show them.

use std::collections::{BTreeMap, HashMap};

use gpumem_core::capture::AllocatorAction as Action;

use super::{
    BlockLife, Change, ChangeKind, LIVE,
    tensors::{Step, Tensors, remove_range},
};

/// A second list of blocks. Their bytes are a part of the driver's, and are not added to them.
#[derive(Debug, Default)]
pub(crate) struct TensorBlocks {
    pub(crate) changes: Vec<Change>,
    /// Their devices are numbers in [`Tensors::devices`], their origins in [`Tensors::origins`]; that of segments is the one after these.
    pub(crate) blocks: Vec<BlockLife>,
    /// The step with which each block came, in those of its device.
    pub(crate) steps: Vec<usize>,
    /// The change at which the tensors of each device reach their peak.
    pub(crate) peaks: Vec<Option<u32>>,
    /// Segments of which a part was freed: after which change, and how much was left.
    shrunk: HashMap<u32, Vec<(u32, u64)>>,
}

/// What is live on a device, by addresses.
#[derive(Default)]
struct Open {
    tensors: HashMap<u64, u32>,
    /// The length and the block of each part of a segment.
    segments: BTreeMap<u64, (u64, u32)>,
    /// What is left of segments.
    left: HashMap<u32, u64>,
}

impl Tensors {
    /// The blocks of all devices, in the order of their times.
    pub(crate) fn blocks(&self) -> TensorBlocks {
        let steps = |(device, history): (u16, &super::tensors::TensorHistory)| {
            let times = history.steps.iter().enumerate().map(move |(at, step)| (step.time, device, at));
            times.collect::<Vec<_>>()
        };
        let mut order: Vec<_> = (0_u16..).zip(&self.devices).flat_map(steps).collect();
        order.sort_unstable();
        let mut open: Vec<Open> = self.devices.iter().map(|_| Open::default()).collect();
        let mut made = TensorBlocks { peaks: vec![None; self.devices.len()], ..TensorBlocks::default() };
        for (_, device, at) in order {
            let history = &self.devices[usize::from(device)];
            let step = &history.steps[at];
            // A block that the program had freed before the history begins is no tensor.
            let next = history.steps[..history.older()].get(at + 1);
            let is_freed = |next: &Step| next.action == Action::FreeRequested && next.address == step.address;
            if step.action != Action::Alloc || !next.is_some_and(is_freed) {
                made.apply((at, step), device, &mut open[usize::from(device)], self.segment_origin());
            }
            if history.peak.is_some_and(|(_, peak)| peak == at) {
                made.peaks[usize::from(device)] =
                    u32::try_from(made.changes.len()).ok().and_then(|count| count.checked_sub(1));
            }
        }
        made
    }

    /// In place of the origin of segments.
    pub(crate) fn segment_origin(&self) -> u32 {
        u32::try_from(self.origins.len()).unwrap_or(u32::MAX)
    }
}

impl TensorBlocks {
    fn apply(&mut self, step: (usize, &Step), device: u16, open: &mut Open, segment_origin: u32) {
        let Step { time, action, address, bytes, origin, .. } = *step.1;
        match action {
            Action::Alloc => {
                self.free_tensor(time, open.tensors.remove(&address));
                open.tensors.insert(address, self.alloc(step, device, origin));
            }
            Action::FreeRequested => self.free_tensor(time, open.tensors.remove(&address)),
            Action::SegmentAlloc => {
                if let Some((length, block)) = open.segments.remove(&address) {
                    self.remove(time, block, length, &mut open.left);
                }
                let block = self.alloc(step, device, segment_origin);
                open.segments.insert(address, (bytes, block));
                open.left.insert(block, bytes);
            }
            Action::SegmentFree => {
                let Open { segments, left, .. } = open;
                remove_range(segments, address, bytes, |(_, block), bytes| self.remove(time, block, bytes, left));
            }
            Action::FreeCompleted | Action::OutOfMemory => {}
        }
    }

    fn change(&mut self, time: u64, block: u32, bytes: u64, kind: ChangeKind) -> u32 {
        let at = u32::try_from(self.changes.len()).unwrap_or(LIVE);
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let delta = if kind == ChangeKind::Alloc { bytes } else { -bytes };
        self.changes.push(Change { time, number: 0, delta, block, thread: 0, kind });
        at
    }

    fn alloc(&mut self, (at, step): (usize, &Step), device: u16, origin: u32) -> u32 {
        let Step { time, address, bytes, .. } = *step;
        let block = u32::try_from(self.blocks.len()).unwrap_or(LIVE);
        let born = self.change(time, block, bytes, ChangeKind::Alloc);
        self.blocks.push(BlockLife { key: address, bytes, born, died: LIVE, origin, device, context: 0 });
        self.steps.push(at);
        block
    }

    /// `None` if no tensor was at the address.
    fn free_tensor(&mut self, time: u64, block: Option<u32>) {
        if let Some(block) = block {
            self.free(time, block, self.blocks[block as usize].bytes);
        }
    }

    fn free(&mut self, time: u64, block: u32, bytes: u64) {
        self.blocks[block as usize].died = self.change(time, block, bytes, ChangeKind::Free);
    }

    /// Of a segment, a part goes or what is left of it.
    fn remove(&mut self, time: u64, block: u32, bytes: u64, left: &mut HashMap<u32, u64>) {
        let rest = left.get(&block).map_or(0, |left| left.saturating_sub(bytes));
        if rest == 0 {
            left.remove(&block);
            return self.free(time, block, bytes);
        }
        left.insert(block, rest);
        let at = self.change(time, block, bytes, ChangeKind::Shrink);
        self.shrunk.entry(block).or_default().push((at, rest));
    }

    /// The size of a block after a change.
    pub(crate) fn bytes_after(&self, block: u32, change: u32) -> u64 {
        super::bytes_after(self.shrunk.get(&block), self.blocks[block as usize].bytes, change)
    }
}

#[cfg(test)]
mod tests {
    use gpumem_core::{
        capture::AllocatorDevice,
        model::{Device, Family},
    };

    use super::*;
    use crate::history::tensors::TensorHistory;

    const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };

    fn tensors(older: u64, steps: &[(u64, Action, u64, u64)]) -> Tensors {
        let step = |(time, action, address, bytes): &(u64, Action, u64, u64)| Step {
            time: *time,
            action: *action,
            address: *address,
            bytes: *bytes,
            requested: *bytes,
            stream: 0,
            origin: 0,
        };
        let about = AllocatorDevice { device: DEVICE, older, known_from: None, said: None };
        let history = TensorHistory { about, steps: steps.iter().map(step).collect(), peak: None };
        Tensors { devices: vec![history], ..Tensors::default() }
    }

    /// The changes: their times, what they add, and their blocks.
    fn changes(tensors: &Tensors) -> Vec<(u64, i64, u32)> {
        tensors.blocks().changes.iter().map(|change| (change.time, change.delta, change.block)).collect()
    }

    #[test]
    fn parts_of_a_segment_go_one_after_the_other() {
        let steps =
            [(1, Action::SegmentAlloc, 0, 60), (2, Action::SegmentFree, 20, 20), (3, Action::SegmentFree, 0, 100)];
        let tensors = tensors(0, &steps);
        assert_eq!(changes(&tensors), [(1, 60, 0), (2, -20, 0), (3, -20, 0), (3, -20, 0)]);
        let blocks = tensors.blocks();
        assert_eq!((blocks.blocks[0].born, blocks.blocks[0].died), (0, 3));
        assert_eq!([0, 1, 2].map(|change| blocks.bytes_after(0, change)), [60, 40, 20]);
    }

    #[test]
    fn a_tensor_ends_when_the_program_frees_it() {
        let (alloc, requested, completed) = (Action::Alloc, Action::FreeRequested, Action::FreeCompleted);
        let steps = [(1, alloc, 8, 10), (2, requested, 8, 0), (3, completed, 8, 0), (4, requested, 8, 0)];
        assert_eq!(changes(&tensors(0, &steps)), [(1, 10, 0), (2, -10, 0)]);
        // At one address, one tensor is live.
        assert_eq!(
            changes(&tensors(0, &[(1, alloc, 8, 10), (2, alloc, 8, 30)])),
            [(1, 10, 0), (2, -10, 0), (2, 30, 1)]
        );
    }

    #[test]
    fn what_was_freed_before_the_history_is_no_tensor() {
        let (alloc, requested) = (Action::Alloc, Action::FreeRequested);
        let steps = [(5, alloc, 8, 10), (5, requested, 8, 0), (5, alloc, 16, 20), (6, alloc, 8, 30)];
        assert_eq!(changes(&tensors(3, &steps)), [(5, 20, 0), (6, 30, 1)]);
    }
}

//! The tensors of PyTorch and their segments as blocks that come and go, as those of the driver do. What shows blocks can show them.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, HashMap},
};

use gpumem_core::recording::AllocatorAction as Action;

use super::{
    ChangeKind,
    lives::{Lives, NewBlock, When},
    tensors::{AllocatorStep, TensorHistory, Tensors},
};
use crate::recording::remove_range;

/// A second list of blocks. Their bytes are a part of the driver's, and are not added to them.
#[derive(Debug, Default)]
pub(crate) struct TensorBlocks {
    /// The devices of the blocks are numbers in [`Tensors::devices`], their origins in [`Tensors::origins`]; that of segments is the one after
    /// these.
    pub(crate) lives: Lives,
    /// The step with which each block came, in those of its device.
    pub(crate) steps: Vec<usize>,
    /// The change at which the tensors of each device reach their peak.
    pub(crate) peaks: Vec<Option<u32>>,
}

/// What is live on a device, by addresses.
#[derive(Default)]
struct Open {
    tensors: HashMap<u64, u32>,
    /// The length and the block of each part of a segment.
    segments: BTreeMap<u64, (u64, u32)>,
}

impl Tensors {
    /// The blocks of all devices, in the order of their times.
    pub(crate) fn blocks(&self) -> TensorBlocks {
        // The first step of each device that is not applied yet. A list of all steps in their order would take more memory than the blocks.
        let first = |(device, history): (u16, &TensorHistory)| Some(Reverse((history.steps.first()?.time, device, 0)));
        let mut waiting: BinaryHeap<_> = (0..).zip(&self.devices).filter_map(first).collect();
        let mut open: Vec<Open> = self.devices.iter().map(|_| Open::default()).collect();
        let mut made = TensorBlocks { peaks: vec![None; self.devices.len()], ..TensorBlocks::default() };
        while let Some(Reverse((_, device, at))) = waiting.pop() {
            let history = &self.devices[usize::from(device)];
            let step = &history.steps[at];
            waiting.extend(history.steps.get(at + 1).map(|next| Reverse((next.time, device, at + 1))));
            // A block that the program had freed before the history begins is no tensor.
            let next = history.steps[..history.older_count()].get(at + 1);
            let is_freed = |next: &AllocatorStep| next.action == Action::FreeRequested && next.address == step.address;
            if step.action != Action::Alloc || !next.is_some_and(is_freed) {
                made.apply((at, step), device, &mut open[usize::from(device)], self.segment_origin());
            }
            if history.peak.is_some_and(|(_, peak)| peak == at) {
                made.peaks[usize::from(device)] =
                    u32::try_from(made.lives.change_count()).ok().and_then(|count| count.checked_sub(1));
            }
        }
        made
    }

    /// The number that stands in place of the origin of segments.
    pub(crate) fn segment_origin(&self) -> u32 {
        u32::try_from(self.origins.len()).unwrap_or(u32::MAX)
    }
}

impl TensorBlocks {
    fn apply(&mut self, step: (usize, &AllocatorStep), device: u16, open: &mut Open, segment_origin: u32) {
        let AllocatorStep { time, action, address, bytes, origin, .. } = *step.1;
        match action {
            Action::Alloc => {
                self.free_tensor(time, open.tensors.remove(&address));
                open.tensors.insert(address, self.alloc(step, (address, bytes), device, origin));
            }
            Action::FreeRequested => self.free_tensor(time, open.tensors.remove(&address)),
            Action::SegmentAlloc => {
                self.remove(step, (address, bytes), (device, segment_origin), &mut open.segments);
                let block = self.alloc(step, (address, bytes), device, segment_origin);
                open.segments.insert(address, (bytes, block));
            }
            Action::SegmentFree => {
                self.remove(step, (address, bytes), (device, segment_origin), &mut open.segments);
            }
            Action::FreeCompleted | Action::OutOfMemory => {}
        }
    }

    /// Begins a block of so many bytes at an address.
    fn alloc(&mut self, (at, step): (usize, &AllocatorStep), place: (u64, u64), device: u16, origin: u32) -> u32 {
        let (key, bytes) = place;
        self.steps.push(at);
        self.lives.begin(when(step.time), NewBlock { key, bytes, origin, device }, ChangeKind::Allocated).0
    }

    /// Ends a tensor, if one was at the address.
    fn free_tensor(&mut self, time: u64, block: Option<u32>) {
        if let Some(block) = block {
            self.lives.end(when(time), block, ChangeKind::Freed);
        }
    }

    /// Removes a range of addresses from the segments. What is left of a segment before and behind it becomes blocks of their own.
    fn remove(
        &mut self,
        step: (usize, &AllocatorStep),
        (address, bytes): (u64, u64),
        (device, origin): (u16, u32),
        segments: &mut BTreeMap<u64, (u64, u32)>,
    ) {
        let mut ended = Vec::new();
        remove_range(segments, address, bytes, |(_, block), _| ended.push(block));
        for block in &ended {
            self.lives.end(when(step.1.time), *block, ChangeKind::Freed);
        }
        let rests = [segments.range(..address).next_back(), segments.get_key_value(&address.saturating_add(bytes))];
        let rests = rests.map(|rest| rest.map(|(begin, (length, block))| (*begin, *length, *block)));
        for (begin, length, _) in rests.into_iter().flatten().filter(|(_, _, block)| ended.contains(block)) {
            let block = self.alloc(step, (begin, length), device, origin);
            segments.insert(begin, (length, block));
        }
    }
}

/// Steps of PyTorch have no number and no thread.
fn when(time: u64) -> When {
    When { time, number: 0, thread: 0 }
}

#[cfg(test)]
mod tests {
    use gpumem_core::{
        model::{Device, Family},
        recording::AllocatorDevice,
    };

    use super::*;

    const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };

    fn tensors(older: u64, steps: &[(u64, Action, u64, u64)]) -> Tensors {
        let step = |(time, action, address, bytes): &(u64, Action, u64, u64)| AllocatorStep {
            time: *time,
            action: *action,
            address: *address,
            bytes: *bytes,
            requested: *bytes,
            stream: 0,
            origin: 0,
            pool: 0,
        };
        let about = AllocatorDevice { device: DEVICE, older, known_from: None, said: None };
        let history =
            TensorHistory { about, steps: steps.iter().map(step).collect(), is_expandable: false, peak: None };
        Tensors { devices: vec![history], ..Tensors::default() }
    }

    /// The changes: their times, what they add, and their blocks.
    fn changes(tensors: &Tensors) -> Vec<(u64, i64, u32)> {
        tensors.blocks().lives.changes().map(|change| (change.time, change.delta, change.block)).collect()
    }

    #[test]
    fn what_is_left_of_a_segment_is_blocks() {
        let steps =
            [(1, Action::SegmentAlloc, 0, 60), (2, Action::SegmentFree, 20, 20), (3, Action::SegmentFree, 0, 100)];
        let tensors = tensors(0, &steps);
        let parts = [(2, -60, 0), (2, 20, 1), (2, 20, 2)];
        assert_eq!(changes(&tensors), [&[(1, 60, 0)], &parts[..], &[(3, -20, 2), (3, -20, 1)]].concat());
        let lives = tensors.blocks().lives;
        assert_eq!([1, 2].map(|block| lives.block(block).key), [0, 40]);
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

    /// PyTorch's clock is not the driver's.
    #[test]
    fn the_moment_of_a_refusal_is_the_nearest_one() {
        let second = 1_000_000_000;
        let steps = [(5, Action::Alloc, 8, 10), (20, Action::OutOfMemory, 0, 0), (30, Action::FreeRequested, 8, 0)];
        let tensors = tensors(0, &[&steps[..], &[(3 * second, Action::OutOfMemory, 0, 0)]].concat());
        let at = [10, 2 * second - 40, 2 * second + 40, 9 * second];
        assert_eq!(at.map(|time| tensors.devices[0].steps_at_refusal(time)), [2, 3, 4, 4]);
    }

    #[test]
    fn what_was_freed_before_the_history_is_no_tensor() {
        let (alloc, requested) = (Action::Alloc, Action::FreeRequested);
        let steps = [(5, alloc, 8, 10), (5, requested, 8, 0), (5, alloc, 16, 20), (6, alloc, 8, 30)];
        assert_eq!(changes(&tensors(3, &steps)), [(5, 20, 0), (6, 30, 1)]);
    }
}

//! PyTorch's tensors and segments as blocks that are allocated and freed, so that all reports of blocks can show them.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, HashMap},
};

use gpumem_recording::AllocatorAction as Action;

use super::{
    ChangeKind,
    allocator::{AllocatorStep, TensorHistory},
    block_lives::{Lives, NewBlock, When},
    device::DeviceHistory,
};
use crate::recording::remove_range;

/// A second list of blocks. Their bytes are part of the driver's blocks and are not added to them.
#[derive(Debug, Default)]
pub(crate) struct TensorBlocks {
    /// The blocks. Their devices and origins are indexes into the lists of `Tensors`.
    pub(crate) lives: Lives,
    /// The index that segments have instead of an origin.
    pub(crate) segment_origin: u32,
    /// The step that allocated each block, among the steps of its device.
    pub(crate) steps: Vec<usize>,
}

/// The live blocks of a device, by address.
#[derive(Default)]
struct Open {
    tensors: HashMap<u64, u32>,
    /// The length of each part of a segment, and its block.
    segments: BTreeMap<u64, (u64, u32)>,
}

impl TensorBlocks {
    /// Creates the blocks of all devices, in the order of their times, and counts them for the devices.
    pub(super) fn of(devices: &mut [TensorHistory], origins: usize) -> Self {
        // The first step of each device that is not applied yet. A sorted list of all steps would take more memory than
        // the blocks.
        let first = |(device, history): (u16, &TensorHistory)| Some(Reverse((history.steps.first()?.time, device, 0)));
        let mut waiting: BinaryHeap<_> = (0..).zip(&*devices).filter_map(first).collect();
        let mut open: Vec<Open> = devices.iter().map(|_| Open::default()).collect();
        let mut made = Self { segment_origin: u32::try_from(origins).unwrap_or(u32::MAX), ..Self::default() };
        while let Some(Reverse((_, device, at))) = waiting.pop() {
            let (history, open) = (&mut devices[usize::from(device)], &mut open[usize::from(device)]);
            let (step, older) = (history.steps[at], history.older_count());
            waiting.extend(history.steps.get(at + 1).map(|next| Reverse((next.time, device, at + 1))));
            // A block that the program had freed before the history starts is not a tensor.
            let next = history.steps[..older].get(at + 1);
            let is_freed = |next: &AllocatorStep| next.action == Action::FreeRequested && next.address == step.address;
            if step.action != Action::Alloc || !next.is_some_and(is_freed) {
                made.apply((at, &step), device, open, &mut history.live);
            }
            // The older steps together describe one moment. Only the state after the last of them can be a peak.
            if at + 1 == older {
                (history.live.peak, history.live.peak_at) = (0, None);
                history.live.count(made.lives.last_change().unwrap_or(0), 0, 0);
            }
            history.allocated.push(history.live.live);
        }
        made
    }

    fn apply(&mut self, step: (usize, &AllocatorStep), device: u16, open: &mut Open, live: &mut DeviceHistory) {
        let AllocatorStep { time, action, address, bytes, origin, .. } = *step.1;
        match action {
            Action::Alloc => {
                self.free_tensor(time, open.tensors.remove(&address), live);
                let (block, change) = self.alloc(step, (address, bytes), device, origin);
                live.count(change, 0, bytes);
                open.tensors.insert(address, block);
            }
            // A snapshot may lack the request.
            Action::FreeRequested | Action::FreeCompleted => {
                self.free_tensor(time, open.tensors.remove(&address), live);
            }
            Action::SegmentAlloc => {
                self.remove(step, (address, bytes), device, &mut open.segments);
                let (block, _) = self.alloc(step, (address, bytes), device, self.segment_origin);
                open.segments.insert(address, (bytes, block));
            }
            Action::SegmentFree => self.remove(step, (address, bytes), device, &mut open.segments),
            Action::OutOfMemory => {}
        }
    }

    /// Starts a block of this size at an address. Returns the block's id and the change.
    fn alloc(
        &mut self,
        (at, step): (usize, &AllocatorStep),
        place: (u64, u64),
        device: u16,
        origin: u32,
    ) -> (u32, u32) {
        let (key, bytes) = place;
        self.steps.push(at);
        self.lives.start(when(step.time), NewBlock { key, bytes, origin, device }, ChangeKind::Allocated)
    }

    /// Ends a tensor, if there was one at the address.
    fn free_tensor(&mut self, time: u64, block: Option<u32>, live: &mut DeviceHistory) {
        if let Some(block) = block {
            let change = self.lives.end(when(time), block, ChangeKind::Freed);
            live.count(change, self.lives.block(block).bytes, 0);
        }
    }

    /// Removes a range of addresses from the segments. The parts before and after the range become separate blocks.
    fn remove(
        &mut self,
        step: (usize, &AllocatorStep),
        (address, bytes): (u64, u64),
        device: u16,
        segments: &mut BTreeMap<u64, (u64, u32)>,
    ) {
        let mut ended = Vec::new();
        remove_range(segments, address, bytes, |(_, block), _| ended.push(block));
        for block in &ended {
            self.lives.end(when(step.1.time), *block, ChangeKind::Freed);
        }
        let rests = [segments.range(..address).next_back(), segments.get_key_value(&address.saturating_add(bytes))];
        let rests = rests.map(|rest| rest.map(|(start, (length, block))| (*start, *length, *block)));
        for (start, length, _) in rests.into_iter().flatten().filter(|(_, _, block)| ended.contains(block)) {
            let (block, _) = self.alloc(step, (start, length), device, self.segment_origin);
            segments.insert(start, (length, block));
        }
    }
}

/// PyTorch's steps have no event number and no thread.
fn when(time: u64) -> When {
    When { time, number: 0, thread: 0 }
}

#[cfg(test)]
mod tests {
    use gpumem_core::model::{Device, Family};
    use gpumem_recording::AllocatorDevice;

    use super::*;

    const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };

    fn tensors(older: u64, steps: &[(u64, Action, u64, u64)]) -> (TensorHistory, Lives) {
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
        let about = AllocatorDevice { device: DEVICE, older, known_from: None, reported: None };
        let mut all = [TensorHistory::new(about, steps.iter().map(step).collect(), false)];
        let lives = TensorBlocks::of(&mut all, 1).lives;
        let [history] = all;
        (history, lives)
    }

    /// Returns the time of each change, the bytes that it adds, and its block.
    fn changes((_, lives): &(TensorHistory, Lives)) -> Vec<(u64, i64, u32)> {
        lives.changes().map(|change| (change.time, change.delta, change.block)).collect()
    }

    #[test]
    fn what_is_left_of_a_segment_is_blocks() {
        let steps =
            [(1, Action::SegmentAlloc, 0, 60), (2, Action::SegmentFree, 20, 20), (3, Action::SegmentFree, 0, 100)];
        let tensors = tensors(0, &steps);
        let parts = [(2, -60, 0), (2, 20, 1), (2, 20, 2)];
        assert_eq!(changes(&tensors), [&[(1, 60, 0)], &parts[..], &[(3, -20, 2), (3, -20, 1)]].concat());
        assert_eq!([1, 2].map(|block| tensors.1.block(block).key), [0, 40]);
    }

    #[test]
    fn a_tensor_ends_when_the_program_frees_it() {
        let (alloc, requested, completed) = (Action::Alloc, Action::FreeRequested, Action::FreeCompleted);
        let steps = [(1, alloc, 8, 10), (2, requested, 8, 0), (3, completed, 8, 0), (4, requested, 8, 0)];
        assert_eq!(changes(&tensors(0, &steps)), [(1, 10, 0), (2, -10, 0)]);
        // At any time, one tensor at most is live at an address.
        assert_eq!(
            changes(&tensors(0, &[(1, alloc, 8, 10), (2, alloc, 8, 30)])),
            [(1, 10, 0), (2, -10, 0), (2, 30, 1)]
        );
    }

    /// PyTorch's clock differs from the driver's.
    #[test]
    fn the_moment_of_a_rejection_is_the_nearest_one() {
        let second = 1_000_000_000;
        let steps = [(5, Action::Alloc, 8, 10), (20, Action::OutOfMemory, 0, 0), (30, Action::FreeRequested, 8, 0)];
        let tensors = tensors(0, &[&steps[..], &[(3 * second, Action::OutOfMemory, 0, 0)]].concat());
        let at = [10, 2 * second - 40, 2 * second + 40, 9 * second];
        assert_eq!(at.map(|time| tensors.0.steps_at_rejection(time)), [2, 3, 4, 4]);
    }

    #[test]
    fn what_was_freed_before_the_history_is_no_tensor() {
        let (alloc, requested) = (Action::Alloc, Action::FreeRequested);
        let steps = [(5, alloc, 8, 10), (5, requested, 8, 0), (5, alloc, 16, 20), (6, alloc, 8, 30)];
        assert_eq!(changes(&tensors(3, &steps)), [(5, 20, 0), (6, 30, 1)]);
    }
}

//! The requests that PyTorch's allocator got in a recording.

use std::{collections::HashMap, hash::Hash, mem};

use gpumem_estimate::replay::{Request, Sharing};
use gpumem_recording::AllocatorAction as Action;

use super::recorded::ReplayedRecording;
use crate::history::tensors::{AllocatorState, AllocatorStep, Segment, TensorHistory};

/// The requests of one device.
pub(super) struct Requests {
    pub(super) requests: Vec<Request>,
    pub(super) recorded: ReplayedRecording,
}

impl Requests {
    pub(super) fn of(history: &TensorHistory) -> Self {
        let (older, steps) = history.steps.split_at(history.older_count());
        let mut making = Making::default();
        let device = history.about.device;
        let mut rejected = never_obtained(steps);
        let mut recorded = ReplayedRecording { device: device.ordinal, ..ReplayedRecording::default() };
        recorded.older_bytes = making.add_older(older, history.is_expandable);
        recorded.rejected = rejected.len() as u64;
        let (mut reserved, mut most) = (recorded.older_bytes, recorded.older_bytes);
        while let Some(step) = steps.get(making.at) {
            let at = making.at;
            reserved = match step.action {
                Action::SegmentAlloc => reserved.saturating_add(step.bytes),
                Action::SegmentFree => reserved.saturating_sub(step.bytes),
                _ => reserved,
            };
            most = most.max(reserved);
            let is_rejected = rejected.pop_if(|next| *next == at).is_some();
            let is_pair = making.add(step, steps.get(at + 1), is_rejected);
            making.at += 1 + usize::from(is_pair);
        }
        recorded.reserved_bytes = most;
        recorded.emptied = making.emptied;
        Self { requests: making.requests, recorded }
    }
}

/// Returns the steps of the rejected requests after which the program never got as much, the last one first.
fn never_obtained(steps: &[AllocatorStep]) -> Vec<usize> {
    let (mut obtained, mut rejected) = (0, Vec::new());
    for (at, step) in steps.iter().enumerate().rev() {
        match step.action {
            Action::Alloc => obtained = obtained.max(step.requested),
            Action::OutOfMemory if step.requested > obtained => rejected.push(at),
            _ => {}
        }
    }
    rejected
}

/// Returns the id of a value. Ids are in the order of first use.
fn number<T: Eq + Hash>(known: &mut HashMap<T, u32>, value: T) -> u32 {
    let next = u32::try_from(known.len()).unwrap_or(u32::MAX - 1);
    *known.entry(value).or_insert(next)
}

#[derive(Default)]
struct Making {
    requests: Vec<Request>,
    /// Ids for streams and private pools.
    streams: HashMap<u64, u32>,
    pools: HashMap<u16, u32>,
    /// The segments, without tensors.
    state: AllocatorState,
    /// The index of the step that is being added.
    at: usize,
    /// The id of the block at each address, and whether its free was requested.
    live: HashMap<u64, (u32, bool)>,
    /// The number of blocks so far.
    count: u32,
    /// The latest segment from the driver, if no block was taken from it yet.
    segment: Option<(u64, u64)>,
    /// True if the last step returned a segment: segments that are returned together are one request.
    is_emptying: bool,
    emptied: u64,
}

impl Making {
    fn sharing(&mut self, address: u64, stream: u64) -> Sharing {
        let segment = self.state.segments.range(..=address).next_back();
        let around = segment.filter(|(start, (bytes, _))| address - *start < *bytes).map(|(_, (_, of))| *of);
        let private = around.filter(|of| of.is_private()).map(|of| number(&mut self.pools, of.pool) + 1);
        Sharing { stream: number(&mut self.streams, stream), pool: private.unwrap_or(0) }
    }

    fn new_block(&mut self, address: u64) -> Option<(u32, bool)> {
        self.count += 1;
        self.live.insert(address, (self.count - 1, false))
    }

    /// Adds the allocator's memory from before the history starts. Returns its bytes.
    fn add_older(&mut self, older: &[AllocatorStep], is_expandable: bool) -> u64 {
        for step in older {
            self.state.apply(step);
        }
        let mut sum = 0_u64;
        let tensors = mem::take(&mut self.state.tensors);
        for Segment { address, bytes, of } in self.state.segments(is_expandable) {
            let sharing = self.sharing(address, of.stream);
            let (mut blocks, mut free) = (Vec::new(), address);
            let mut awaiting = Vec::new();
            for (start, tensor) in tensors.range(address..address.saturating_add(bytes)) {
                let start = *start;
                let end = start.saturating_add(tensor.bytes);
                if tensor.bytes == 0 || start < free || end > address.saturating_add(bytes) {
                    continue;
                }
                blocks.push((start, tensor.bytes));
                free = end;
                self.new_block(start);
                if tensor.is_awaiting {
                    awaiting.push(start);
                }
            }
            sum = sum.saturating_add(bytes);
            self.requests.push(Request::Old { segment: (address, bytes), sharing, blocks });
            for start in awaiting {
                self.request_free(start);
            }
        }
        sum
    }

    /// Adds a step. Returns whether this step includes the next one.
    fn add(&mut self, step: &AllocatorStep, next: Option<&AllocatorStep>, is_rejected: bool) -> bool {
        let AllocatorStep { action, address, bytes, requested, stream, .. } = *step;
        if matches!(action, Action::SegmentAlloc | Action::SegmentFree) {
            self.state.apply(step);
        }
        let was_emptying = mem::replace(&mut self.is_emptying, action == Action::SegmentFree);
        match action {
            Action::SegmentAlloc => self.segment = address.checked_add(bytes).map(|_| (address, bytes)),
            Action::SegmentFree if was_emptying => {}
            Action::SegmentFree => {
                self.emptied += 1;
                self.requests.push(Request::EmptyCache);
            }
            Action::Alloc => {
                let (sharing, segment) = (self.sharing(address, stream), self.segment.take());
                if let Some((block, is_requested)) = self.new_block(address) {
                    self.requests.push(if is_requested { Request::CompleteFree(block) } else { Request::Free(block) });
                }
                self.requests.push(Request::Alloc { bytes: requested, sharing, segment });
            }
            Action::FreeRequested => {
                // Most blocks are used on one stream only, and are freed immediately.
                let is_next = next.is_some_and(|next| next.action == Action::FreeCompleted && next.address == address);
                if !is_next {
                    self.request_free(address);
                    return false;
                }
                self.complete_free(address);
                return true;
            }
            Action::FreeCompleted => self.complete_free(address),
            Action::OutOfMemory if is_rejected => {
                let sharing = self.sharing(0, stream);
                self.requests.push(Request::Rejected(requested, sharing));
            }
            Action::OutOfMemory => {}
        }
        false
    }

    fn request_free(&mut self, address: u64) {
        if let Some((block, is_requested @ false)) = self.live.get_mut(&address) {
            *is_requested = true;
            self.requests.push(Request::RequestFree(*block));
        }
    }

    fn complete_free(&mut self, address: u64) {
        if let Some((block, is_requested)) = self.live.remove(&address) {
            self.requests.push(if is_requested { Request::CompleteFree(block) } else { Request::Free(block) });
        }
    }
}

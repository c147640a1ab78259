//! The requests that PyTorch's allocator got in a recording.

use std::collections::{BTreeMap, HashMap};

use gpumem_core::recording::{AllocatorAction as Action, PrivateSegment};
use gpumem_estimate::replay::{Request, Sharing};

use super::recorded::Recorded;
use crate::history::tensors::{AllocatorState, AllocatorStep, TensorHistory};

/// The requests of one device.
pub(super) struct Requests {
    pub(super) requests: Vec<Request>,
    pub(super) recorded: Recorded,
}

impl Requests {
    pub(super) fn of(history: &TensorHistory, private: &[PrivateSegment]) -> Self {
        let (older, steps) = history.steps.split_at(history.older_count());
        let mut making = Making::default();
        let device = history.about.device;
        for segment in private.iter().filter(|segment| segment.device == device) {
            let next = u32::try_from(making.pools.len()).unwrap_or(u32::MAX).saturating_add(1);
            let pool = *making.pools.entry(segment.pool).or_insert(next);
            making.private.insert(segment.address, (segment.bytes.get(), pool, 0));
        }
        making.find_begins(steps);
        let refused = never_obtained(steps);
        let mut recorded = Recorded { device: device.ordinal, ..Recorded::default() };
        recorded.older_bytes = making.add_older(older, steps);
        recorded.refused = refused.len() as u64;
        let (mut reserved, mut most) = (recorded.older_bytes, recorded.older_bytes);
        while let Some(step) = steps.get(making.at) {
            let at = making.at;
            reserved = match step.action {
                Action::SegmentAlloc => reserved.saturating_add(step.bytes),
                Action::SegmentFree => reserved.saturating_sub(step.bytes),
                _ => reserved,
            };
            most = most.max(reserved);
            let is_pair = making.add(step, steps.get(at + 1), refused.contains(&at));
            making.at += 1 + usize::from(is_pair);
        }
        recorded.reserved_bytes = most;
        recorded.emptied = making.emptied;
        Self { requests: making.requests, recorded }
    }
}

/// The refused requests after which the program never got as much, by their steps, the last one first.
fn never_obtained(steps: &[AllocatorStep]) -> Vec<usize> {
    let (mut obtained, mut refused) = (0, Vec::new());
    for (at, step) in steps.iter().enumerate().rev() {
        match step.action {
            Action::Alloc => obtained = obtained.max(step.requested),
            Action::OutOfMemory if step.requested > obtained => refused.push(at),
            _ => {}
        }
    }
    refused
}

#[derive(Default)]
struct Making {
    requests: Vec<Request>,
    /// Numbers for streams and private pools.
    streams: HashMap<u64, u32>,
    pools: HashMap<u32, u32>,
    /// The lengths and the pools of private segments, and the step from which on they were there.
    private: BTreeMap<u64, (u64, u32, usize)>,
    /// The number of the step that is added.
    at: usize,
    /// The number of the block at each address, and whether its free was requested.
    live: HashMap<u64, (u32, bool)>,
    /// How many blocks there were.
    count: u32,
    /// The segment that the driver gave last, if no block was taken since.
    segment: Option<(u64, u64)>,
    /// Whether the last step returned a segment: those that are returned together are one request.
    is_emptying: bool,
    emptied: u64,
}

impl Making {
    fn sharing(&mut self, address: u64, stream: u64) -> Sharing {
        let next = u32::try_from(self.streams.len()).unwrap_or(u32::MAX);
        let stream = *self.streams.entry(stream).or_insert(next);
        let private = self.private.range(..=address).next_back();
        let private = private.filter(|(begin, (bytes, _, from))| address - *begin < *bytes && *from <= self.at);
        Sharing { stream, pool: private.map_or(0, |(_, (_, pool, _))| *pool) }
    }

    /// The driver gives addresses again: what lay there before its memory was returned is not private.
    fn find_begins(&mut self, steps: &[AllocatorStep]) {
        for (at, step) in steps.iter().enumerate().filter(|(_, step)| step.action == Action::SegmentFree) {
            let before_end = self.private.range_mut(..step.address.saturating_add(step.bytes)).rev();
            for (_, (.., from)) in
                before_end.take_while(|(begin, (bytes, ..))| begin.saturating_add(*bytes) > step.address)
            {
                *from = at + 1;
            }
        }
    }

    fn new_block(&mut self, address: u64) -> Option<(u32, bool)> {
        self.count += 1;
        self.live.insert(address, (self.count - 1, false))
    }

    /// Adds what the allocator had before its history begins. Returns how much that was.
    fn add_older(&mut self, older: &[AllocatorStep], steps: &[AllocatorStep]) -> u64 {
        let mut state = AllocatorState::default();
        for step in older {
            state.apply(step);
        }
        let within = |address: u64| {
            let (begin, bytes) = state.segments.range(..=address).next_back()?;
            (address - begin < *bytes).then_some(*begin)
        };
        // The older steps have no stream. It is that of the first later step in the same segment.
        let mut streams: HashMap<u64, u64> = HashMap::new();
        for step in steps.iter().filter(|step| step.action != Action::OutOfMemory) {
            if streams.len() == state.segments.len() {
                break;
            }
            if let Some(begin) = within(step.address) {
                streams.entry(begin).or_insert(step.stream);
            }
        }
        let mut sum = 0_u64;
        for (address, _, bytes) in state.segments() {
            let sharing = self.sharing(address, streams.get(&address).copied().unwrap_or(0));
            let (mut blocks, mut free) = (Vec::new(), address);
            let mut awaiting = Vec::new();
            for (begin, tensor) in state.within(address, bytes) {
                let end = begin.saturating_add(tensor.bytes);
                if tensor.bytes == 0 || begin < free || end > address.saturating_add(bytes) {
                    continue;
                }
                blocks.push((begin, tensor.bytes));
                free = end;
                self.new_block(begin);
                if tensor.is_awaiting {
                    awaiting.push(begin);
                }
            }
            sum = sum.saturating_add(bytes);
            self.requests.push(Request::Old { segment: (address, bytes), sharing, blocks });
            for begin in awaiting {
                self.request_free(begin);
            }
        }
        sum
    }

    /// Adds a step. Returns whether the next one is added with it.
    fn add(&mut self, step: &AllocatorStep, next: Option<&AllocatorStep>, is_refused: bool) -> bool {
        let AllocatorStep { action, address, bytes, requested, stream, .. } = *step;
        let was_emptying = std::mem::replace(&mut self.is_emptying, action == Action::SegmentFree);
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
                // Most blocks are used on one stream only, and are free at once.
                let is_next = next.is_some_and(|next| next.action == Action::FreeCompleted && next.address == address);
                if !is_next {
                    self.request_free(address);
                    return false;
                }
                self.complete_free(address);
                return true;
            }
            Action::FreeCompleted => self.complete_free(address),
            Action::OutOfMemory if is_refused => {
                let sharing = self.sharing(0, stream);
                self.requests.push(Request::Refused(requested, sharing));
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

//! The events of a caching allocator on one device, and its memory at one moment.

use std::{cmp::Reverse, collections::BTreeMap};

use gpumem_recording::{AllocatorAction as Action, AllocatorDevice};

use super::{
    device::DeviceHistory,
    names::Origin,
    origin_sums::{OriginSum, Sums},
    time::nanos,
};
use crate::recording::remove_range;

/// The history of one device.
#[derive(Debug)]
pub(crate) struct TensorHistory {
    pub(crate) about: AllocatorDevice,
    pub(crate) steps: Vec<AllocatorStep>,
    /// True if segments are expandable: they consist of parts, and parts without tensors can be returned to the driver.
    pub(crate) is_expandable: bool,
    /// The sum of all tensors, and its highest value.
    pub(crate) live: DeviceHistory,
    /// The sum of all tensors after each step.
    pub(super) allocated: Vec<u64>,
}

/// One step of the allocator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocatorStep {
    /// Nanoseconds since the recording started. The time never falls.
    pub(crate) time: u64,
    pub(crate) action: Action,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) requested: u64,
    pub(crate) stream: u64,
    /// The index of the origin in `Tensors::origins`.
    pub(crate) origin: u32,
    /// See [`SegmentUse::pool`].
    pub(crate) pool: u16,
}

/// Which requests a segment serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SegmentUse {
    pub(crate) stream: u64,
    /// The id of the pool. 1 is the pool that the whole program shares, a higher id is a private pool, such as that of
    /// a captured graph, and 0 means that the pool is not known.
    pub(crate) pool: u16,
}

impl SegmentUse {
    pub(crate) fn is_private(self) -> bool {
        self.pool > 1
    }
}

/// A segment at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) of: SegmentUse,
}

/// A tensor in a segment, or a gap between two tensors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'a> {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) tensor: Option<&'a Tensor>,
}

/// A block that is in use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensor {
    pub(crate) bytes: u64,
    pub(crate) requested: u64,
    pub(crate) origin: u32,
    /// True if the program has freed the block, but work on another stream may still use it.
    pub(crate) is_awaiting: bool,
}

/// The allocator's memory at one moment.
#[derive(Debug, Default)]
pub(crate) struct AllocatorState {
    /// The segments by address, with their sizes. They do not overlap.
    pub(crate) segments: BTreeMap<u64, (u64, SegmentUse)>,
    /// The tensors by address.
    pub(crate) tensors: BTreeMap<u64, Tensor>,
}

impl AllocatorState {
    pub(crate) fn apply(&mut self, step: &AllocatorStep) {
        let AllocatorStep { address, bytes, requested, origin, stream, pool, .. } = *step;
        match step.action {
            Action::SegmentAlloc => {
                let bytes = bytes.min(u64::MAX - address);
                remove_range(&mut self.segments, address, bytes, |_, _| {});
                self.segments.insert(address, (bytes, SegmentUse { stream, pool }));
            }
            // The parts of an expandable segment are unmapped one by one.
            Action::SegmentFree => remove_range(&mut self.segments, address, bytes, |_, _| {}),
            Action::Alloc => {
                let tensor = Tensor { bytes, requested: requested.min(bytes), origin, is_awaiting: false };
                self.tensors.insert(address, tensor);
            }
            Action::FreeRequested => {
                if let Some(tensor) = self.tensors.get_mut(&address) {
                    tensor.is_awaiting = true;
                }
            }
            Action::FreeCompleted => _ = self.tensors.remove(&address),
            Action::OutOfMemory => {}
        }
    }

    /// Returns the tensors grouped by origin, the largest group first.
    pub(crate) fn held<'a>(&self, origins: &'a [Origin]) -> Vec<OriginSum<'a>> {
        let mut sums = Sums::new(origins.len());
        for tensor in self.tensors.values().filter(|tensor| !tensor.is_awaiting) {
            sums.add((0, tensor.origin), tensor.bytes.try_into().unwrap_or(i64::MAX), 1);
        }
        sums.held(origins, 1).concat()
    }

    /// Returns the segments by address. Adjacent parts of an expandable segment are joined.
    pub(crate) fn segments(&self, is_expandable: bool) -> Vec<Segment> {
        let mut segments: Vec<Segment> = Vec::new();
        for (address, (bytes, of)) in &self.segments {
            let is_inside = || {
                let before = self.tensors.range(..address).next_back();
                before.is_some_and(|(start, tensor)| start.saturating_add(tensor.bytes) > *address)
            };
            let is_same = |last: SegmentUse| last.stream == of.stream && last.is_private() == of.is_private();
            match segments.last_mut() {
                Some(last)
                    if last.address + last.bytes == *address && (is_expandable && is_same(last.of) || is_inside()) =>
                {
                    last.bytes += *bytes;
                }
                _ => segments.push(Segment { address: *address, bytes: *bytes, of: *of }),
            }
        }
        segments
    }

    /// Returns the tensors in a segment and the gaps between them. Their sizes add up to the size of the segment.
    pub(crate) fn pieces(&self, segment: &Segment) -> Vec<Piece<'_>> {
        let (mut pieces, mut at, end) = (Vec::new(), segment.address, segment.address + segment.bytes);
        let mut add = |address, until: u64, tensor| {
            if until > address {
                pieces.push(Piece { address, bytes: until - address, tensor });
            }
        };
        for (address, tensor) in self.tensors.range(segment.address..end) {
            // A tensor that does not fit contradicts the others.
            if *address < at || tensor.bytes > end - address {
                continue;
            }
            add(at, *address, None);
            at = address + tensor.bytes;
            add(*address, at, Some(tensor));
        }
        add(at, end, None);
        pieces
    }
}

impl TensorHistory {
    pub(crate) fn new(about: AllocatorDevice, steps: Vec<AllocatorStep>, is_expandable: bool) -> Self {
        Self { about, steps, is_expandable, live: DeviceHistory::new(about.device), allocated: Vec::new() }
    }

    /// Returns the memory after this many steps.
    pub(crate) fn state(&self, steps: usize) -> AllocatorState {
        let mut state = AllocatorState::default();
        self.steps[..steps.min(self.steps.len())].iter().for_each(|step| state.apply(step));
        state
    }

    /// Returns the number of steps up to a time.
    pub(crate) fn steps_until(&self, time: u64) -> usize {
        self.steps.partition_point(|step| step.time <= time).max(self.older_count())
    }

    /// Returns the number of steps up to the request that the allocator rejected. `time` is when the driver rejected
    /// it. PyTorch empties its cache after that, and uses another clock.
    pub(crate) fn steps_at_rejection(&self, time: u64) -> usize {
        const SOON: u64 = 1_000_000_000;
        let rejected = (0..).zip(&self.steps).filter(|(_, step)| step.action == Action::OutOfMemory);
        let nearest = rejected.map(|(at, step)| (step.time.abs_diff(time), at)).min();
        nearest.filter(|(apart, _)| *apart <= SOON).map_or_else(|| self.steps_until(time), |(_, at): (_, usize)| at + 1)
    }

    /// Returns the stream of the latest request after this many steps.
    pub(crate) fn request_stream(&self, steps: usize, state: &AllocatorState) -> u64 {
        let mut latest = self.steps[..steps.min(self.steps.len())].iter().rev();
        let is_request = |step: &&AllocatorStep| matches!(step.action, Action::Alloc | Action::OutOfMemory);
        let Some(request) = latest.find(is_request) else { return 0 };
        // If a block is older than the history, only the stream of its segment is known.
        let before = state.segments.range(..=request.address).next_back();
        let segment = before.filter(|(address, (bytes, _))| request.address - **address < *bytes);
        segment.map_or(request.stream, |(_, (_, of))| of.stream)
    }

    /// The number of initial steps that only describe the memory when the history starts.
    pub(crate) fn older_count(&self) -> usize {
        usize::try_from(self.about.older).unwrap_or(usize::MAX).min(self.steps.len())
    }

    /// The time at which the history starts, in nanoseconds since the recording started. `None` if the allocator did
    /// nothing before it.
    pub(crate) fn known_from(&self) -> Option<u64> {
        let time = nanos(self.about.known_from?);
        // `align` has moved the steps to the driver's clock. The recording's own `known_from` is still on PyTorch's
        // clock.
        Some(self.steps.get(self.older_count()).map_or(time, |step| step.time))
    }

    /// Returns the number of steps up to the highest sum of tensors between two times.
    pub(crate) fn most_between(&self, from: u64, to: u64) -> usize {
        self.most_in(self.steps_until(from), self.steps_until(to))
    }

    /// Returns the number of steps up to the highest sum of tensors.
    pub(crate) fn peak_steps(&self) -> Option<usize> {
        self.live.peak_at.map(|_| self.most_in(self.older_count(), self.steps.len()))
    }

    /// Returns the number of steps up to the highest sum of tensors, between two numbers of steps. The first of several
    /// equal sums is used.
    fn most_in(&self, first: usize, end: usize) -> usize {
        let bytes = |steps: usize| steps.checked_sub(1).map_or(0, |at| self.allocated[at]);
        (first..=end.max(first)).max_by_key(|steps| (bytes(*steps), Reverse(*steps))).unwrap_or(first)
    }
}

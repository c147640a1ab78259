//! The tensors of PyTorch: what its allocator gave to the program, in the segments that it had from the driver.
//!
//! They are a second layer: their bytes are a part of the driver's blocks, and are not added to them.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap, HashSet},
};

use gpumem_core::{
    derive::Names,
    model::{Device, MemKind, StackId},
    recording::{
        AllocatorAction as Action, AllocatorDefinition, AllocatorDevice, AllocatorEvents, AllocatorSettings,
        Definitions, TensorClass,
    },
};

use super::{
    held::OriginSum,
    names::{Origin, pay},
    recorded::DeviceHistory,
    sums::Sums,
    tensor_blocks::TensorBlocks,
};
use crate::recording::remove_range;

/// What is known of a caching allocator.
#[derive(Debug, Default)]
pub(crate) struct Tensors {
    /// Its name and version, such as `PyTorch 2.11.0`.
    pub(crate) name: String,
    /// Why its history is missing.
    pub(crate) missing: Option<String>,
    /// Why their modules are missing, although they were asked for.
    pub(crate) missing_modules: Option<String>,
    /// The settings of PyTorch's allocator, if they are known.
    pub(crate) settings: Option<AllocatorSettings>,
    /// Where tensors come from. The path of each is its module, if that is known.
    pub(crate) origins: Vec<Origin>,
    /// What the tensors of each origin are for. `None` if the program was recorded without modules.
    pub(crate) classes: Option<Vec<Option<TensorClass>>>,
    pub(crate) devices: Vec<TensorHistory>,
    /// The tensors and the segments of all devices.
    pub(crate) blocks: TensorBlocks,
}

/// The history of one device.
#[derive(Debug)]
pub(crate) struct TensorHistory {
    pub(crate) about: AllocatorDevice,
    pub(crate) steps: Vec<AllocatorStep>,
    /// Whether segments are expandable: they consist of parts, and parts without tensors can be given back to the driver.
    pub(crate) is_expandable: bool,
    /// What tensors have together, and the most of it.
    pub(crate) live: DeviceHistory,
    /// What they have after each step.
    pub(super) allocated: Vec<u64>,
}

/// What the allocator did.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocatorStep {
    /// The time in nanoseconds since the recording began. It never falls.
    pub(crate) time: u64,
    pub(crate) action: Action,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) requested: u64,
    pub(crate) stream: u64,
    /// The number of its origin in [`Tensors::origins`].
    pub(crate) origin: u32,
    /// See [`SegmentUse::pool`].
    pub(crate) pool: u16,
}

/// Which requests get memory of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SegmentUse {
    pub(crate) stream: u64,
    /// The number of the pool: 1 is the pool that the whole program shares, a higher number is a private pool, such as that of a captured
    /// graph, and 0 means that the pool is not known.
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

/// A tensor in a segment, or the room between two of them.
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
    /// Whether the program has freed it, while work on another stream may use it.
    pub(crate) is_awaiting: bool,
}

/// The memory of the allocator at one moment.
#[derive(Debug, Default)]
pub(crate) struct AllocatorState {
    /// The segments by their addresses, with their sizes. They do not overlap.
    pub(crate) segments: BTreeMap<u64, (u64, SegmentUse)>,
    /// The tensors by their addresses.
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
            // Parts of an expandable segment go one by one.
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

    /// The tensors by their origins, the largest first.
    pub(crate) fn held<'a>(&self, origins: &'a [Origin]) -> Vec<OriginSum<'a>> {
        let mut sums = Sums::new(origins.len());
        for tensor in self.tensors.values().filter(|tensor| !tensor.is_awaiting) {
            sums.add((0, tensor.origin), tensor.bytes.try_into().unwrap_or(i64::MAX), 1);
        }
        sums.held(origins, 1).concat()
    }

    /// The segments by their addresses. The parts of an expandable segment that follow each other are one.
    pub(crate) fn segments(&self, is_expandable: bool) -> Vec<Segment> {
        let mut segments: Vec<Segment> = Vec::new();
        for (address, (bytes, of)) in &self.segments {
            let is_inside = || {
                let before = self.tensors.range(..address).next_back();
                before.is_some_and(|(begin, tensor)| begin.saturating_add(tensor.bytes) > *address)
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

    /// The tensors in a segment, and the room between them. Their sizes add up to that of the segment.
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

    /// The memory after this many steps.
    pub(crate) fn state(&self, steps: usize) -> AllocatorState {
        let mut state = AllocatorState::default();
        self.steps[..steps.min(self.steps.len())].iter().for_each(|step| state.apply(step));
        state
    }

    /// How many steps there were at a time.
    pub(crate) fn steps_until(&self, time: u64) -> usize {
        self.steps.partition_point(|step| step.time <= time).max(self.older_count())
    }

    /// How many steps there were when the allocator refused a request, after the driver had refused it at this time: PyTorch has
    /// emptied its cache then, and has another clock.
    pub(crate) fn steps_at_refusal(&self, time: u64) -> usize {
        const SOON: u64 = 1_000_000_000;
        let refused = (0..).zip(&self.steps).filter(|(_, step)| step.action == Action::OutOfMemory);
        let nearest = refused.map(|(at, step)| (step.time.abs_diff(time), at)).min();
        nearest.filter(|(apart, _)| *apart <= SOON).map_or_else(|| self.steps_until(time), |(_, at): (_, usize)| at + 1)
    }

    /// The stream of the newest request, after this many steps.
    pub(crate) fn request_stream(&self, steps: usize, state: &AllocatorState) -> u64 {
        let mut newest = self.steps[..steps.min(self.steps.len())].iter().rev();
        let is_request = |step: &&AllocatorStep| matches!(step.action, Action::Alloc | Action::OutOfMemory);
        let Some(request) = newest.find(is_request) else { return 0 };
        // The stream of a block that is older than the history is only known of its segment.
        let before = state.segments.range(..=request.address).next_back();
        let segment = before.filter(|(address, (bytes, _))| request.address - **address < *bytes);
        segment.map_or(request.stream, |(_, (_, of))| of.stream)
    }

    /// How many of the first steps only describe what was live when the history begins.
    pub(crate) fn older_count(&self) -> usize {
        usize::try_from(self.about.older).unwrap_or(usize::MAX).min(self.steps.len())
    }

    /// When the history begins, in nanoseconds since the recording began, if the allocator did something before.
    pub(crate) fn known_from(&self) -> Option<u64> {
        let time = u64::try_from(self.about.known_from?.as_nanos()).unwrap_or(u64::MAX);
        // `align` has moved the steps to the driver's clock. `known_from` in the recording still has PyTorch's.
        Some(self.steps.get(self.older_count()).map_or(time, |step| step.time))
    }

    /// How many steps there were when tensors had most between two times.
    pub(crate) fn most_between(&self, from: u64, to: u64) -> usize {
        self.most_in(self.steps_until(from), self.steps_until(to))
    }

    /// How many steps there were when tensors had most.
    pub(crate) fn peak_steps(&self) -> Option<usize> {
        self.live.peak_at.map(|_| self.most_in(self.older_count(), self.steps.len()))
    }

    /// After how many steps, between two numbers of them, tensors had most; of several, the first.
    fn most_in(&self, first: usize, end: usize) -> usize {
        let bytes = |steps: usize| steps.checked_sub(1).map_or(0, |at| self.allocated[at]);
        (first..=end.max(first)).max_by_key(|steps| (bytes(*steps), Reverse(*steps))).unwrap_or(first)
    }
}

/// Tensors, while a recording is read.
#[derive(Debug, Default)]
pub(super) struct TensorReading {
    devices: HashMap<Device, Vec<AllocatorStep>>,
    /// The numbers of origins, by their stack and group.
    known: HashMap<(StackId, u32), u32>,
    all: Vec<(StackId, u32)>,
}

impl TensorReading {
    /// Adds steps. Returns how many new origins they have.
    pub(super) fn add(&mut self, events: &AllocatorEvents) -> u64 {
        let before = self.all.len();
        let steps = self.devices.entry(events.device).or_default();
        for event in &events.events {
            let next = u32::try_from(self.all.len()).unwrap_or(u32::MAX);
            let is_segment = event.action == Action::SegmentAlloc;
            let of_event = (event.stack, if is_segment { 0 } else { event.group });
            let origin = *self.known.entry(of_event).or_insert(next);
            if origin == next {
                self.all.push(of_event);
            }
            steps.push(AllocatorStep {
                time: u64::try_from(event.time.as_nanos()).unwrap_or(u64::MAX),
                action: event.action,
                address: event.address,
                bytes: event.bytes.get(),
                requested: event.requested.get(),
                stream: event.stream,
                origin,
                pool: if is_segment { event.group.try_into().unwrap_or(u16::MAX) } else { 0 },
            });
        }
        (self.all.len() - before) as u64
    }

    /// The times at which the driver gave each segment that the allocator says it got.
    fn segments(&self, allocated: impl Iterator<Item = (DriverBlock, u64, StackId)>) -> HashMap<DriverBlock, Vec<u64>> {
        let got = |(device, steps): (&Device, &Vec<AllocatorStep>)| {
            let got = steps.iter().filter(|step| step.action == Action::SegmentAlloc);
            got.map(|step| ((*device, step.address, step.bytes), Vec::new())).collect::<Vec<_>>()
        };
        let mut segments: HashMap<DriverBlock, Vec<u64>> = self.devices.iter().flat_map(got).collect();
        for (segment, time, _) in allocated {
            if let Some(times) = segments.get_mut(&segment) {
                times.push(time);
            }
        }
        segments
    }

    /// The stacks of the driver's blocks, and those that PyTorch has for the same blocks. `allocated` are the allocations of the driver: their
    /// devices, keys, sizes, times and stacks. If one stack of the driver belongs to several ones of PyTorch, it is left out.
    pub(super) fn callers(
        &self,
        allocated: impl Iterator<Item = (DriverBlock, u64, StackId)>,
    ) -> HashMap<StackId, StackId> {
        let mut segments: HashMap<DriverBlock, Vec<(u64, StackId)>> = HashMap::new();
        for (device, steps) in &self.devices {
            for step in steps.iter().filter(|step| step.action == Action::SegmentAlloc) {
                let (stack, _) = self.all[step.origin as usize];
                segments.entry((*device, step.address, step.bytes)).or_default().push((step.time, stack));
            }
        }
        let mut callers = HashMap::new();
        if segments.is_empty() {
            return callers;
        }
        for times in segments.values_mut() {
            times.sort_unstable();
        }
        for (block, time, stack) in allocated {
            let segment = segments.get(&block).and_then(|times| nearest(times, time, |(at, _)| *at));
            let caller = segment.map_or(StackId::NONE, |(_, stack)| stack);
            let known = callers.entry(stack).or_insert(caller);
            if *known != caller {
                *known = StackId::NONE;
            }
        }
        callers.retain(|_, caller| *caller != StackId::NONE);
        callers
    }

    /// `allocated` are the allocations of the driver: their devices, keys, sizes, times and stacks. On the devices in `expandable`, segments
    /// are expandable. Names may have `names_left` bytes.
    pub(super) fn finish(
        mut self,
        definitions: &Definitions,
        allocated: impl Iterator<Item = (DriverBlock, u64, StackId)>,
        expandable: &HashSet<Device>,
        names_left: &mut u64,
    ) -> Option<Tensors> {
        let defined = definitions.allocator()?;
        let segments = self.segments(allocated);
        let mut devices: Vec<TensorHistory> = Vec::new();
        let mut known = HashSet::new();
        for about in &defined.devices {
            if !known.insert(about.device) {
                continue;
            }
            let mut steps = self.devices.remove(&about.device).unwrap_or_default();
            align(about.device, &mut steps, &segments);
            let is_expandable = expandable.contains(&about.device);
            devices.push(TensorHistory::new(*about, steps, is_expandable));
        }
        devices.sort_by_key(|history| history.about.device.ordinal);
        let group = |id: u32| definitions.tensor_group(id);
        let origin = |(stack, id): &(StackId, u32)| {
            let module = group(*id).and_then(|group| group.module.clone());
            let length = module.as_ref().map_or(0, String::len) as u64;
            if !pay(names_left, definitions.length_of(*stack) + length) {
                return Origin::unnamed(MemKind::Device);
            }
            let stack_in_words = definitions.stack(*stack);
            Origin {
                path: module.into_iter().collect(),
                library: None,
                line: stack_in_words.line,
                caller: stack_in_words.caller,
                scope_place: None,
                kind: MemKind::Device,
                stack: *stack,
            }
        };
        let origins: Vec<_> = self.all.iter().map(origin).collect();
        let has_groups = self.all.iter().any(|(_, id)| *id != 0);
        let classes = has_groups.then(|| self.all.iter().map(|(_, id)| group(*id)?.class).collect());
        let AllocatorDefinition { name, missing, missing_modules, settings, .. } = defined.clone();
        let blocks = TensorBlocks::of(&mut devices, origins.len());
        Some(Tensors { name, missing, missing_modules, settings, origins, classes, devices, blocks })
    }
}

/// A block of the driver: its device, its key and its size.
type DriverBlock = (Device, u64, u64);

/// Which of these is nearest to a time. They are in the order of their times.
fn nearest<T: Copy>(all: &[T], time: u64, time_of: impl Fn(&T) -> u64) -> Option<T> {
    let after = all.partition_point(|one| time_of(one) < time);
    let around = &all[after.saturating_sub(1)..all.len().min(after + 1)];
    around.iter().copied().min_by_key(|one| time_of(one).abs_diff(time))
}

/// PyTorch has another clock. Where it gets a segment, the driver's block of the same address and size says when that was. The
/// steps keep their order. In `segments`, the times of each block are sorted.
fn align(device: Device, steps: &mut [AllocatorStep], segments: &HashMap<DriverBlock, Vec<u64>>) {
    let mut next = u64::MAX;
    for step in steps.iter_mut().rev() {
        if step.action == Action::SegmentAlloc
            && let Some(times) = segments.get(&(device, step.address, step.bytes))
        {
            step.time = nearest(times, step.time, |time| *time).unwrap_or(step.time);
        }
        next = next.min(step.time);
        step.time = next;
    }
}

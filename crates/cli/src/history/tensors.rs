//! PyTorch's tensors, and the segments that its allocator got from the driver.
//!
//! They are a second layer: their bytes are part of the driver's blocks and are not added to them.

use std::collections::{HashMap, HashSet};

use gpumem_core::{
    derive::Names,
    model::{Device, MemKind, StackId},
};
use gpumem_recording::{
    AllocatorAction as Action, AllocatorContradiction, AllocatorDefinition, AllocatorEvents, AllocatorSettings,
    Definitions, TensorClass,
};

pub(crate) use super::allocator::{AllocatorState, AllocatorStep, Piece, Segment, SegmentUse, Tensor, TensorHistory};
use super::{
    names::{Origin, pay},
    tensor_blocks::TensorBlocks,
    time::nanos,
};

/// The line of tensors that were allocated before the history starts, if PyTorch did not record it.
const BEFORE_HISTORY: &str = "before the history";

/// The data of a caching allocator.
#[derive(Debug, Default)]
pub(crate) struct Tensors {
    /// The allocator's name and version, such as `PyTorch 2.11.0`.
    pub(crate) name: String,
    /// Why the history is missing.
    pub(crate) missing: Option<String>,
    /// Why modules are missing although they were requested.
    pub(crate) missing_modules: Option<String>,
    /// The devices whose history contradicts itself.
    pub(crate) contradictions: Vec<AllocatorContradiction>,
    /// The settings of PyTorch's allocator, if they are known.
    pub(crate) settings: Option<AllocatorSettings>,
    /// The origins of tensors. The path of each is its module, if known.
    pub(crate) origins: Vec<Origin>,
    /// The class of the tensors of each origin, such as weights. `None` if the program was recorded without modules.
    pub(crate) classes: Option<Vec<Option<TensorClass>>>,
    pub(crate) devices: Vec<TensorHistory>,
    /// The tensors and the segments of all devices.
    pub(crate) blocks: TensorBlocks,
}

impl Tensors {
    /// One line for each device whose history contradicts itself.
    pub(crate) fn contradictions_in_words(&self) -> Vec<String> {
        self.contradictions.iter().map(|of| self.contradiction_in_words(of.device.ordinal, &of.words)).collect()
    }

    pub(crate) fn contradiction_in_words(&self, device: u32, what: &str) -> String {
        format!("The history of {} contradicts itself on device {device}: {what}. Numbers may be wrong.", self.name)
    }
}

/// The tensors while a recording is being read.
#[derive(Debug, Default)]
pub(super) struct TensorReading {
    devices: HashMap<Device, Vec<AllocatorStep>>,
    /// The indexes of origins, by stack and group.
    known: HashMap<(StackId, u32), u32>,
    all: Vec<(StackId, u32)>,
}

impl TensorReading {
    /// Adds steps. Returns the number of new origins.
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
                time: nanos(event.time),
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

    /// Returns the times at which the driver allocated each segment that the allocator reports.
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

    /// Maps the stacks of driver blocks to PyTorch's stacks for the same blocks. `allocated` lists the driver's
    /// allocations: their devices, keys, sizes, times and stacks. A driver stack that belongs to several PyTorch stacks
    /// is left out.
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

    /// Gives the tensors that are older than the history the line `BEFORE_HISTORY`, unless their stacks are known.
    /// `numbers` contains the indexes of these origins, by group.
    fn name_older(&mut self, older: &mut [AllocatorStep], numbers: &mut HashMap<u32, u32>) {
        for step in older.iter_mut().filter(|step| step.action == Action::Alloc) {
            let (stack, group) = self.all[step.origin as usize];
            if stack == StackId::NONE {
                step.origin = *numbers.entry(group).or_insert_with(|| {
                    self.all.push((stack, group));
                    u32::try_from(self.all.len() - 1).unwrap_or(u32::MAX)
                });
            }
        }
    }

    /// Finishes the reading. `allocated` lists the driver's allocations: their devices, keys, sizes, times and stacks.
    /// On the devices in `expandable`, segments are expandable. Names may take `names_left` bytes.
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
        let (mut known, mut older_origins) = (HashSet::new(), HashMap::new());
        let first_older = self.all.len();
        for about in &defined.devices {
            if !known.insert(about.device) {
                continue;
            }
            let mut steps = self.devices.remove(&about.device).unwrap_or_default();
            align(about.device, &mut steps, &segments);
            let older = usize::try_from(about.older).unwrap_or(usize::MAX).min(steps.len());
            self.name_older(&mut steps[..older], &mut older_origins);
            let is_expandable = expandable.contains(&about.device);
            devices.push(TensorHistory::new(*about, steps, is_expandable));
        }
        devices.sort_by_key(|history| history.about.device.ordinal);
        let group = |id: u32| definitions.tensor_group(id);
        let origin = |(number, (stack, id)): (usize, &(StackId, u32))| {
            let module = group(*id).and_then(|group| group.module.clone());
            let length = module.as_ref().map_or(0, String::len) as u64;
            if !pay(names_left, definitions.length_of(*stack) + length) {
                return Origin::unnamed(MemKind::Device);
            }
            let stack_in_words = definitions.stack(*stack);
            Origin {
                path: module.into_iter().collect(),
                library: None,
                line: if number < first_older { stack_in_words.line } else { Some(BEFORE_HISTORY.to_owned()) },
                caller: stack_in_words.caller,
                scope_place: None,
                kind: MemKind::Device,
                stack: *stack,
            }
        };
        let origins: Vec<_> = self.all.iter().enumerate().map(origin).collect();
        let has_groups = self.all.iter().any(|(_, id)| *id != 0);
        let classes = has_groups.then(|| self.all.iter().map(|(_, id)| group(*id)?.class).collect());
        let AllocatorDefinition { name, missing, missing_modules, contradictions, settings, .. } = defined.clone();
        let blocks = TensorBlocks::of(&mut devices, origins.len());
        Some(Tensors { name, missing, missing_modules, contradictions, settings, origins, classes, devices, blocks })
    }
}

/// The device, the key and the size of a driver block.
type DriverBlock = (Device, u64, u64);

/// Returns the item whose time is nearest to `time`. `all` is in the order of the times.
fn nearest<T: Copy>(all: &[T], time: u64, time_of: impl Fn(&T) -> u64) -> Option<T> {
    let after = all.partition_point(|one| time_of(one) < time);
    let around = &all[after.saturating_sub(1)..all.len().min(after + 1)];
    around.iter().copied().min_by_key(|one| time_of(one).abs_diff(time))
}

/// Corrects the times of steps, because PyTorch uses another clock. When PyTorch gets a segment, the driver block with
/// the same address and size has the right time. The steps stay in order. In `segments`, the times of each block are
/// sorted.
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

//! A caching allocator of the program, such as PyTorch's. The allocator gets segments from the driver and hands out blocks of
//! them to the program.

use super::{
    bytes::{Input, Malformed, Result, put_difference, put_number},
    wire::{Wire, codes, fields},
};
use gpumem_core::model::{Bytes, Device, StackId, Time};

/// A caching allocator and its data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocatorDefinition {
    /// The name and version, such as `PyTorch 2.11.0`. Empty if it was not found.
    pub name: String,
    /// The reason why its history is not in the recording.
    pub missing: Option<String>,
    /// The devices on which the allocator allocated.
    pub devices: Vec<AllocatorDevice>,
    /// The reason why the modules of its tensors are not in the recording, although they were requested.
    pub missing_modules: Option<String>,
    /// The settings of PyTorch's allocator, if they are known.
    pub settings: Option<AllocatorSettings>,
    /// The devices whose history contradicts itself.
    pub contradictions: Vec<AllocatorContradiction>,
}

/// A history whose steps do not add up to the memory at its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatorContradiction {
    /// The device.
    pub device: Device,
    /// One of the contradictions, such as `4 MiB of a tensor are neither freed nor present at the end`, and how many others there
    /// are.
    pub words: String,
}

/// The settings of PyTorch's caching allocator. The default is PyTorch's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatorSettings {
    /// `expandable_segments`.
    pub is_expandable: bool,
    /// `max_split_size`: blocks of this many bytes or more are not split.
    pub max_split: u64,
    /// `roundup_power2_divisions`: the number of parts into which the range between two powers of 2 is divided, starting at 1
    /// MiB. In a range where the number is 1, and if the list is empty, sizes are only rounded up to 512 bytes.
    pub divisions: Vec<u64>,
}

impl Default for AllocatorSettings {
    fn default() -> Self {
        Self { is_expandable: false, max_split: u64::MAX, divisions: Vec::new() }
    }
}

/// The data of an allocator on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocatorDevice {
    /// The device.
    pub device: Device,
    /// The number of events at the start that only describe memory that was already live.
    pub older: u64,
    /// The time when the history starts, if the allocator was used before.
    pub known_from: Option<Time>,
    /// The statistics of the allocator at the end.
    pub reported: Option<AllocatorStats>,
}

/// The statistics of an allocator. The highest values are those since their last reset by the program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocatorStats {
    /// The bytes in blocks that the program holds.
    pub allocated: Bytes,
    /// Its highest value.
    pub allocated_high: Bytes,
    /// The bytes in segments.
    pub reserved: Bytes,
    /// Its highest value.
    pub reserved_high: Bytes,
}

/// The actions of an allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AllocatorAction {
    /// The allocator gets memory from the driver.
    SegmentAlloc,
    /// The allocator returns memory to the driver.
    SegmentFree,
    /// The program gets a block.
    Alloc,
    /// The program frees a block. Work on other streams may still use it.
    FreeRequested,
    /// The block can be handed out again.
    FreeCompleted,
    /// An allocation was rejected.
    OutOfMemory,
}

/// The use of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TensorClass {
    /// A parameter or a buffer of a module, or a copy of one.
    Weights,
    /// The gradient of a parameter.
    Gradients,
    /// The state of an optimizer, and the allocations of its steps.
    Optimizer,
    /// An argument of the outermost module.
    Inputs,
    /// A tensor that was allocated before the backward pass and lived until then.
    Activations,
    /// A tensor that was freed before its forward pass ended.
    ForwardTemporary,
    /// A tensor of the backward pass that is not a gradient.
    BackwardTemporary,
    /// The workspace of cuBLAS.
    Workspace,
    /// A copy of a weight in fewer bits, which autocast keeps.
    AutocastCasts,
    /// A tensor outside modules and the backward pass, which was freed before the function that allocated it returned.
    Temporary,
}

impl TensorClass {
    /// All classes, in the order of reports.
    pub const ALL: [Self; 10] = [
        Self::Weights,
        Self::Gradients,
        Self::Optimizer,
        Self::Inputs,
        Self::Activations,
        Self::ForwardTemporary,
        Self::BackwardTemporary,
        Self::Workspace,
        Self::AutocastCasts,
        Self::Temporary,
    ];

    /// Returns the name in reports. The classes of estimates have no temporary tensors; the others have the same names
    /// there.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Inputs => "inputs",
            Self::Activations => "activations",
            Self::ForwardTemporary => "temporary (forward)",
            Self::BackwardTemporary => "temporary (backward)",
            Self::Workspace => "workspace",
            Self::AutocastCasts => "weights cast by autocast",
            Self::Temporary => "temporary",
        }
    }
}

/// The tensors of one module and one class.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorGroup {
    /// The id by which events refer to the group, starting at 1.
    pub id: u32,
    /// The path of the module and its type, such as `GPT2LMHeadModel.transformer.h.3.mlp: GPT2MLP`. `None` outside of all modules.
    pub module: Option<String>,
    /// The class. `None` if it is not known.
    pub class: Option<TensorClass>,
}

/// The object that refers to a tensor at the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorHolder {
    /// The device of the tensor.
    pub device: Device,
    /// An address in the tensor.
    pub address: u64,
    /// The referring object, such as `list losses in __main__`.
    pub holder: String,
}

/// One step of an allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocatorEvent {
    /// The time since the session started.
    pub time: Time,
    /// The action.
    pub action: AllocatorAction,
    /// The address of the segment or the block.
    pub address: u64,
    /// The size of the segment or the block. 0 for a free of a whole block.
    pub bytes: Bytes,
    /// The bytes that the program requested.
    pub requested: Bytes,
    /// The stream that the block belongs to.
    pub stream: u64,
    /// The stack of the request.
    pub stack: StackId,
    /// The [`TensorGroup`] of an allocated tensor. For a segment, this is the id of its private pool, or 1 for the pool that the
    /// whole program shares. 0 if not known.
    pub group: u32,
}

/// Steps on one device, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatorEvents {
    /// The device.
    pub device: Device,
    /// The steps.
    pub events: Vec<AllocatorEvent>,
}

impl AllocatorEvents {
    /// The largest number of events in one item, so that an item is not too long.
    pub const MOST: usize = 1 << 10;
}

codes!(AllocatorAction { SegmentAlloc, SegmentFree, Alloc, FreeRequested, FreeCompleted, OutOfMemory });
codes!(TensorClass {
    Weights,
    Gradients,
    Optimizer,
    Inputs,
    Activations,
    ForwardTemporary,
    BackwardTemporary,
    Workspace,
    AutocastCasts,
    Temporary,
});
fields!(TensorGroup { id, module, class });
fields!(TensorHolder { device, address, holder });
fields!(AllocatorSettings { is_expandable, max_split, divisions });
fields!(AllocatorDevice { device, older, known_from, reported });
fields!(AllocatorStats { allocated, allocated_high, reserved, reserved_high });

fields!(AllocatorDefinition { name, missing, devices, missing_modules, settings, contradictions });
fields!(AllocatorContradiction { device, words });

/// Times and addresses are written as differences from the previous event. The groups come last, if any of them is known.
impl Wire for AllocatorEvents {
    fn put(&self, to: &mut Vec<u8>) {
        let Self { device, events } = self;
        device.put(to);
        events.len().put(to);
        let (mut last_time, mut last_address) = (0, 0);
        for AllocatorEvent { time, action, address, bytes, requested, stream, stack, group: _ } in events {
            let time = super::wire::nanoseconds(*time);
            action.put(to);
            put_difference(to, time, last_time);
            put_difference(to, *address, last_address);
            bytes.put(to);
            put_difference(to, bytes.get(), requested.get());
            put_number(to, *stream);
            stack.put(to);
            (last_time, last_address) = (time, *address);
        }
        if events.iter().any(|event| event.group != 0) {
            for event in events {
                event.group.put(to);
            }
        }
    }

    fn get(from: &mut Input<'_>) -> Result<Self> {
        let device = Wire::get(from)?;
        let length = usize::get(from)?;
        if length > Self::MOST || length > from.len() {
            return Err(Malformed("an item has too many events of an allocator"));
        }
        let mut events = Vec::with_capacity(length);
        let (mut last_time, mut last_address) = (0, 0);
        for _ in 0..length {
            let action = Wire::get(from)?;
            last_time = from.difference(last_time)?;
            last_address = from.difference(last_address)?;
            let bytes: Bytes = Wire::get(from)?;
            // The file contains `bytes - requested`. `bytes` minus this is `requested`.
            let over = from.difference(0)?;
            events.push(AllocatorEvent {
                time: Time::from_nanos(last_time),
                action,
                address: last_address,
                bytes,
                requested: Bytes::new(bytes.get().wrapping_sub(over)),
                stream: from.number()?,
                stack: Wire::get(from)?,
                group: 0,
            });
        }
        if from.len() > 0 {
            events.iter_mut().try_for_each(|event| u32::get(from).map(|group| event.group = group))?;
        }
        Ok(Self { device, events })
    }
}

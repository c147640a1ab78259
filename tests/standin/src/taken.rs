//! The memory that the driver takes by itself, as measured on an H200 with driver 580.
//!
//! The driver counts two figures: the used memory of the device (`cuMemGetInfo`, NVML's memory info), and the memory of each process
//! (NVML's list of processes), which is 9 MiB less for a process with a context. Without the setting `driver_memory`, only contexts take
//! memory. With it,
//! - `cuInit` takes 3.25 MiB of each GPU that CUDA sees, and the first context 5.75 MiB, which are in the device's figure only;
//! - a context takes 518 MiB, in which each resident thread of the device has 1 KiB of local memory;
//! - a module takes its memory when its first function is loaded (`modules.rs`);
//! - the launch of a function that needs more local memory takes it for all resident threads. A smaller limit of the stack gives it back,
//!   down to the 1 KiB. A launch that is captured also takes it here, which was not measured;
//! - a limit of the heap takes what exceeds 8 MiB at once, like a driver that has loaded the heap;
//! - the streams of a context take 2 MiB for each four, and its executable graphs 2 MiB for each 500 nodes. Objects that are destroyed give
//!   nothing back, but later ones use their memory;
//! - managed memory that is moved to the device (`cuMemPrefetchAsync`) is in the device's figure only. A whole block is moved at once;
//! - blocks of at most 1 MiB share pages of 2 MiB, and all other blocks take whole pages (`pages.rs`).
//!
//! The end of a context gives everything of it back.

use std::collections::BTreeMap;

use gpumem_core::device_model::{DeviceModel, ModelError};

use crate::card::{Gpu, Memory};
use crate::cuda::{ErrorCode, Handle};
use crate::driver::Call;

pub(crate) const MIB: u64 = 1 << 20;
/// The driver takes memory in steps of this size.
const STEP: u64 = 2 * MIB;

/// The memory of the first context that is in the device's figure only, with the part that `cuInit` takes.
const DEVICE_ONLY: u64 = 9 * MIB;
const OF_INIT: u64 = 3 * MIB + MIB / 4;

const RESIDENT_THREADS: u64 = 132 * 2048;
/// The local memory of each resident thread in the memory of a context. It is also the limit of the stack at the start.
pub(crate) const LOCAL_OF_CONTEXT: u64 = 1024;
/// The heap in the memory of a context.
pub(crate) const HEAP_OF_CONTEXT: u64 = 8 * MIB;
const STREAMS_PER_STEP: usize = 4;
const NODES_PER_STEP: usize = 500;

/// What the driver took memory for, with the context that it ends with. The purposes without a context are in the device's figure only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Purpose {
    Init,
    FirstContext,
    Managed,
    Context(Handle),
    Modules(Handle),
    Local(Handle),
    Heap(Handle),
    Streams(Handle),
    Graphs(Handle),
}

impl Purpose {
    /// Returns the context that the memory ends with.
    fn context(self) -> Option<Handle> {
        match self {
            Self::Init | Self::FirstContext | Self::Managed => None,
            Self::Context(context)
            | Self::Modules(context)
            | Self::Local(context)
            | Self::Heap(context)
            | Self::Streams(context)
            | Self::Graphs(context) => Some(context),
        }
    }
}

/// The memory of one GPU that the driver took by itself, by purpose. It is a part of the memory that the model holds.
#[derive(Debug, Default)]
pub(crate) struct Taken(BTreeMap<Purpose, u64>);

impl Taken {
    pub(crate) fn bytes(&self, purpose: Purpose) -> u64 {
        self.0.get(&purpose).copied().unwrap_or(0)
    }

    /// Takes or gives back memory, so that this purpose has this number of bytes.
    pub(crate) fn set(&mut self, model: &mut DeviceModel, purpose: Purpose, bytes: u64) -> Result<(), ModelError> {
        let before = self.bytes(purpose);
        model.release(before.saturating_sub(bytes));
        model.hold(bytes.saturating_sub(before))?;
        self.0.insert(purpose, bytes);
        Ok(())
    }

    /// Gives back everything of a context that ends.
    pub(crate) fn end(&mut self, model: &mut DeviceModel, context: Handle) {
        let mut over: Vec<_> = self.0.keys().copied().filter(|purpose| purpose.context() == Some(context)).collect();
        for purpose in over.drain(..) {
            model.release(self.0.remove(&purpose).unwrap_or(0));
        }
        if !self.has_context() {
            model.release(self.0.remove(&Purpose::FirstContext).unwrap_or(0));
        }
    }

    pub(crate) fn has_context(&self) -> bool {
        self.0.keys().any(|purpose| matches!(purpose, Purpose::Context(_)))
    }

    /// Returns the bytes that are in the device's figure only.
    pub(crate) fn of_device(&self) -> u64 {
        self.0.iter().filter(|(purpose, _)| purpose.context().is_none()).map(|(_, bytes)| bytes).sum()
    }
}

/// Takes the memory that `cuInit` takes, if it does with these settings.
pub(crate) fn by_init(call: &Call) -> Result<(), ErrorCode> {
    for card in &call.driver.visible {
        take(call, &call.driver.gpus[*card], Purpose::Init, OF_INIT)?;
    }
    Ok(())
}

/// Takes the memory of a new context, with or without the setting.
pub(crate) fn by_context(call: &Call, memory: &mut Memory, context: Handle) -> Result<(), ErrorCode> {
    let device_only = DEVICE_ONLY.min(call.driver.config.context);
    let first = memory.taken(Purpose::FirstContext);
    memory.take(Purpose::FirstContext, device_only.saturating_sub(memory.taken(Purpose::Init)))?;
    let outcome = memory.take(Purpose::Context(context), call.driver.config.context - device_only);
    if outcome.is_err() {
        memory.take(Purpose::FirstContext, first)?;
    }
    Ok(outcome?)
}

/// Takes what a context needs for this number of streams, if it has less.
pub(crate) fn by_streams(call: &Call, gpu: &Gpu, context: Handle, streams: usize) -> Result<(), ErrorCode> {
    grow(call, gpu, Purpose::Streams(context), streams.div_ceil(STREAMS_PER_STEP) as u64 * STEP)
}

/// Takes what a context needs for executable graphs with this number of nodes in total, if it has less.
pub(crate) fn by_graphs(call: &Call, gpu: &Gpu, context: Handle, nodes: usize) -> Result<(), ErrorCode> {
    grow(call, gpu, Purpose::Graphs(context), nodes.div_ceil(NODES_PER_STEP) as u64 * STEP)
}

/// Takes this number of bytes of local memory for each resident thread, if the context has less.
pub(crate) fn by_launch(call: &Call, gpu: &Gpu, context: Handle, local: u64) -> Result<(), ErrorCode> {
    grow(call, gpu, Purpose::Local(context), beyond_context(local))
}

/// Gives back local memory above the limit of the stack.
pub(crate) fn by_stack_limit(call: &Call, gpu: &Gpu, context: Handle, limit: u64) -> Result<(), ErrorCode> {
    let now = gpu.memory().taken(Purpose::Local(context));
    take(call, gpu, Purpose::Local(context), now.min(beyond_context(limit)))
}

/// Returns the local memory of all resident threads that is not in the memory of a context.
fn beyond_context(local: u64) -> u64 {
    RESIDENT_THREADS.saturating_mul(local.saturating_sub(LOCAL_OF_CONTEXT))
}

/// Takes memory up to this number of bytes.
fn grow(call: &Call, gpu: &Gpu, purpose: Purpose, bytes: u64) -> Result<(), ErrorCode> {
    let now = gpu.memory().taken(purpose);
    take(call, gpu, purpose, now.max(bytes))
}

/// Takes or gives back memory, if the driver takes memory by itself with these settings.
pub(crate) fn take(call: &Call, gpu: &Gpu, purpose: Purpose, bytes: u64) -> Result<(), ErrorCode> {
    if call.driver.config.driver_memory {
        gpu.memory().take(purpose, bytes)?;
    }
    Ok(())
}

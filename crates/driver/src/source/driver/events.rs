//! Creates the events of driver calls.

use super::super::{recorder::record, rejections, stacks};
use crate::{
    model::{Block, Bytes, Device, EventKind, Family, Key, MemKind, Space},
    sys::{
        calls::{IdKind, MemoryKind},
        cuda,
    },
};

/// Records that a block was allocated.
#[inline]
pub(super) fn record_allocation(key: Key, ordinal: u32, bytes: u64, kind: MemKind, context: u8) {
    let stack = stacks::stack_for(bytes);
    let kind = kind_on(ordinal, kind);
    let block = Block { context, stack, ..Block::new(cuda_device(ordinal), Bytes::new(bytes), kind) };
    record(&EventKind::Alloc { key, block });
    rejections::allocated(&block);
}

/// Records that memory was allocated or freed that cannot be counted. Reports show the number of such losses.
pub(super) fn record_lost() {
    record(&EventKind::Lost { count: 1 });
}

#[inline]
pub(super) fn cuda_device(ordinal: u32) -> Device {
    Device { family: Family::Cuda, ordinal }
}

/// Returns the kind under which this memory counts. A device without its own memory uses the machine's, so pinned and managed memory
/// count as device memory there: `cuMemAlloc` allocates from the same memory.
#[inline]
pub(super) fn kind_on(ordinal: u32, kind: MemKind) -> MemKind {
    if !kind.is_on_device() && cuda::is_integrated(ordinal) { MemKind::Device } else { kind }
}

pub(super) fn kind_of(memory: MemoryKind) -> MemKind {
    match memory {
        MemoryKind::Device => MemKind::Device,
        MemoryKind::Managed => MemKind::Managed,
        MemoryKind::PinnedHost => MemKind::PinnedHost,
    }
}

#[inline]
pub(super) fn block_key(id_kind: IdKind, id: u64) -> Key {
    let space = match id_kind {
        IdKind::Address => Space::Address,
        IdKind::Array => Space::Array,
        IdKind::Registered => Space::Registered,
    };
    Key::new(space, id)
}

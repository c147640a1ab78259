//! Records the events of one call.

use std::sync::atomic::Ordering::SeqCst;

use super::{
    super::{
        recorder::{before_allocation, record},
        rejections, stacks,
    },
    blocks::note_block,
    captures::{capture_ended, capture_started, is_captured},
    contexts::Owner,
    events::{block_key, cuda_device, kind_of, kind_on, record_allocation, record_lost},
    frees::{context_gone, freed, freeing, releasing, unmapping},
    graphs, own_memory,
    owners::{PoolLocation, device_of_pool, device_of_stream, owner_of},
    rejections::{call_rejected, report_rejection},
    state::{GENERATION, state},
};
use crate::{
    model::{Block, Bytes, EventKind, Key, MemKind, Space},
    sys::calls::{self, Call, Caller, IdKind},
};

/// Records every call except those on the fast path, which [`Observer`](super::observer::Observer) records itself.
pub(super) fn record_call(caller: &Caller, call: &Call) {
    match *call {
        Call::Allocated { id_kind, id, bytes, memory } => match owner_of(caller) {
            Some(Owner { device, number }) => {
                before_allocation();
                if id_kind == IdKind::Address {
                    note_block(id);
                }
                record_allocation(block_key(id_kind, id), device, bytes, kind_of(memory), number);
            }
            None => record_lost(),
        },
        Call::Pooled { address, bytes, stream, pool } => record_pooled(caller, address, bytes, stream, pool),
        Call::Uncounted => record_lost(),
        Call::Rejected { bytes, memory, pool, stream } => call_rejected(caller, bytes, memory, pool, stream),
        Call::NotCreated { bytes, device } => report_rejection(Some(device), bytes, MemKind::Vmm),
        Call::Freeing { id_kind, id } => freeing(id_kind, id),
        Call::Releasing { handle } => releasing(handle),
        Call::Unmapping { at, bytes } => unmapping(at, bytes),
        Call::Freed { succeeded } => freed(succeeded),
        Call::Created { handle, bytes, device } => record_handle(handle, bytes, device),
        Call::Retained { handle } => state().handles.retain(handle),
        Call::ForeignHandle { handle } => state().handles.import(handle),
        Call::Mapped { at, handle } => state().handles.map(at, handle),
        Call::Foreign { id_kind, id } => {
            state().imported.insert(block_key(id_kind, id));
        }
        Call::CaptureStarted { stream } => capture_started(stream),
        Call::CaptureEnded { stream, succeeded } => capture_ended(stream, succeeded),
        Call::GraphNode => _ = calls::record_graph_launches(),
        Call::Graphs { done } => graphs::launched(owner_of(caller).map(|owner| owner.device), done),
        Call::Pool { pool, device } => {
            state().pools.insert(pool, device);
        }
        Call::StreamCreated { stream } => {
            if let Some(Owner { device, .. }) = owner_of(caller) {
                state().streams.insert(stream, device);
                GENERATION.fetch_add(1, SeqCst);
            }
        }
        Call::StreamDestroyed { stream } => state().stream_destroyed(stream),
        Call::ContextGone { handle } => context_gone(handle),
        Call::DriverStarts { device } => own_memory::starts(device_of_work(caller, device), device.is_some()),
        Call::DriverDone { device, work } => own_memory::done(device, work),
        Call::PoolDestroyed { pool } => own_memory::pool_destroyed(pool),
    }
}

/// Returns the device on which a call may change the driver's memory. CUPTI does not report all of these calls, so their rows would not be
/// complete.
fn device_of_work(caller: &Caller, device: Option<u32>) -> Option<u32> {
    match caller {
        Caller::Cupti(_) => None,
        Caller::Dispatch => device.or_else(|| Some(owner_of(caller)?.device)),
    }
}

/// Records stream-ordered memory from this pool, or for `None` from the pool of the stream's device.
pub(super) fn record_pooled(caller: &Caller, address: u64, bytes: u64, stream: u64, pool: Option<u64>) {
    match is_captured(stream) {
        Some(false) => {}
        // The call became a node of a graph, which allocates when the graph is launched.
        Some(true) => return,
        None => return record_lost(),
    }
    let location = match pool {
        Some(pool) => device_of_pool(pool, address),
        None => device_of_stream(caller, stream, address),
    };
    before_allocation();
    note_block(address);
    let key = block_key(IdKind::Address, address);
    match location {
        PoolLocation::Device(device) => record_allocation(key, device, bytes, MemKind::Pool, 0),
        PoolLocation::Host => record_allocation(key, 0, bytes, MemKind::PinnedHost, 0),
        PoolLocation::Unknown => record_lost(),
    }
}

/// Records physical memory that was allocated behind a handle.
fn record_handle(handle: u64, bytes: u64, device: Option<u32>) {
    before_allocation();
    let kind = if device.is_some() { MemKind::Vmm } else { kind_on(0, MemKind::PinnedHost) };
    let stack = stacks::stack_for(bytes);
    let block = Block { stack, ..Block::new(cuda_device(device.unwrap_or(0)), Bytes::new(bytes), kind) };
    state().handles.create(handle, block);
    record(&EventKind::Alloc { key: Key::new(Space::Handle, handle), block });
    rejections::allocated(&block);
}

//! Allocations that failed because there was not enough memory.

use super::{
    super::rejections::rejected,
    events::{cuda_device, kind_of, kind_on},
    owners::{LAST_STREAM, LastStream, PoolLocation, device_of_stream, owner_of},
    state::state,
};
use crate::{
    model::{Bytes, MemKind},
    sys::calls::{self, Caller, MemoryKind},
};

/// Reports a failed allocation.
pub(super) fn call_rejected(caller: &Caller, bytes: u64, memory: Option<MemoryKind>, pool: Option<u64>, stream: u64) {
    let current = || owner_of(caller).map(|owner| owner.device);
    let kind = memory.map_or(MemKind::Pool, kind_of);
    let device = match (memory, pool) {
        (Some(_), _) => current(),
        // An unknown pool may be on the host, so it has no device.
        (None, Some(pool)) => state().pools.get(&pool).copied().flatten(),
        (None, None) => match device_of_stream(caller, stream, 0) {
            PoolLocation::Device(device) => Some(device),
            _ => current(),
        },
    };
    report_rejection(device, bytes, kind);
}

pub(super) fn report_rejection(ordinal: Option<u32>, bytes: u64, kind: MemKind) {
    let kind = ordinal.map_or(kind, |ordinal| kind_on(ordinal, kind));
    // The handler may free memory, and these frees must be recorded. No lock is held here.
    calls::as_program(|| rejected(ordinal.map(cuda_device), Bytes::new(bytes), kind));
    // The fast path does not check whether an allocation is a retry of the failed one, so the next allocation must not use it.
    LAST_STREAM.set(LastStream { generation: 0, ..LAST_STREAM.get() });
}

//! Determines the device and the context in which a call allocates.

use std::{
    cell::Cell,
    sync::atomic::Ordering::{Relaxed, SeqCst},
};

use super::{
    super::{rejections, stacks::StackFilter},
    contexts::Owner,
    state::{CU_STREAM_LEGACY, GENERATION, is_capture_active, state},
};
use crate::sys::{
    calls::{Caller, Context},
    cuda,
};

const CU_STREAM_PER_THREAD: u64 = 2;

/// The context in which a thread last allocated. Programs rarely change it.
#[derive(Clone, Copy, Default)]
struct LastContext {
    context: Context,
    generation: u32,
    owner: Owner,
}

/// The stream on which a thread last allocated, with everything that the next allocation on it needs.
#[derive(Clone, Copy)]
pub(super) struct LastStream {
    pub(super) handle: u64,
    /// The value of [`GENERATION`] for which this is valid; 0 if there is no stream.
    pub(super) generation: u32,
    pub(super) device: u32,
    pub(super) stacks: StackFilter,
}

thread_local! {
    static LAST_CONTEXT: Cell<LastContext> = const {
        let owner = Owner { device: 0, number: 0 };
        Cell::new(LastContext { context: Context { handle: 0, uid: 0 }, generation: 0, owner })
    };
    pub(super) static LAST_STREAM: Cell<LastStream> =
        const { Cell::new(LastStream { handle: 0, generation: 0, device: 0, stacks: StackFilter::NONE }) };
}

/// Where stream-ordered memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PoolLocation {
    Device(u32),
    Host,
    Unknown,
}

impl PoolLocation {
    fn on(device: Option<u32>) -> Self {
        device.map_or(Self::Unknown, Self::Device)
    }
}

/// Returns the device and the number of the context in which a call was made.
#[inline]
pub(super) fn owner_of(caller: &Caller) -> Option<Owner> {
    let context = match caller {
        Caller::Cupti(context) => *context,
        Caller::Dispatch => Context { handle: cuda::current_owner()?, uid: 0 },
    };
    let generation = GENERATION.load(Relaxed);
    let last = LAST_CONTEXT.get();
    if last.context == context && last.generation == generation {
        return Some(last.owner);
    }
    let owner = find_owner_of(caller, context)?;
    LAST_CONTEXT.set(LastContext { context, generation, owner });
    Some(owner)
}

#[inline(never)]
fn find_owner_of(caller: &Caller, context: Context) -> Option<Owner> {
    // No lock is held while another library is called.
    let (context, device) = match caller {
        Caller::Cupti(_) => {
            let known = state().contexts.get(context);
            if known.is_some() {
                return known;
            }
            (context, crate::sys::cupti::device_of(context)?)
        }
        Caller::Dispatch => {
            let (device, uid) = cuda::identify_context()?;
            (Context { uid, ..context }, device)
        }
    };
    Some(state().contexts.number(context, device))
}

/// Returns the device of the stream on which the memory at `address` was allocated.
pub(super) fn device_of_stream(caller: &Caller, stream: u64, address: u64) -> PoolLocation {
    let generation = GENERATION.load(SeqCst);
    if matches!(stream, 0 | CU_STREAM_LEGACY | CU_STREAM_PER_THREAD) {
        return PoolLocation::on(owner_of(caller).map(|owner| owner.device));
    }
    let known = state().streams.get(&stream).copied();
    // If the stream is older than the subscription, the driver knows the device of the memory.
    let Some(device) = known.or_else(|| cuda::device_at(address)) else { return PoolLocation::Unknown };
    if known.is_none() {
        state().streams.insert(stream, device);
    }
    // A thread that remembers its stream skips two checks: whether the stream is captured, and whether a retried allocation succeeded after
    // it had failed. While one of these checks is needed, the thread does not remember the stream.
    if !is_capture_active() && !rejections::is_watched() {
        LAST_STREAM.set(LastStream { handle: stream, generation, device, stacks: StackFilter::now() });
    }
    PoolLocation::Device(device)
}

/// Returns the device of the pool from which the memory at `address` was allocated.
pub(super) fn device_of_pool(pool: u64, address: u64) -> PoolLocation {
    let known = state().pools.get(&pool).copied();
    match known {
        Some(Some(device)) => PoolLocation::Device(device),
        Some(None) => PoolLocation::Host,
        None => {
            let device = cuda::device_at(address);
            if device.is_some() {
                state().pools.insert(pool, device);
            }
            PoolLocation::on(device)
        }
    }
}

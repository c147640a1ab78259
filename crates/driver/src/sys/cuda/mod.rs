//! The CUDA driver, called through cudarc's `result` functions: ordinals of devices, contexts, blocks, pools.
//!
//! Only [`CudaDevice::preload`] creates a context, and only [`CudaDevice::trim`] waits for the device. No call changes the calling thread's
//! current context.

mod blocks;
mod capture;
#[cfg_attr(not(feature = "dry"), allow(dead_code, reason = "without dry runs, nobody selects a simulated card"))]
mod card;
mod context;
mod device;
mod failure;
mod functions;
mod library;
mod pool;

pub(crate) use self::context::{current_context, current_owner, has_primary_context, identify_context};
pub(crate) use self::device::{CudaDevice, current, devices, is_integrated};
#[cfg(feature = "dry")]
pub(crate) use self::functions::load_function;
pub(crate) use self::{
    blocks::{AddressRange, belongs_to_graph, block_number, device_at, next_block_number, range_at},
    capture::{graph_memory, is_capturing},
    functions::{LoadedFunction, load_for_hooks, loaded_function, resident_threads, stack_limit},
    pool::{PoolState, default_pool, pool_state},
};
#[cfg(feature = "dry")]
pub(super) use self::{
    capture::relaxed,
    card::{card_of_thread, is_card_used, is_own, own, reset_card, select_card, selected_card},
    context::current_ordinal,
    device::initialised_devices,
};
pub(super) use self::{
    context::primary_context,
    library::{LIBRARY, load},
};

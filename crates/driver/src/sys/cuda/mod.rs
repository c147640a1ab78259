//! The CUDA driver, called through cudarc's `result` functions: device numbers, contexts, blocks, pools.
//!
//! Only [`CudaDevice::preload`] creates a context, and only [`CudaDevice::trim`] waits for the device. After each call, the
//! calling thread's current context is the one that it was before.

mod blocks;
mod capture;
mod card;
mod context;
mod device;
mod failure;
mod library;
mod pool;

pub(crate) use self::card::card_of_thread;
pub(crate) use self::context::{current_context, current_owner, has_primary_context, identify_context};
pub(crate) use self::device::{CudaDevice, current, devices, initialised_devices, is_integrated};
pub(crate) use self::{
    blocks::{AddressRange, belongs_to_graph, block_number, device_at, next_block_number, range_at},
    capture::{graph_memory, is_capturing},
    library::load_for_hooks,
};
pub(super) use self::{
    capture::relaxed,
    card::{is_card_used, is_own, own, reset_card, select_card, selected_card},
    context::{current_ordinal, primary_context},
    library::{LIBRARY, load},
};

//! The current context, and primary contexts.

use cudarc::driver::{result, sys};

use super::card::{card_of_thread, own};
use super::failure::call_failed;
use super::library::ctx_get_id;
use crate::error::Error;

#[inline]
pub(super) fn current_device() -> Result<Option<sys::CUdevice>, Error> {
    let mut device = 0;
    // SAFETY: the driver is initialized and the out-parameter is a live `CUdevice`.
    match own(|| unsafe { sys::cuCtxGetDevice(&raw mut device) }) {
        // The thread has no context.
        sys::CUresult::CUDA_ERROR_INVALID_CONTEXT => Ok(None),
        answer => {
            answer.result().map_err(|error| call_failed("cuCtxGetDevice", error, None))?;
            Ok(Some(device))
        }
    }
}

/// Returns the calling thread's current context, if it has one. Hooks may call this.
#[doc(alias = "cuCtxGetCurrent")]
pub(crate) fn current_context() -> Option<usize> {
    result::ctx::get_current().ok().flatten().map(<*mut _>::addr)
}

/// Returns an id for the current context and the thread's simulated GPU. If the context has only one GPU, this is the context's address.
/// Hooks may call this.
pub(crate) fn current_owner() -> Option<usize> {
    // No address has these bits set.
    Some(current_context()? | (card_of_thread() as usize) << 57)
}

/// Returns the device of the current context.
pub(in crate::sys) fn current_ordinal() -> Option<u32> {
    u32::try_from(current_device().ok()??).ok()
}

/// Returns the device of the current context, and an id that no other context of the process has. The id is 0 if the driver is older than
/// 12.0.
#[doc(alias("cuCtxGetDevice", "cuCtxGetId"))]
pub(crate) fn identify_context() -> Option<(u32, u64)> {
    let device = current_ordinal()?;
    let mut uid = 0;
    if let Some(get) = ctx_get_id() {
        // SAFETY: null means the current context, and the out-parameter is live.
        unsafe { get(std::ptr::null_mut(), &raw mut uid) };
    }
    Some((device, uid))
}

/// Returns whether the device's primary context exists.
#[doc(alias = "cuDevicePrimaryCtxGetState")]
pub(crate) fn has_primary_context(device: sys::CUdevice) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: the driver accepts any number, and both out-parameters are live.
    let answer = unsafe { sys::cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut active) };
    answer.result().is_ok() && active != 0
}

/// Returns the device's primary context, if it exists.
pub(in crate::sys) fn primary_context(device: sys::CUdevice) -> Option<usize> {
    if !has_primary_context(device) {
        return None;
    }
    // SAFETY: the context exists, so this adds a reference to it and does not create one. The same reference is released.
    unsafe {
        let context = result::primary_ctx::retain(device).ok()?;
        let _ = result::primary_ctx::release(device);
        Some(context.addr())
    }
}

//! Blocks at addresses, such as those of `cuMemAlloc`.

use std::{ffi::c_int, ptr};

use cudarc::driver::sys;

use super::{
    cards,
    memory::{Backing, Block},
    mode::{LARGEST_REAL, MODE, Mode},
    places::PAGE,
    state::{
        CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, Real, SUCCESS, get, here, inside, is_real, memory, put,
        watch,
    },
};
use crate::{device_model::ModelError, sys::cuda};

fn code_of(error: ModelError) -> u32 {
    match error {
        ModelError::OutOfMemory => CUDA_ERROR_OUT_OF_MEMORY,
        ModelError::ZeroBytes | ModelError::UnknownAddress => CUDA_ERROR_INVALID_VALUE,
    }
}

/// # Safety
/// `real` must make the call, and `out` must be the address where it writes the result. A pool of 0 means the pool of the stream's device.
pub(super) unsafe fn alloc(out: u64, bytes: u64, pool: Option<u64>, stream: u64, real: Real<'_>) -> u32 {
    let (context, current) = here();
    let of_pool = pool.and_then(|pool| cards::of_pool(pool).or_else(|| cards::of_stream(stream)));
    let device = of_pool.unwrap_or(current);
    // Without a context, or for 0 bytes, the driver returns an error.
    if context == 0 || bytes == 0 || out == 0 {
        return real();
    }
    let granted = memory().grant(device, bytes, pool.is_some());
    let grant = match granted {
        Ok(grant) => grant,
        Err(error) => return code_of(error),
    };
    let result = if is_real(bytes) {
        match real() {
            // SAFETY: the call succeeded, so it wrote the address.
            SUCCESS => Ok((unsafe { get(out) }, Backing::Real)),
            code => Err(code),
        }
    } else {
        reserve(bytes).map(|address| (address, Backing::Dry)).ok_or(CUDA_ERROR_OUT_OF_MEMORY)
    };
    match result {
        Ok((address, backing)) => {
            memory().insert(address, bytes, backing, context, device, Some(grant));
            if backing == Backing::Dry || cards::are_apart() {
                watch(address, bytes);
            }
            if backing == Backing::Dry {
                // SAFETY: this function's contract requires that `out` is valid for writing the address.
                unsafe { put(out, address) };
            } else if matches!(MODE.get(), Some(Mode::Dry { .. })) {
                clear(address, bytes);
            }
            SUCCESS
        }
        Err(code) => {
            memory().withdraw(grant);
            code
        }
    }
}

/// Reserves addresses without memory.
#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
pub(super) fn reserve(bytes: u64) -> Option<u64> {
    const TRIES: usize = 8;

    let bytes = bytes.checked_next_multiple_of(PAGE)?;
    let at = |place| {
        let mut address = 0;
        // SAFETY: the out-parameter is live.
        inside(|| unsafe { sys::cuMemAddressReserve(&raw mut address, bytes as usize, PAGE as usize, place, 0) })
            .result()
            .map(|()| address)
            .ok()
    };
    for _ in 0..TRIES {
        let place = memory().places.take(bytes);
        match at(place) {
            Some(address) if address == place || place == 0 => return Some(address),
            // The driver has its own memory at this place, which is not tried again. SAFETY: the range was just reserved, and no other code
            // uses it.
            Some(address) => _ = inside(|| unsafe { sys::cuMemAddressFree(address, bytes as usize) }),
            None => {}
        }
    }
    at(0)
}

/// Sets real memory to zeros, so that an index that a skipped kernel should have written there is valid.
#[allow(clippy::cast_possible_truncation, reason = "a block is as large as `usize` on these targets")]
fn clear(address: u64, bytes: u64) {
    // A new stream does not wait for the program's work, and may be used while a stream is captured.
    inside(|| {
        cuda::relaxed(|| {
            let mut stream = ptr::null_mut();
            let non_blocking = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the block was just allocated, and no other code knows its address. The stream lives until this returns.
            unsafe {
                if sys::cuStreamCreate(&raw mut stream, non_blocking).result().is_ok() {
                    let _ = sys::cuMemsetD8Async(address, 0, bytes as usize, stream).result();
                    let _ = sys::cuStreamSynchronize(stream).result();
                    let _ = sys::cuStreamDestroy_v2(stream).result();
                }
            }
        });
    });
}

/// Removes all blocks of a destroyed context.
fn end_context(context: u64) {
    cards::forget(context);
    let dry = memory().remove_all(|block| block.context == context);
    for (address, block) in dry {
        release_block(address, block);
    }
}

#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
fn release_block(address: u64, block: Block) {
    let bytes = block.bytes.next_multiple_of(PAGE) as usize;
    // SAFETY: the range was reserved for this block, which no longer exists.
    let _ = inside(|| unsafe { sys::cuMemAddressFree(address, bytes) }).result();
    memory().places.release(address, bytes as u64);
}

pub(super) fn free(address: u64, real: Real<'_>) -> u32 {
    let known = memory().blocks.get(&address).copied();
    match known {
        Some(block) if block.backing == Backing::Dry => {
            // After this line, another thread may get the address.
            let removed = memory().remove(address);
            if removed.is_none() {
                return CUDA_ERROR_INVALID_VALUE;
            }
            release_block(address, block);
            SUCCESS
        }
        Some(_) => {
            let removed = memory().blocks.remove(&address);
            let result = real();
            let mut memory = memory();
            match (removed, result) {
                (Some(block), SUCCESS) => memory.withdraw_block(block),
                // The block still exists.
                (Some(block), _) => _ = memory.blocks.insert(address, block),
                (None, _) => {}
            }
            result
        }
        None => real(),
    }
}

/// # Safety
/// `words` must be the arguments of `cuMemAllocPitch_v2`.
pub(super) unsafe fn alloc_pitch(words: &[u64], real: Real<'_>) -> u32 {
    // The driver aligns rows to this (`CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT` is smaller).
    let pitch = words[2].checked_next_multiple_of(512);
    let Some((pitch, bytes)) = pitch.and_then(|pitch| Some((pitch, pitch.checked_mul(words[3])?))) else {
        return CUDA_ERROR_OUT_OF_MEMORY;
    };
    // SAFETY: the first two arguments are the places for the address and the pitch.
    unsafe {
        let result = alloc(words[0], bytes, None, 0, real);
        if result == SUCCESS && !is_real(bytes) {
            put(words[1], pitch);
        }
        result
    }
}

/// Allocates managed memory. It is on the host until a GPU touches it, and takes no memory of a GPU.
///
/// # Safety
/// `words` must be the arguments of `cuMemAllocManaged`.
pub(super) unsafe fn alloc_managed(words: &[u64], real: Real<'_>) -> u32 {
    let result = real();
    if result == SUCCESS && words[1] > LARGEST_REAL {
        // SAFETY: the call succeeded, so it wrote the address.
        let address = unsafe { get(words[0]) };
        watch(address, words[1]);
        let (context, device) = here();
        memory().insert(address, words[1], Backing::Managed, context, device, None);
    }
    result
}

pub(super) fn destroy_context(context: u64, real: Real<'_>) -> u32 {
    let result = real();
    if result == SUCCESS {
        end_context(context);
    }
    result
}

#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
pub(super) fn reset_primary_context(device: u64, real: Real<'_>) -> u32 {
    let context = inside(|| cuda::primary_context(device as c_int)).map_or(0, |context| context as u64);
    let result = real();
    if result == SUCCESS && context != 0 {
        end_context(context);
    }
    result
}

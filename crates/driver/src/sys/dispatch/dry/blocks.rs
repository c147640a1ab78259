//! Blocks at addresses, such as those of `cuMemAlloc`.

use std::ffi::c_int;

use cudarc::driver::sys;
use once_cell::sync::OnceCell;

use super::{
    behind, cards,
    memory::Backing,
    mode::is_dry_run,
    places::PAGE,
    state::{
        CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, Real, SUCCESS, get, here, inside, is_real, largest_real,
        memory, own_block, put, watch, watch_pinned, watch_real,
    },
    work::clear,
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
    let dry = || place(bytes, device).map(|address| (address, Backing::Dry)).ok_or(CUDA_ERROR_OUT_OF_MEMORY);
    let is_real = is_real(bytes);
    let result = if is_real {
        memory().start_change();
        let placed = if pool.is_none() { place_real(bytes, device) } else { None };
        match placed.map_or_else(|| Err(real()), |address| Ok((address, Backing::Placed))) {
            // SAFETY: the call succeeded, so it wrote the address.
            Err(SUCCESS) => Ok((unsafe { get(out) }, Backing::Real)),
            // Other processes may use the memory of the real GPU.
            Err(CUDA_ERROR_OUT_OF_MEMORY) if is_dry_run() => dry(),
            result => result,
        }
    } else {
        dry()
    };
    let mut account = memory();
    if is_real {
        account.end_change();
    }
    match result {
        Ok((address, backing)) => {
            account.insert(address, bytes, backing, context, device, Some(grant));
            drop(account);
            if backing.is_ours() || cards::are_apart() {
                watch(address, bytes);
            } else {
                watch_real(address, bytes);
            }
            if backing.is_ours() {
                // SAFETY: this function's contract requires that `out` is valid for writing the address.
                unsafe { put(out, address) };
            }
            if backing.is_real() && is_dry_run() {
                clear(address, bytes);
            }
            SUCCESS
        }
        Err(code) => {
            account.withdraw(grant);
            code
        }
    }
}

/// How often a place is tried. The driver may have its own memory there.
const TRIES: usize = 8;

/// Returns addresses for a dry block. Another block may have had them.
fn place(bytes: u64, device: u32) -> Option<u64> {
    let bytes = bytes.checked_next_multiple_of(PAGE)?;
    if let Some(start) = memory().places.take_hole(bytes) {
        return Some(start);
    }
    // Before it starts a chunk, the driver takes a hole in its own chunks, wherever it is asked for addresses.
    let unused = memory().places.unused(bytes);
    if let Some(start) = unused.and_then(|unused| reserve_anywhere(unused, bytes)) {
        if Some(start) != unused {
            behind::put(start, bytes, device);
            return Some(start);
        }
        free_addresses(start, bytes);
    }
    for _ in 0..TRIES {
        let (start, new) = memory().places.take_chunk(bytes)?;
        if new.is_empty() || reserve_at(new.start, new.end - new.start) == Some(new.start) {
            behind::put(new.start, new.end - new.start, device);
            return Some(start);
        }
        memory().places.discard(start);
    }
    let start = reserve_at(0, bytes)?;
    behind::put(start, bytes, device);
    Some(start)
}

/// Allocates memory of the GPU for a block, at an address among those of dry blocks. PyTorch's allocator compares addresses, so their order
/// must be that of a real run. Returns `None` if the driver must allocate the block: small blocks share a page of the driver, and on a machine
/// with several GPUs, each GPU can reach the driver's blocks.
fn place_real(bytes: u64, device: u32) -> Option<u64> {
    static IS_ALONE: OnceCell<bool> = OnceCell::new();

    let mut count = 0;
    // SAFETY: the out-parameter is live.
    let is_alone = || inside(|| unsafe { sys::cuDeviceGetCount(&raw mut count) }).result().is_ok() && count == 1;
    if !is_dry_run() || bytes < PAGE || !*IS_ALONE.get_or_init(is_alone) {
        return None;
    }
    let start = place(bytes, device)?;
    if behind::put_own(start, bytes.next_multiple_of(PAGE), device) {
        return Some(start);
    }
    memory().places.release(start, bytes);
    None
}

/// Frees a block that gpumem has placed.
fn free_placed(address: u64) -> u32 {
    let Some(block) = memory().blocks.remove(&address) else { return CUDA_ERROR_INVALID_VALUE };
    memory().start_change();
    // As with the driver's own free, work that uses the block ends first.
    inside(|| {
        cuda::relaxed(|| {
            // SAFETY: the call has no arguments.
            _ = unsafe { sys::cuCtxSynchronize() };
        });
    });
    behind::put_back(address, block.bytes.next_multiple_of(PAGE), block.device);
    let mut memory = memory();
    memory.withdraw_block(address, block);
    memory.end_change();
    SUCCESS
}

/// Reserves addresses without memory for the program.
pub(super) fn reserve(bytes: u64) -> Option<u64> {
    let place = || {
        let places = &mut memory().program_places;
        places.take_hole(bytes).or_else(|| Some(places.take_chunk(bytes)?.0))
    };
    let reserved = (0..TRIES).find_map(|_| {
        let place = place()?;
        reserve_at(place, bytes).filter(|start| *start == place)
    });
    reserved.or_else(|| reserve_at(0, bytes))
}

/// Reserves addresses from this one on, or somewhere else if it is 0. Returns where they are, or `None` if the driver has its own memory
/// there.
fn reserve_at(place: u64, bytes: u64) -> Option<u64> {
    let start = reserve_anywhere(place, bytes)?;
    if place == 0 || start == place {
        return Some(start);
    }
    free_addresses(start, bytes);
    None
}

/// Reserves addresses, from this one on if the driver wants to.
#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
fn reserve_anywhere(place: u64, bytes: u64) -> Option<u64> {
    let mut start = 0;
    // SAFETY: the out-parameter is live.
    let code = inside(|| unsafe { sys::cuMemAddressReserve(&raw mut start, bytes as usize, PAGE as usize, place, 0) });
    code.result().ok().map(|()| start)
}

/// Frees addresses that were just reserved.
#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
fn free_addresses(start: u64, bytes: u64) {
    // SAFETY: gpumem has reserved the range, and no other code uses it.
    _ = inside(|| unsafe { sys::cuMemAddressFree(start, bytes as usize) });
}

/// Removes all blocks of a destroyed context.
fn end_context(context: u64) {
    cards::forget(context);
    let placed = memory().placed_of(context);
    for address in placed {
        free_placed(address);
    }
    memory().remove_all_of(context);
}

pub(super) fn free(address: u64, real: Real<'_>) -> u32 {
    let known = memory().blocks.get(&address).copied();
    match known {
        // Another thread may free it at the same time, and after this another thread may get the address.
        Some(block) if block.backing == Backing::Dry => match memory().remove(address) {
            Some(_) => SUCCESS,
            None => CUDA_ERROR_INVALID_VALUE,
        },
        Some(block) if block.backing == Backing::Placed => free_placed(address),
        Some(_) => {
            let removed = memory().blocks.remove(&address);
            let result = changing(real);
            let mut memory = memory();
            memory.end_change();
            match (removed, result) {
                (Some(block), SUCCESS) => memory.withdraw_block(address, block),
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
    if ![4, 8, 16].contains(&(words[4] & 0xffff_ffff)) {
        return real();
    }
    let pitch = words[2].checked_next_multiple_of(512);
    let Some((pitch, bytes)) = pitch.and_then(|pitch| Some((pitch, pitch.checked_mul(words[3])?))) else {
        return CUDA_ERROR_OUT_OF_MEMORY;
    };
    // SAFETY: the first two arguments are the places for the address and the pitch.
    unsafe {
        let result = alloc(words[0], bytes, None, 0, real);
        if result == SUCCESS && own_block(get(words[0])).is_some() {
            put(words[1], pitch);
        }
        result
    }
}

/// Returns whether a dry run captures this stream.
pub(super) fn is_captured(stream: u64) -> bool {
    is_dry_run() && inside(|| cuda::is_capturing(stream)) == Some(true)
}

/// Calls the driver for an allocation or a free of real memory.
fn changing(real: Real<'_>) -> u32 {
    memory().start_change();
    real()
}

/// Allocates managed memory. It is on the host until a GPU touches it, and takes no memory of a GPU.
///
/// # Safety
/// `words` must be the arguments of `cuMemAllocManaged`.
pub(super) unsafe fn alloc_managed(words: &[u64], real: Real<'_>) -> u32 {
    let result = real();
    if result == SUCCESS && words[1] > largest_real() {
        // SAFETY: the call succeeded, so it wrote the address.
        let address = unsafe { get(words[0]) };
        watch(address, words[1]);
        let (context, device) = here();
        memory().insert(address, words[1], Backing::Managed, context, device, None);
    }
    result
}

/// Allocates pinned memory, which may contain tables of addresses.
///
/// # Safety
/// `words` must be the arguments of `cuMemHostAlloc` or `cuMemAllocHost`.
pub(super) unsafe fn alloc_host(words: &[u64], real: Real<'_>) -> u32 {
    let result = real();
    if result == SUCCESS {
        // SAFETY: the call succeeded, so it wrote the address.
        let address = unsafe { get(words[0]) };
        let (context, _) = here();
        memory().pinned.insert(address, (words[1], context));
        watch_pinned(address, words[1]);
    }
    result
}

pub(super) fn free_host(address: u64, real: Real<'_>) -> u32 {
    memory().pinned.remove(&address);
    real()
}

/// Forgets the pinned blocks of a context. The driver frees them together with the context.
fn forget_pinned(context: u64) {
    memory().pinned.retain(|_, (_, owner)| *owner != context);
}

pub(super) fn destroy_context(context: u64, real: Real<'_>) -> u32 {
    forget_pinned(context);
    let result = real();
    if result == SUCCESS {
        end_context(context);
    }
    result
}

/// Resets a primary context, or releases a reference to it, which may be the last one.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
pub(super) fn leave_primary_context(device: u64, real: Real<'_>) -> u32 {
    let context = inside(|| cuda::primary_context(device as c_int)).map_or(0, |context| context as u64);
    forget_pinned(context);
    let result = real();
    let is_left = || inside(|| cuda::has_primary_context(device as c_int));
    if result == SUCCESS && context != 0 && !is_left() {
        end_context(context);
    }
    result
}

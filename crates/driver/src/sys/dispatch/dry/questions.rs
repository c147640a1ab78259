//! Answers queries of programs about memory and GPUs.

use std::{ptr, slice};

use cudarc::driver::sys;

use super::{
    cards,
    memory::Block,
    state::{
        CUDA_ERROR_INVALID_VALUE, Real, SUCCESS, card, get, here, inside, is_dry, memory, own_block, physical, put,
    },
};

/// # Safety
/// `data` must be valid for writing this attribute.
unsafe fn attribute(data: u64, number: u32, address: u64, (start, block): (u64, Block)) -> u32 {
    const CU_MEMORYTYPE_DEVICE: u64 = 2;
    // The values come from `CUpointer_attribute`, with the bytes that the driver writes, even for a boolean.
    let (value, bytes) = match number {
        // These are the context, the memory type, the address on the device, and the buffer id.
        1 => (block.context, 8),
        2 => (CU_MEMORYTYPE_DEVICE, 4),
        3 => (address, 8),
        7 | 20 => (1 << 62 | block.number, 8),
        // These are flags: operations are synchronous, the memory is managed, and the memory can be shared.
        6 | 8 | 10 | 15 => (0, 4),
        9 if cards::show_machine() => (0, 4),
        9 => (block.device.into(), 4),
        11 | 19 => (start, 8),
        12 | 18 => (block.bytes, 8),
        // These are the flag for mapped memory, and the access flags for reading and writing.
        13 => (1, 4),
        16 => (3, 4),
        // These are the types of handles, and the pool.
        14 | 17 => (0, 8),
        _ => return CUDA_ERROR_INVALID_VALUE,
    };
    // SAFETY: `data` is valid for writing the attribute, by the contract of this function.
    unsafe { ptr::copy_nonoverlapping(value.to_le_bytes().as_ptr(), data as *mut u8, bytes) };
    SUCCESS
}

/// # Safety
/// `words` must be the arguments of `cuPointerGetAttribute`.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
pub(super) unsafe fn one_attribute(words: &[u64], real: Real<'_>) -> u32 {
    match own_block(words[2]) {
        Some(_) if words[0] == 0 => CUDA_ERROR_INVALID_VALUE,
        // SAFETY: the program passes a place for this attribute.
        Some(block) => unsafe { attribute(words[0], words[1] as u32, words[2], block) },
        None => {
            let result = real();
            // SAFETY: the driver has written this attribute there.
            unsafe { name_card(result, words[0], words[1] as u32, words[2]) };
            result
        }
    }
}

/// Replaces the device that the driver returned for real memory with the simulated GPU.
///
/// # Safety
/// If the call has succeeded, `data` must be the address of this attribute.
unsafe fn name_card(result: u32, data: u64, number: u32, address: u64) {
    const CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: u32 = 9;
    if result != SUCCESS
        || number != CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        || !cards::are_simulated()
        || cards::show_machine()
    {
        return;
    }
    let known = memory().device_of(address);
    let card = known.or_else(|| {
        let mut context = 0_u64;
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT;
        // SAFETY: the out-parameter is live and as wide as the attribute.
        let answer = inside(|| unsafe { sys::cuPointerGetAttribute((&raw mut context).cast(), attribute, address) });
        answer.result().ok().and_then(|()| cards::of_context(context))
    });
    if let Some(card) = card {
        // SAFETY: the program has a place for the attribute at `data`, by the contract of this function; this attribute is an int.
        unsafe { (data as *mut u32).write_unaligned(card) };
    }
}

/// # Safety
/// `words` must be the arguments of `cuPointerGetAttributes`.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
pub(super) unsafe fn attributes(words: &[u64], real: Real<'_>) -> u32 {
    let block = own_block(words[3]);
    let result = if block.is_none() { real() } else { SUCCESS };
    if block.is_none() && (result != SUCCESS || !cards::are_simulated()) {
        return result;
    }
    if words[1] == 0 || words[2] == 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: the program passes this number of attributes, and a place for each.
    unsafe {
        let attributes = slice::from_raw_parts(words[1] as *const u32, words[0] as u32 as usize);
        for (at, number) in attributes.iter().enumerate() {
            let data = (words[2] as *const u64).add(at).read();
            match block {
                // Like in the driver, an attribute that the memory does not have, such as an address on the host, is 0.
                Some(block) if attribute(data, *number, words[3], block) != SUCCESS => put(data, 0),
                Some(_) => {}
                None => name_card(result, data, *number, words[3]),
            }
        }
    }
    SUCCESS
}

/// # Safety
/// The addresses must be 0, or valid for writing a word.
unsafe fn put_both(places: [(u64, u64); 2]) -> u32 {
    for (out, value) in places.into_iter().filter(|(out, _)| *out != 0) {
        // SAFETY: by the contract of this function, a word can be written to each place that is not 0.
        unsafe { put(out, value) };
    }
    SUCCESS
}

/// # Safety
/// `words` must be the arguments of `cuMemGetAddressRange_v2`.
pub(super) unsafe fn range(words: &[u64], real: Real<'_>) -> u32 {
    match own_block(words[2]) {
        // SAFETY: the first two are null, or places for a word.
        Some((start, block)) => unsafe { put_both([(words[0], start), (words[1], block.bytes)]) },
        None => real(),
    }
}

/// # Safety
/// `words` must be the arguments of `cuMemGetAccess`.
pub(super) unsafe fn access(words: &[u64], real: Real<'_>) -> u32 {
    const CU_MEM_ACCESS_FLAGS_PROT_READWRITE: u64 = 3;
    if words[0] == 0 || !is_dry(words[2]) {
        return real();
    }
    // SAFETY: the first is a place for a word.
    unsafe { put(words[0], CU_MEM_ACCESS_FLAGS_PROT_READWRITE) };
    SUCCESS
}

/// # Safety
/// `words` must be the arguments of `cuMemGetAllocationPropertiesFromHandle`.
pub(super) unsafe fn properties(words: &[u64], real: Real<'_>) -> u32 {
    match physical(words[1]).filter(|physical| physical.is_dry) {
        Some(physical) => {
            // SAFETY: the first is a place for a `CUmemAllocationProp`.
            unsafe { (words[0] as *mut [u64; 4]).write_unaligned(physical.properties) };
            SUCCESS
        }
        None => real(),
    }
}

/// # Safety
/// `words` must be the arguments of `cuMemGetInfo_v2`.
pub(super) unsafe fn info(words: &[u64], real: Real<'_>) -> u32 {
    let (context, device) = here();
    if context == 0 {
        return real();
    }
    let (free, total) = memory().free_and_total(device);
    // SAFETY: both are null, or places for a word.
    unsafe { put_both([(words[0], free), (words[1], total)]) }
}

/// # Safety
/// `words` must be the arguments of `cuDeviceTotalMem_v2`.
pub(super) unsafe fn total(words: &[u64], real: Real<'_>) -> u32 {
    // The driver checks the ordinal.
    let result = real();
    if result == SUCCESS {
        // SAFETY: the driver has just written a word there.
        unsafe { put(words[0], card()) };
    }
    result
}

/// Returns a pool's card, or the current context's if it is not known.
fn card_of_pool(pool: u64) -> u32 {
    cards::of_pool(pool).unwrap_or_else(|| here().1)
}

/// # Safety
/// `words` must be the arguments of `cuMemPoolGetAttribute`.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
pub(super) unsafe fn pool_attribute(words: &[u64], real: Real<'_>) -> u32 {
    let device = card_of_pool(words[0]);
    // The range is from `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT` to `CU_MEMPOOL_ATTR_USED_MEM_HIGH`.
    let value = memory().on_card(device, |card| match words[1] as u32 {
        5 => Some(card.pool_reserved()),
        6 => Some(card.pool_reserved_high()),
        7 => Some(card.pool_used()),
        8 => Some(card.pool_used_high()),
        _ => None,
    });
    let Some(value) = value else { return real() };
    // SAFETY: these attributes are words.
    unsafe { put(words[2], value) };
    SUCCESS
}

/// # Safety
/// `words` must be the arguments of `cuMemPoolSetAttribute`.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
pub(super) unsafe fn set_pool_attribute(words: &[u64], real: Real<'_>) -> u32 {
    let result = real();
    if result == SUCCESS {
        let device = card_of_pool(words[0]);
        memory().on_card(device, |card| match words[1] as u32 {
            // SAFETY: `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD` is a word, which the driver has read.
            4 => card.set_pool_release_threshold(unsafe { get(words[2]) }),
            6 => card.reset_pool_reserved_high(),
            8 => card.reset_pool_used_high(),
            _ => {}
        });
    }
    result
}

pub(super) fn trim(pool: u64, keep: u64, real: Real<'_>) -> u32 {
    let result = real();
    let device = card_of_pool(pool);
    memory().on_card(device, |card| card.trim_to(keep));
    result
}

pub(super) fn synchronize(real: Real<'_>) -> u32 {
    let result = real();
    memory().synchronize();
    result
}

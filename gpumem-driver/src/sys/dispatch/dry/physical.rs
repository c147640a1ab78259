//! Physical memory that programs map themselves, as expandable segments of PyTorch do.

use cudarc::driver::sys;

use super::{
    cards,
    memory::{Backing, PAGE},
    state::{CUDA_ERROR_OUT_OF_MEMORY, Real, SUCCESS, get, inside, is_dry_handle, is_real, memory, put, watch},
};

/// # Safety
/// `words` are the arguments of `cuMemCreate`.
#[allow(clippy::cast_possible_truncation, reason = "an int is half a word")]
pub(super) unsafe fn create(words: &[u64], real: Real<'_>) -> u32 {
    const CU_MEM_LOCATION_TYPE_DEVICE: u32 = 1;
    let [out, bytes, properties, _] = *words else { return real() };
    if out == 0 || properties == 0 || bytes == 0 {
        return real();
    }
    // SAFETY: the caller passes a `CUmemAllocationProp`, which has 32 bytes: its third int is the sort of its place, and the fourth the device.
    let properties = unsafe { (properties as *const [u64; 4]).read_unaligned() };
    let (sort, device) = (properties[1] as u32, (properties[1] >> 32) as u32);
    if sort != CU_MEM_LOCATION_TYPE_DEVICE {
        return real();
    }
    let on_driver = match cards::location_on_driver(properties[1]) {
        Ok(location) => [properties[0], location, properties[2], properties[3]],
        Err(code) => return code,
    };
    if !memory().hold(device, bytes) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    let is_dry = !is_real(bytes);
    if is_dry {
        // The driver says whether it has memory of this sort: a program may then ask for another one.
        let code = one_page(on_driver);
        if code != SUCCESS {
            memory().release_held(device, bytes);
            return code;
        }
        let mut memory = memory();
        let handle = memory.dry_handle();
        memory.create(handle, bytes, device, true, properties);
        // SAFETY: the caller passes the place for the handle.
        unsafe { put(out, handle) };
        return SUCCESS;
    }
    let result = real();
    if result == SUCCESS {
        // SAFETY: the call succeeded, so it wrote the handle.
        memory().create(unsafe { get(out) }, bytes, device, false, properties);
    } else {
        memory().release_held(device, bytes);
    }
    result
}

/// What the driver answers if it is asked for a page with these properties.
#[allow(clippy::cast_possible_truncation, reason = "a page is small")]
fn one_page(properties: [u64; 4]) -> u32 {
    let mut handle = 0;
    // SAFETY: the out-parameter is live, and the properties are as long as the struct. Nobody else has the handle.
    inside(|| unsafe {
        let code = sys::cuMemCreate(&raw mut handle, PAGE as usize, properties.as_ptr().cast(), 0) as u32;
        if code == SUCCESS {
            let _ = sys::cuMemRelease(handle).result();
        }
        code
    })
}

#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
pub(super) fn unmap(address: u64, bytes: u64) -> u32 {
    let mapped = memory().mapped_in(address, bytes);
    for (address, mapping) in &mapped {
        if mapping.backing != Backing::Dry {
            // SAFETY: the program asks for it.
            let code = inside(|| unsafe { sys::cuMemUnmap(*address, mapping.bytes as usize) });
            if code.result().is_err() {
                return code as u32;
            }
        }
        memory().unmap(*address);
    }
    if mapped.is_empty() {
        // SAFETY: the program asks for it.
        return inside(|| unsafe { sys::cuMemUnmap(address, bytes as usize) }) as u32;
    }
    SUCCESS
}

pub(super) fn release(handle: u64, real: Real<'_>) -> u32 {
    let result = if is_dry_handle(handle) { SUCCESS } else { real() };
    if result == SUCCESS {
        memory().release(handle);
    }
    result
}

/// # Safety
/// The handle is written to `out`.
pub(super) unsafe fn retain(out: u64, address: u64, real: Real<'_>) -> u32 {
    let mapping = memory().mapped_around(address);
    if out == 0 {
        return real();
    }
    // SAFETY: the caller says so; the driver writes it as well.
    unsafe {
        let result = match mapping.filter(|mapping| mapping.backing == Backing::Dry) {
            Some(mapping) => {
                put(out, mapping.handle);
                SUCCESS
            }
            None => real(),
        };
        if result == SUCCESS {
            memory().retain(get(out));
        }
        result
    }
}

pub(super) fn map(address: u64, bytes: u64, handle: u64, real: Real<'_>) -> u32 {
    let is_dry = is_dry_handle(handle);
    let result = if is_dry { SUCCESS } else { real() };
    if result == SUCCESS {
        if is_dry || cards::are_simulated() {
            watch(address, bytes);
        }
        memory().map(address, bytes, handle);
    }
    result
}

/// # Safety
/// `words` are the arguments of `cuMemSetAccess`.
#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
pub(super) unsafe fn set_access(words: &[u64], real: Real<'_>) -> u32 {
    let mapped = memory().mapped_in(words[0], words[1]);
    if mapped.iter().all(|(_, mapping)| mapping.backing != Backing::Dry) {
        return real();
    }
    // SAFETY: the program passes so many descriptors.
    let places = match unsafe { cards::descriptors_on_driver(words[2], words[3]) } {
        Ok(places) => places,
        Err(code) => return code,
    };
    for (address, mapping) in mapped.iter().filter(|(_, mapping)| mapping.backing != Backing::Dry) {
        // SAFETY: the program asks for this access to all of the range, of which this is a part.
        let code = inside(|| unsafe {
            sys::cuMemSetAccess(*address, mapping.bytes as usize, places.as_ptr().cast(), places.len())
        }) as u32;
        if code != SUCCESS {
            return code;
        }
    }
    SUCCESS
}

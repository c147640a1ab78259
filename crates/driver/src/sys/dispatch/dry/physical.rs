//! Handles physical memory that programs map themselves, like PyTorch does for expandable segments.

use std::{
    fs::File,
    io::Write,
    os::fd::{FromRawFd, IntoRawFd, RawFd},
};

use cudarc::driver::sys;

use super::{
    behind, blocks, cards,
    memory::Backing,
    mode::is_dry_run,
    places::PAGE,
    state::{
        ALWAYS_REAL, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY, Real, SUCCESS, get,
        inside, is_dry_handle, largest_real, memory, physical, put, watch, watch_real,
    },
};

/// Reserves addresses for memory that the program maps itself. Unless the program names an address, they are in the range of dry blocks.
///
/// # Safety
/// `words` must be the arguments of `cuMemAddressReserve`.
pub(super) unsafe fn reserve(words: &[u64], real: Real<'_>) -> u32 {
    let [out, bytes, ..=PAGE, 0, 0] = *words else { return real() };
    if out == 0 || bytes == 0 || bytes % PAGE != 0 {
        return real();
    }
    let Some(address) = blocks::reserve(bytes) else { return real() };
    // SAFETY: the caller passes the place for the address.
    unsafe { put(out, address) };
    SUCCESS
}

/// # Safety
/// `words` must be the arguments of `cuMemCreate`.
#[allow(clippy::cast_possible_truncation, reason = "an int is half a word")]
pub(super) unsafe fn create(words: &[u64], real: Real<'_>) -> u32 {
    const CU_MEM_LOCATION_TYPE_DEVICE: u32 = 1;
    let [out, bytes, properties, _] = *words else { return real() };
    // The driver rejects what is not a number of pages.
    if out == 0 || properties == 0 || bytes == 0 || bytes % PAGE != 0 {
        return real();
    }
    // SAFETY: the caller passes a `CUmemAllocationProp`, which has 32 bytes: its third int is the type of its location, and the fourth one
    // the device.
    let properties = unsafe { (properties as *const [u64; 4]).read_unaligned() };
    let (sort, device) = (properties[1] as u32, (properties[1] >> 32) as u32);
    if sort != CU_MEM_LOCATION_TYPE_DEVICE {
        return real();
    }
    let on_driver = match cards::location_on_driver(properties[1]) {
        Ok(location) => [properties[0], location, properties[2], properties[3]],
        Err(code) => return code,
    };
    if is_dry_run() {
        _ = largest_real();
    }
    if !memory().hold(device, bytes) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    // Parts of one tensor that are real and dry would not be told apart, so only parts for small tensors are real.
    let is_dry = is_dry_run() && bytes > ALWAYS_REAL;
    if is_dry {
        // Only the driver knows whether it supports such memory. If it does not, a program may request another kind.
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

/// Returns the driver's answer to a request for a page with these properties.
#[allow(clippy::cast_possible_truncation, reason = "a page is small")]
fn one_page(properties: [u64; 4]) -> u32 {
    let mut handle = 0;
    // SAFETY: the out-parameter is live, and the properties are as long as the struct. No other code has the handle.
    inside(|| unsafe {
        let code = sys::cuMemCreate(&raw mut handle, PAGE as usize, properties.as_ptr().cast(), 0) as u32;
        if code == SUCCESS {
            let _ = sys::cuMemRelease(handle).result();
        }
        code
    })
}

/// A file describes dry memory to another process. Programs pass its descriptor like the driver's.
const CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: u64 = 1;

/// The first words of the file. The size in bytes and the properties follow.
const MARK: [u64; 2] = [u64::from_le_bytes(*b"gpumem d"), u64::from_le_bytes(*b"ry mem 1")];
const FILE_BYTES: usize = 7 * 8;

/// # Safety
/// `words` must be the arguments of `cuMemExportToShareableHandle`.
pub(super) unsafe fn export(words: &[u64], real: Real<'_>) -> u32 {
    let Some(physical) = physical(words[1]).filter(|physical| physical.is_dry) else { return real() };
    if words[0] == 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if words[2] & 0xffff_ffff != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    let content = MARK.into_iter().chain([physical.bytes]).chain(physical.properties).flat_map(u64::to_le_bytes);
    // The function of this name is in glibc 2.27 and later. SAFETY: the name ends with a zero. No other code has the descriptor that the
    // call returns.
    let file = unsafe {
        let descriptor = libc::syscall(libc::SYS_memfd_create, c"gpumem-dry".as_ptr(), libc::MFD_CLOEXEC);
        RawFd::try_from(descriptor)
            .ok()
            .filter(|descriptor| *descriptor >= 0)
            .map(|descriptor| File::from_raw_fd(descriptor))
    };
    match file {
        Some(file) if (&file).write_all(&content.collect::<Vec<_>>()).is_ok() => {
            // SAFETY: the program passes a place for a descriptor, which it closes.
            unsafe { (words[0] as *mut RawFd).write_unaligned(file.into_raw_fd()) };
            SUCCESS
        }
        _ => CUDA_ERROR_NOT_SUPPORTED,
    }
}

/// # Safety
/// `words` must be the arguments of `cuMemImportFromShareableHandle`.
#[allow(clippy::cast_possible_truncation, reason = "a descriptor and an int are parts of a word")]
pub(super) unsafe fn import(words: &[u64], real: Real<'_>) -> u32 {
    let mut content = [0; FILE_BYTES];
    let is_file = words[0] != 0 && words[2] & 0xffff_ffff == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    // SAFETY: the buffer has this number of bytes. A descriptor that is not a file cannot be read at an offset, and does not change.
    let mut copy = || unsafe { libc::pread(words[1] as RawFd, content.as_mut_ptr().cast(), FILE_BYTES, 0) };
    if !is_file || usize::try_from(copy()) != Ok(FILE_BYTES) {
        return real();
    }
    let word = |at: usize| content[at * 8..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    if [word(0), word(1)] != MARK {
        return real();
    }
    let properties = [3, 4, 5, 6].map(word);
    let handle = memory().import(word(2), (properties[1] >> 32) as u32, properties);
    // SAFETY: the program passes a place for the handle.
    unsafe { put(words[0], handle) };
    SUCCESS
}

#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
pub(super) fn unmap(address: u64, bytes: u64) -> u32 {
    let mapped = memory().mapped_in(address, bytes);
    let all: u64 = mapped.iter().map(|(_, mapping)| mapping.bytes).sum();
    // The driver unmaps only whole mappings.
    if let Some((first, _)) = mapped.first()
        && (*first, all) != (address, bytes)
    {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (address, mapping) in &mapped {
        if mapping.backing == Backing::Dry {
            behind::take_away(*address, mapping.bytes);
        } else {
            // SAFETY: the program requested the end of this mapping.
            let code = inside(|| unsafe { sys::cuMemUnmap(*address, mapping.bytes as usize) });
            if code.result().is_err() {
                return code as u32;
            }
        }
        memory().unmap(*address);
    }
    if mapped.is_empty() {
        // SAFETY: the program made this call.
        return inside(|| unsafe { sys::cuMemUnmap(address, bytes as usize) }) as u32;
    }
    SUCCESS
}

pub(super) fn release(handle: u64, real: Real<'_>) -> u32 {
    let result = match is_dry_handle(handle) {
        true if memory().has_reference(handle) => SUCCESS,
        true => CUDA_ERROR_INVALID_VALUE,
        false => real(),
    };
    if result == SUCCESS {
        memory().release(handle);
    }
    result
}

/// # Safety
/// `out` must be valid for writing a handle.
pub(super) unsafe fn retain(out: u64, address: u64, real: Real<'_>) -> u32 {
    let mapping = memory().mapped_around(address);
    if out == 0 {
        return real();
    }
    // SAFETY: by the contract of this function, `out` is valid for writing a handle, which the driver does as well.
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

pub(super) fn map(words: &[u64], real: Real<'_>) -> u32 {
    let [address, bytes, offset, handle, ..] = *words else { return real() };
    let is_dry = is_dry_handle(handle);
    let result = match is_dry {
        true if offset == 0 && memory().can_map(address, bytes, handle) => SUCCESS,
        true => CUDA_ERROR_INVALID_VALUE,
        false => real(),
    };
    if result == SUCCESS {
        if is_dry || cards::are_apart() {
            watch(address, bytes);
        } else {
            watch_real(address, bytes);
        }
        memory().map(address, bytes, handle);
    }
    if let Some(physical) = physical(handle).filter(|physical| physical.is_dry) {
        behind::put(address, bytes, physical.device);
    }
    result
}

/// # Safety
/// `words` must be the arguments of `cuMemSetAccess`.
#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
pub(super) unsafe fn set_access(words: &[u64], real: Real<'_>) -> u32 {
    let mapped = memory().mapped_in(words[0], words[1]);
    if mapped.iter().all(|(_, mapping)| mapping.backing != Backing::Dry) {
        return real();
    }
    // SAFETY: the program passes this number of descriptors.
    let places = match unsafe { cards::descriptors_on_driver(words[2], words[3]) } {
        Ok(places) => places,
        Err(code) => return code,
    };
    for (address, mapping) in mapped.iter().filter(|(_, mapping)| mapping.backing != Backing::Dry) {
        // SAFETY: the program requested this access for the whole range, and this is a part of it.
        let code = inside(|| unsafe {
            sys::cuMemSetAccess(*address, mapping.bytes as usize, places.as_ptr().cast(), places.len())
        }) as u32;
        if code != SUCCESS {
            return code;
        }
    }
    SUCCESS
}

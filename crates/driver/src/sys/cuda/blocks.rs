//! The driver's data about the block at an address.

use std::ffi::c_int;

use cudarc::driver::sys;

use super::{capture::relaxed, card::own, context::current_device};
use crate::sys::calls::as_library;

/// One allocation, as the driver describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddressRange {
    pub(crate) bytes: u64,
    pub(crate) ordinal: u32,
    pub(crate) managed: bool,
    pub(crate) on_host: bool,
}

/// Returns the device of an allocation.
#[doc(alias = "cuPointerGetAttribute")]
pub(crate) fn device_at(address: u64) -> Option<u32> {
    let device = attribute_at(address, sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)?;
    u32::try_from(device).ok()
}

/// Returns an attribute of a block, or `None` if there is no block at this address.
fn attribute_at(address: u64, attribute: sys::CUpointer_attribute) -> Option<u64> {
    let mut value = 0_u64;
    // SAFETY: the driver accepts any address. The attributes that this file reads are at most 64 bits wide; a narrower one is written to
    // the first bytes of a zeroed word.
    own(|| unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, address) }).result().ok()?;
    Some(value)
}

/// Returns the id of a live block. The driver numbers all blocks in the order of their allocation, on all devices and on the host.
#[doc(alias = "CU_POINTER_ATTRIBUTE_BUFFER_ID")]
pub(crate) fn block_number(address: u64) -> Option<u64> {
    attribute_at(address, sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID)
}

/// Returns an id that is lower than the ids of all blocks that are allocated later, or `None` if the calling thread has no context. The
/// driver only returns the id of an existing block, so this function allocates one page of physical memory and releases it. Other kinds of
/// memory are unsuitable, because freeing them waits for the device, and the device may wait for something that this thread is about to
/// launch.
#[doc(alias("cuMemCreate", "cuMemMap", "cuMemUnmap"))]
pub(crate) fn next_block_number() -> Option<u64> {
    let device = current_device().ok()??;
    as_library(|| relaxed(|| number_of_a_page(device)))
}

fn number_of_a_page(device: sys::CUdevice) -> Option<u64> {
    const PAGE: usize = 2 << 20;
    // `CUmemAllocationProp`, whose type in cudarc depends on the CUDA version: pinned, not shareable, on a device.
    let properties: [c_int; 8] = [1, 0, 1, device, 0, 0, 0, 0];
    let (mut page, mut at) = (0, 0);
    // SAFETY: the out-parameters are live, and the properties are as long as the struct that the driver reads. The page, the address range
    // and the mapping belong to this function, which releases them in the order that the driver requires.
    unsafe {
        sys::cuMemCreate(&raw mut page, PAGE, properties.as_ptr().cast(), 0).result().ok()?;
        let number = if sys::cuMemAddressReserve(&raw mut at, PAGE, 0, 0, 0).result().is_ok() {
            let mapped = sys::cuMemMap(at, PAGE, 0, page, 0).result().is_ok();
            let number = mapped.then(|| block_number(at)).flatten();
            if mapped {
                let _ = sys::cuMemUnmap(at, PAGE).result();
            }
            let _ = sys::cuMemAddressFree(at, PAGE).result();
            number
        } else {
            None
        };
        let _ = sys::cuMemRelease(page).result();
        number
    }
}

/// Returns whether a live block of device memory belongs to a graph. Such a block is in no pool, and was allocated in no context. Returns
/// `None` if there is no block at this address.
#[doc(alias("CU_POINTER_ATTRIBUTE_CONTEXT", "CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE"))]
pub(crate) fn belongs_to_graph(address: u64) -> Option<bool> {
    use sys::CUpointer_attribute as Attribute;

    const CU_MEMORYTYPE_DEVICE: u64 = 2;
    let is_nowhere = |attribute| attribute_at(address, attribute) == Some(0);
    let kind = attribute_at(address, Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)?;
    let nowhere = [Attribute::CU_POINTER_ATTRIBUTE_CONTEXT, Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE];
    Some(kind == CU_MEMORYTYPE_DEVICE && nowhere.into_iter().all(is_nowhere))
}

/// Returns the allocation that starts at an address, if there is one.
#[doc(alias("cuMemGetAddressRange", "cuPointerGetAttribute"))]
pub(crate) fn range_at(address: u64) -> Option<AddressRange> {
    use sys::CUpointer_attribute as Attribute;

    const CU_MEMORYTYPE_HOST: u64 = 1;
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: the driver accepts any address, and both out-parameters are live.
    unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, address) }.result().ok()?;
    let attribute = |attribute| attribute_at(address, attribute);
    Some(AddressRange {
        bytes: (base == address).then_some(bytes as u64)?,
        ordinal: device_at(address)?,
        managed: attribute(Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED)? != 0,
        on_host: attribute(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)? == CU_MEMORYTYPE_HOST,
    })
}

//! `libcuda`: physical memory behind handles, and the addresses at which it is mapped.

use std::ffi::{c_int, c_void};

use crate::cuda::{Address, ErrorCode, Handle, INVALID_VALUE, device, ready};
use crate::driver::{Call, lock};
use crate::ffi::Out;
use crate::objects::{Objects, Physical};

/// The start of addresses that belong to no GPU.
const RANGES: Address = 0x5000_0000_0000;
/// The unit of physical memory, and of reserved addresses.
pub(crate) const GRANULARITY: u64 = 2 << 20;

/// A `CUmemLocation`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Location {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

pub(crate) const ON_DEVICE: c_int = 1;

/// A `CUmemAllocationProp`.
#[derive(Clone, Copy)]
#[repr(C)]
struct AllocationProperties {
    kind: c_int,
    handle_kinds: c_int,
    location: Location,
    metadata: Out<c_void>,
    flags: u64,
}

// The layouts in cuda.h, whatever version of it cudarc was built for.
const _: () = {
    use cudarc::driver::sys;

    assert!(size_of::<Location>() == size_of::<sys::CUmemLocation>());
    assert!(size_of::<AllocationProperties>() == 32 && size_of::<sys::CUmemAllocationProp>() == 32);
    assert!(std::mem::offset_of!(sys::CUmemAllocationProp, location) == 8);
};

/// Frees physical memory that is neither referenced nor mapped.
fn settle(call: &Call, handle: Handle) -> Result<(), ErrorCode> {
    let mut objects = lock(&call.driver.objects);
    let over = |physical: &&Physical| physical.references == 0 && physical.mappings == 0;
    let Some((card, bytes)) = objects.physical.get(&handle).filter(over).map(|gone| (gone.card, gone.bytes)) else {
        return Ok(());
    };
    objects.physical.remove(&handle);
    drop(objects);
    if let Some(card) = card {
        call.on(card)?.memory().cuda().release(bytes);
    }
    Ok(())
}

fn physical(objects: &mut Objects, handle: u64) -> Result<(Handle, &mut Physical), ErrorCode> {
    let handle = usize::try_from(handle).map_err(|_| INVALID_VALUE)?;
    let physical = objects.physical.get_mut(&handle).filter(|physical| physical.references > 0).ok_or(INVALID_VALUE)?;
    Ok((handle, physical))
}

fn whole_pages(bytes: usize) -> Result<u64, ErrorCode> {
    let bytes = bytes as u64;
    if bytes > 0 && bytes.is_multiple_of(GRANULARITY) { Ok(bytes) } else { Err(INVALID_VALUE) }
}

dispatched! { jumps;
    fn cuMemGetAllocationGranularity(bytes: Out<usize>, _properties: Out<AllocationProperties>, _option: c_int) |call| {
        ready(call)?;
        Ok(bytes.put(usize::try_from(GRANULARITY).unwrap_or(usize::MAX))?)
    }

    fn cuMemCreate(created: Out<u64>, bytes: usize, properties: Out<AllocationProperties>, flags: u64) |call| {
        ready(call)?;
        let AllocationProperties { location, .. } = properties.get()?;
        let bytes = whole_pages(bytes)?;
        if flags != 0 || created.is_null() {
            return Err(INVALID_VALUE);
        }
        let card = if location.kind == ON_DEVICE {
            let (card, gpu) = device(call, location.id)?;
            gpu.memory().cuda().hold(bytes)?;
            Some(card)
        } else {
            None
        };
        Ok(created.put(lock(&call.driver.objects).add_physical(card, bytes))?)
    }

    fn cuMemRetainAllocationHandle(found: Out<u64>, address: Address) |call| {
        ready(call)?;
        let mut objects = lock(&call.driver.objects);
        let (start, (bytes, handle)) = objects.mapped.range(..=address).next_back().ok_or(INVALID_VALUE)?;
        if address - start >= *bytes || found.is_null() {
            return Err(INVALID_VALUE);
        }
        let handle = *handle;
        objects.physical.get_mut(&handle).ok_or(INVALID_VALUE)?.references += 1;
        Ok(found.put(handle as u64)?)
    }

    fn cuMemRelease(handle: u64) |call| {
        ready(call)?;
        let handle = {
            let mut objects = lock(&call.driver.objects);
            let (handle, physical) = physical(&mut objects, handle)?;
            physical.references -= 1;
            handle
        };
        settle(call, handle)
    }

    fn cuMemAddressReserve(start: Out<Address>, bytes: usize, _alignment: usize, requested: Address, flags: u64) |call| {
        ready(call)?;
        let bytes = whole_pages(bytes)?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let mut objects = lock(&call.driver.objects);
        let behind = objects.ranges.last_key_value().map_or(RANGES, |(start, bytes)| start + bytes);
        let before = objects.ranges.range(..requested.saturating_add(bytes)).next_back();
        let is_free = before.is_none_or(|(start, bytes)| start + bytes <= requested);
        let address = if requested != 0 && is_free { requested } else { behind };
        start.put(address)?;
        objects.ranges.insert(address, bytes);
        Ok(())
    }

    fn cuMemAddressFree(start: Address, bytes: usize) |call| {
        ready(call)?;
        let bytes = bytes as u64;
        let mut objects = lock(&call.driver.objects);
        let is_mapped = objects.mapped.range(start..start.saturating_add(bytes)).next().is_some();
        if is_mapped || objects.ranges.get(&start) != Some(&bytes) {
            return Err(INVALID_VALUE);
        }
        objects.ranges.remove(&start);
        Ok(())
    }

    fn cuMemMap(start: Address, bytes: usize, offset: usize, handle: u64, flags: u64) |call| {
        ready(call)?;
        let bytes = whole_pages(bytes)?;
        let mut objects = lock(&call.driver.objects);
        let reserved = objects.ranges.range(..=start).next_back();
        let fits = reserved.is_some_and(|(first, length)| start + bytes <= first + length);
        let mapped = objects.mapped.range(..start.saturating_add(bytes)).next_back();
        let taken = mapped.is_some_and(|(first, (length, _))| first + length > start);
        let (handle, physical) = physical(&mut objects, handle)?;
        if !fits || taken || offset != 0 || flags != 0 || bytes != physical.bytes {
            return Err(INVALID_VALUE);
        }
        physical.mappings += 1;
        objects.mapped.insert(start, (bytes, handle));
        objects.number(start);
        Ok(())
    }

    fn cuMemUnmap(start: Address, bytes: usize) |call| {
        ready(call)?;
        let handle = {
            let mut objects = lock(&call.driver.objects);
            let (_, handle) =
                *objects.mapped.get(&start).filter(|(length, _)| *length == bytes as u64).ok_or(INVALID_VALUE)?;
            objects.mapped.remove(&start);
            objects.physical.get_mut(&handle).ok_or(INVALID_VALUE)?.mappings -= 1;
            handle
        };
        settle(call, handle)
    }

    fn cuMemSetAccess(start: Address, _bytes: usize, _access: Out<c_void>, _count: usize) |call| {
        ready(call)?;
        if lock(&call.driver.objects).mapped.contains_key(&start) { Ok(()) } else { Err(INVALID_VALUE) }
    }
}

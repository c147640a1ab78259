//! `libcuda`: every way to allocate and to free, except the ways in `physical.rs`.

use std::ffi::{c_int, c_uint, c_void};

use crate::card::{Gpu, Memory};
use crate::cuda::{
    Address, CONTEXTS, Device, ErrorCode, Handle, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, POOLS,
    address_in, address_out, context, current, current_pool, device, pool, ready, stream_card,
};
use crate::driver::{Call, lock};
use crate::ffi::Out;
use crate::graphs::{self, not_capturing};
use crate::imports;
use crate::objects::{Array, Imported, Objects, free_handle};
use crate::physical::{GRANULARITY, Location, ON_DEVICE};
use crate::taken::{self, Purpose};

fn already_registered() -> ErrorCode {
    712.into()
}

fn not_registered() -> ErrorCode {
    713.into()
}

const CREATED_POOLS: Handle = 0x2100_0000;
const ARRAYS: Handle = 0x4100_0000;
/// The start of addresses that belong to no GPU.
const MANAGED: Address = 0x6000_0000_0000;
/// The rows of a pitched block start at multiples of this.
const PITCH: usize = 512;
/// `CU_DEVICE_CPU`
const ON_HOST: Device = -1;

/// A `CUmemPoolProps`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct PoolProperties {
    kind: c_int,
    handle_kinds: c_int,
    pub(crate) location: Location,
    security: Out<c_void>,
    most: usize,
    rest: [u8; 56],
}

/// A `CUDA_ARRAY_DESCRIPTOR`.
#[derive(Clone, Copy)]
#[repr(C)]
struct ArrayShape {
    width: usize,
    height: usize,
    format: c_uint,
    channels: c_uint,
}

/// A `CUDA_ARRAY3D_DESCRIPTOR`.
#[derive(Clone, Copy)]
#[repr(C)]
struct SolidShape {
    width: usize,
    height: usize,
    depth: usize,
    format: c_uint,
    channels: c_uint,
    flags: c_uint,
}

// The layouts in cuda.h, whatever version of it cudarc was built for.
const _: () = {
    use cudarc::driver::sys;

    assert!(size_of::<PoolProperties>() == 88 && size_of::<sys::CUmemPoolProps>() == 88);
    assert!(std::mem::offset_of!(sys::CUmemPoolProps, location) == 8);
    assert!(size_of::<ArrayShape>() == 24 && size_of::<sys::CUDA_ARRAY_DESCRIPTOR>() == 24);
    assert!(size_of::<SolidShape>() == 40 && size_of::<sys::CUDA_ARRAY3D_DESCRIPTOR>() == 40);
};

/// Returns the bytes of one element of a `CUarray_format`.
fn format_bytes(format: c_uint) -> Result<u64, ErrorCode> {
    match format {
        0x01 | 0x08 => Ok(1),
        0x02 | 0x09 | 0x10 => Ok(2),
        0x03 | 0x0a | 0x20 => Ok(4),
        _ => Err(INVALID_VALUE),
    }
}

impl SolidShape {
    /// Returns the bytes of this level of a mipmapped array. Level 0 is the array itself.
    fn bytes(&self, level: u32) -> Result<u64, ErrorCode> {
        if self.width == 0 || !matches!(self.channels, 1 | 2 | 4) {
            return Err(INVALID_VALUE);
        }
        [self.width, self.height, self.depth]
            .iter()
            .try_fold(format_bytes(self.format)? * u64::from(self.channels), |bytes, side| {
                bytes.checked_mul(((*side >> level) as u64).max(1)).ok_or(OUT_OF_MEMORY)
            })
    }
}

/// Takes the memory of the managed blocks that are on GPUs, and gives back the memory of blocks that are not.
pub(crate) fn settle_managed(call: &Call, objects: &mut Objects) -> Result<(), ErrorCode> {
    let Objects { managed, resident, .. } = objects;
    resident.retain(|address, _| managed.contains_key(address));
    for (card, gpu) in call.driver.gpus.iter().enumerate() {
        let on_card = managed.iter().filter(|(address, _)| resident.get(address) == Some(&card));
        let bytes = on_card.map(|(_, (bytes, _))| bytes.next_multiple_of(GRANULARITY)).sum();
        taken::take(call, gpu, Purpose::Managed, bytes)?;
    }
    Ok(())
}

/// Converts the code of another driver function that was called here.
fn succeeded(code: c_int) -> Result<(), ErrorCode> {
    if code == 0 { Ok(()) } else { Err(code.into()) }
}

fn alloc(call: &Call, address: Out<Address>, bytes: u64) -> Result<(), ErrorCode> {
    let (context, card, gpu) = context(call)?;
    not_capturing(call, card)?;
    if address.is_null() {
        return Err(INVALID_VALUE);
    }
    let block = gpu.memory().alloc(bytes, context)?;
    lock(&call.driver.objects).number(address_out(card, block));
    Ok(address.put(address_out(card, block))?)
}

/// Allocates in a pool of a GPU, which may differ from the stream's GPU.
fn alloc_in_pool(
    call: &Call,
    address: Out<Address>,
    bytes: usize,
    (card, number, gpu): (usize, u64, &Gpu),
) -> Result<(), ErrorCode> {
    if !call.driver.config.pools {
        return Err(NOT_SUPPORTED);
    }
    if address.is_null() {
        return Err(INVALID_VALUE);
    }
    // Pools belong to the device, and end with its primary context at the latest.
    let block = gpu.memory().alloc_in_pool(number, bytes as u64, CONTEXTS + card)?;
    lock(&call.driver.objects).number(address_out(card, block));
    Ok(address.put(address_out(card, block))?)
}

fn new_array(call: &Call, created: Out<Handle>, bytes: u64, mipmapped: bool) -> Result<(), ErrorCode> {
    let (context, card, gpu) = context(call)?;
    not_capturing(call, card)?;
    if created.is_null() {
        return Err(INVALID_VALUE);
    }
    let block = gpu.memory().alloc(bytes, context)?;
    let mut objects = lock(&call.driver.objects);
    let handle = free_handle(ARRAYS, |taken| objects.arrays.contains_key(taken));
    objects.arrays.insert(handle, Array { card, context, block, mipmapped });
    Ok(created.put(handle)?)
}

fn destroy_array(call: &Call, destroyed: Handle, mipmapped: bool) -> Result<(), ErrorCode> {
    ready(call)?;
    let array = {
        let mut objects = lock(&call.driver.objects);
        if objects.arrays.get(&destroyed).is_none_or(|array| array.mipmapped != mipmapped) {
            return Err(INVALID_HANDLE);
        }
        objects.arrays.remove(&destroyed).ok_or(INVALID_HANDLE)?
    };
    Ok(call.on(array.card)?.memory().free(array.block)?)
}

fn pin(call: &Call, address: Out<usize>, bytes: usize) -> Result<(), ErrorCode> {
    let (card, _) = current(call)?;
    not_capturing(call, card)?;
    if bytes == 0 || address.is_null() {
        return Err(INVALID_VALUE);
    }
    let mut memory = Vec::new();
    memory.try_reserve_exact(bytes).map_err(|_| OUT_OF_MEMORY)?;
    let start = memory.as_ptr() as usize;
    let mut objects = lock(&call.driver.objects);
    objects.pinned.insert(start, memory);
    objects.number(start as u64);
    Ok(address.put(start)?)
}

/// The facts about an address in live memory.
struct About {
    card: usize,
    /// A `CUmemorytype`.
    kind: c_uint,
    managed: bool,
    /// The context in which it was allocated, and the pool that contains it; 0 for none.
    context: Handle,
    pool: Handle,
}

fn about(call: &Call, address: Address) -> Result<About, ErrorCode> {
    const HOST: c_uint = 1;
    const DEVICE: c_uint = 2;
    let nothing = About { card: 0, kind: DEVICE, managed: false, context: 0, pool: 0 };
    let objects = lock(&call.driver.objects);
    let managed = objects.managed.range(..=address).next_back();
    let managed = managed.filter(|(start, (bytes, _))| address - **start < *bytes).map(|(_, (_, of))| *of);
    let pinned = usize::try_from(address).is_ok_and(|address| objects.pinned.contains_key(&address));
    let of_a_graph = objects.graph_blocks.get(&address).copied();
    let imported = objects.imported.get(&address).copied();
    let mapped = objects.mapped.get(&address).and_then(|(_, handle)| objects.physical.get(handle)?.card);
    drop(objects);
    if let Some(context) = managed {
        let card = call.driver.context_card(context).ok_or(INVALID_VALUE)?;
        return Ok(About { card, managed: true, context, ..nothing });
    }
    if pinned {
        let (context, card, _) = context(call)?;
        return Ok(About { card, kind: HOST, context, ..nothing });
    }
    if let Some(card) = of_a_graph.map(|(card, _)| card).or(mapped) {
        return Ok(About { card, ..nothing });
    }
    if let Some(Imported { pool, context, .. }) = imported {
        return Ok(About { context, pool, ..nothing });
    }
    let (gpu, inside) = address_in(call, address)?;
    let mut memory = gpu.memory();
    memory.block_at(inside).ok_or(INVALID_VALUE)?;
    let card = call.driver.gpus.iter().position(|other| std::ptr::eq(other, gpu)).ok_or(INVALID_VALUE)?;
    Ok(match Memory::pool_at(inside) {
        Some(0) => About { card, pool: POOLS + card, ..nothing },
        // The number is enough, because no caller asks which pool it is.
        Some(number) => About { card, pool: CREATED_POOLS + usize::try_from(number).unwrap_or(0), ..nothing },
        None => About { card, context: memory.owner_of(inside), ..nothing },
    })
}

/// Allocates by a function that is not intercepted.
#[unsafe(no_mangle)]
extern "C" fn standin_alloc(address: Out<Address>, bytes: usize) -> c_int {
    Call::run("standin_alloc", |call| alloc(call, address, bytes as u64))
}

dispatched! { calls;
    fn cuMemAlloc_v2(address: Out<Address>, bytes: usize) |call| {
        alloc(call, address, bytes as u64)
    }

    fn cuMemAllocPitch_v2(address: Out<Address>, pitch: Out<usize>, width: usize, height: usize, element: c_uint) |call| {
        if !matches!(element, 4 | 8 | 16) || pitch.is_null() {
            return Err(INVALID_VALUE);
        }
        let row = width.checked_next_multiple_of(PITCH).ok_or(OUT_OF_MEMORY)?;
        let bytes = row.checked_mul(height).ok_or(OUT_OF_MEMORY)?;
        if call.driver.config.nested {
            succeeded(crate::memory::cuMemAlloc_v2(address, bytes))?;
        } else {
            alloc(call, address, bytes as u64)?;
        }
        Ok(pitch.put(row)?)
    }

    fn cuMemAllocManaged(address: Out<Address>, bytes: usize, flags: c_uint) |call| {
        // Managed memory is on no GPU before a GPU uses it, which none does here.
        let (context, _, _) = context(call)?;
        if bytes == 0 || !matches!(flags, 1 | 2) || address.is_null() {
            return Err(INVALID_VALUE);
        }
        if call.driver.config.nested {
            succeeded(crate::memory::cuMemAlloc_v2(address, bytes))?;
            lock(&call.driver.objects).managed.insert(address.get()?, (bytes as u64, context));
            return Ok(());
        }
        let mut objects = lock(&call.driver.objects);
        let end = objects.managed.last_key_value().map_or(MANAGED, |(start, (bytes, _))| start + bytes);
        let start = end.checked_next_multiple_of(GRANULARITY).ok_or(OUT_OF_MEMORY)?;
        objects.managed.insert(start, (bytes as u64, context));
        objects.number(start);
        Ok(address.put(start)?)
    }

    fn cuMemPrefetchAsync | cuMemPrefetchAsync_ptsz(address: Address, _bytes: usize, to: Device, stream: Handle) |call| {
        stream_card(call, stream)?;
        let card = if to == ON_HOST { None } else { Some(device(call, to)?.0) };
        let mut objects = lock(&call.driver.objects);
        let (start, (bytes, _)) = objects.managed.range(..=address).next_back().ok_or(INVALID_VALUE)?;
        let start = *start;
        if address - start >= *bytes {
            return Err(INVALID_VALUE);
        }
        match card {
            Some(card) => objects.resident.insert(start, card),
            None => objects.resident.remove(&start),
        };
        settle_managed(call, &mut objects)
    }

    fn cuMemFree_v2(address: Address) |call| {
        current(call)?;
        let managed = {
            let mut objects = lock(&call.driver.objects);
            let managed = objects.managed.remove(&address).is_some();
            if managed {
                settle_managed(call, &mut objects)?;
            }
            managed
        };
        if address == 0 || managed && !call.driver.config.nested {
            return Ok(());
        }
        if imports::free(call, address) || graphs::free_block(call, address).is_some() {
            return Ok(());
        }
        let (gpu, block) = address_in(call, address)?;
        // A block of a pool may be freed like any other, and is then freed immediately.
        Ok(gpu.memory().free(block)?)
    }

    fn cuMemAllocAsync | cuMemAllocAsync_ptsz(address: Out<Address>, bytes: usize, stream: Handle) |call| {
        let (card, _) = stream_card(call, stream)?;
        if let Some(graph) = graphs::captured(call, stream)? {
            return Ok(address.put(graphs::add_alloc(call, graph, card, bytes as u64)?.1)?);
        }
        not_capturing(call, card)?;
        alloc_in_pool(call, address, bytes, pool(call, current_pool(call, card))?)
    }

    fn cuMemAllocFromPoolAsync | cuMemAllocFromPoolAsync_ptsz(address: Out<Address>, bytes: usize, of: Handle, stream: Handle) |call| {
        let (card, _) = stream_card(call, stream)?;
        let pool = pool(call, of)?;
        if let Some(graph) = graphs::captured(call, stream)? {
            return Ok(address.put(graphs::add_alloc(call, graph, pool.0, bytes as u64)?.1)?);
        }
        not_capturing(call, card)?;
        alloc_in_pool(call, address, bytes, pool)
    }

    fn cuMemFreeAsync | cuMemFreeAsync_ptsz(address: Address, stream: Handle) |call| {
        let (card, _) = stream_card(call, stream)?;
        if let Some(graph) = graphs::captured(call, stream)? {
            return graphs::add_free(call, graph, address).map(drop);
        }
        not_capturing(call, card)?;
        if imports::free(call, address) || graphs::free_block(call, address).is_some() {
            return Ok(());
        }
        let (gpu, block) = address_in(call, address)?;
        Ok(gpu.memory().free_async(block)?)
    }

    fn cuMemGetAddressRange_v2(start: Out<Address>, bytes: Out<usize>, address: Address) |call| {
        current(call)?;
        let managed = lock(&call.driver.objects).managed.range(..=address).next_back().map(|(start, (bytes, _))| (*start, *bytes));
        let managed = managed.filter(|(start, bytes)| address - start < *bytes);
        let other = {
            let objects = lock(&call.driver.objects);
            let of_a_graph = objects.graph_blocks.get(&address).map(|(_, bytes)| (address, *bytes));
            of_a_graph.or_else(|| objects.imported.get(&address).map(|imported| (address, imported.bytes)))
        };
        let (first, length) = if let Some(found) = managed.or(other) {
            found
        } else {
            let (gpu, inside) = address_in(call, address)?;
            let (block, length) = gpu.memory().block_at(inside).ok_or(INVALID_VALUE)?;
            (address - (inside - block), length)
        };
        if !start.is_null() {
            start.put(first)?;
        }
        if !bytes.is_null() {
            bytes.put(usize::try_from(length).unwrap_or(usize::MAX))?;
        }
        Ok(())
    }

    fn cuPointerGetAttribute(value: Out<c_void>, attribute: c_int, address: Address) |call| {
        ready(call)?;
        let About { card, kind, managed, context, pool } = about(call, address)?;
        let ordinal = call.driver.visible.iter().position(|visible| *visible == card).ok_or(INVALID_VALUE)?;
        let number = lock(&call.driver.objects).numbers.get(&address).copied();
        match attribute {
            1 => value.cast().put(context)?,
            2 => value.cast().put(kind)?,
            7 => value.cast().put(number.ok_or(INVALID_VALUE)?)?,
            8 => value.cast().put(c_uint::from(managed))?,
            9 => value.cast().put(c_uint::try_from(ordinal).unwrap_or(c_uint::MAX))?,
            17 => value.cast().put(pool)?,
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    }

    fn cuMemPoolCreate(created: Out<Handle>, properties: Out<PoolProperties>) |call| {
        ready(call)?;
        let PoolProperties { location, .. } = properties.get()?;
        if !call.driver.config.pools {
            return Err(NOT_SUPPORTED);
        }
        if location.kind != ON_DEVICE || created.is_null() {
            return Err(INVALID_VALUE);
        }
        let (card, gpu) = device(call, location.id)?;
        let number = gpu.memory().create_pool()?;
        let mut objects = lock(&call.driver.objects);
        let handle = free_handle(CREATED_POOLS, |taken| objects.pools.contains_key(taken));
        objects.pools.insert(handle, (card, number));
        Ok(created.put(handle)?)
    }

    fn cuMemPoolDestroy(destroyed: Handle) |call| {
        // The blocks in the pool stay live until each is freed.
        let (card, number, gpu) = pool(call, destroyed)?;
        if destroyed == POOLS + card {
            return Err(INVALID_VALUE);
        }
        gpu.memory().destroy_pool(number);
        let mut objects = lock(&call.driver.objects);
        objects.pools.remove(&destroyed);
        objects.current_pools.retain(|_, current| *current != destroyed);
        Ok(())
    }

    fn cuDeviceSetMemPool(of: Device, requested: Handle) |call| {
        let (card, _) = device(call, of)?;
        let (home, _, _) = pool(call, requested)?;
        if home != card {
            return Err(INVALID_VALUE);
        }
        lock(&call.driver.objects).current_pools.insert(card, requested);
        Ok(())
    }

    fn cuMemAllocHost_v2(address: Out<usize>, bytes: usize) |call| {
        pin(call, address, bytes)
    }

    fn cuMemHostAlloc(address: Out<usize>, bytes: usize, _flags: c_uint) |call| {
        pin(call, address, bytes)
    }

    fn cuMemFreeHost(address: usize) |call| {
        ready(call)?;
        lock(&call.driver.objects).pinned.remove(&address).map(drop).ok_or(INVALID_VALUE)
    }

    fn cuMemHostRegister | cuMemHostRegister_v2(address: usize, bytes: usize, _flags: c_uint) |call| {
        current(call)?;
        if address == 0 || bytes == 0 {
            return Err(INVALID_VALUE);
        }
        if lock(&call.driver.objects).registered.insert(address) { Ok(()) } else { Err(already_registered()) }
    }

    fn cuMemHostUnregister(address: usize) |call| {
        current(call)?;
        if lock(&call.driver.objects).registered.remove(&address) { Ok(()) } else { Err(not_registered()) }
    }

    fn cuArrayCreate_v2(created: Out<Handle>, shape: Out<ArrayShape>) |call| {
        let ArrayShape { width, height, format, channels } = shape.get()?;
        let bytes = SolidShape { width, height, depth: 0, format, channels, flags: 0 }.bytes(0)?;
        new_array(call, created, bytes, false)
    }

    fn cuArray3DCreate_v2(created: Out<Handle>, shape: Out<SolidShape>) |call| {
        new_array(call, created, shape.get()?.bytes(0)?, false)
    }

    fn cuArrayDestroy(destroyed: Handle) |call| {
        destroy_array(call, destroyed, false)
    }

    fn cuMipmappedArrayCreate(created: Out<Handle>, shape: Out<SolidShape>, levels: c_uint) |call| {
        let shape = shape.get()?;
        let bytes = (0..levels.clamp(1, 32)).try_fold(0, |sum, level| Ok::<u64, ErrorCode>(sum + shape.bytes(level)?))?;
        new_array(call, created, bytes, true)
    }

    fn cuMipmappedArrayDestroy(destroyed: Handle) |call| {
        destroy_array(call, destroyed, true)
    }
}

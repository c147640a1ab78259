//! The functions that are in the place of the driver's.

use std::{
    cell::Cell,
    ffi::{c_int, c_void},
    mem, ptr, slice,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Instant,
};

use cudarc::driver::sys;
use once_cell::sync::{Lazy, OnceCell};

use super::{
    LARGEST_REAL, MODE, Mode,
    memory::{Backing, Block, Memory, PAGE, Physical},
    table::{FUNCTIONS, Shape, with_functions},
};
use crate::{
    device_model::ModelError,
    sys::{
        calls::{STATE, ThreadState},
        cuda, dl,
    },
};

const SUCCESS: u32 = 0;
const CUDA_ERROR_INVALID_VALUE: u32 = 1;
const CUDA_ERROR_OUT_OF_MEMORY: u32 = 2;
const CUDA_ERROR_NOT_SUPPORTED: u32 = 801;

/// The driver's own implementations, by row of [`FUNCTIONS`]. Each is set before its slot is replaced.
pub(super) static DRIVERS: [AtomicUsize; FUNCTIONS.len()] = [const { AtomicUsize::new(0) }; FUNCTIONS.len()];

static MEMORY: Lazy<Mutex<Memory>> = Lazy::new(|| Mutex::new(Memory::new(card())));

/// All dry addresses of the process's life lie between these two, so most words need no lock.
static LOWEST: AtomicU64 = AtomicU64::new(u64::MAX);
static HIGHEST: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The thread is in a driver's function that one of ours has called. Calls that it makes are its own.
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

type GetParamInfo = unsafe extern "C" fn(u64, usize, *mut usize, *mut usize) -> u32;
static PARAM_INFO: OnceCell<[Option<GetParamInfo>; 2]> = OnceCell::new();

/// Looks up what older drivers lack.
pub(super) fn load() {
    const NAMES: &[&str] = &["libcuda.so.1", "libcuda.so"];
    PARAM_INFO.get_or_init(|| {
        // SAFETY: both functions (12.4 and later) have this signature.
        [c"cuFuncGetParamInfo", c"cuKernelGetParamInfo"].map(|name| unsafe { dl::symbol(NAMES, name) })
    });
}

macro_rules! functions {
    ($($name:ident($($argument:ident),*): $shape:expr;)*) => {
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy)]
        enum Row { $($name),* }

        /// Each integer and each pointer is a whole word, as in the hooks.
        #[allow(non_snake_case)]
        mod replacement {
            use super::*;

            $(
                pub(super) unsafe extern "C-unwind" fn $name($($argument: u64),*) -> u32 {
                    type Implementation = unsafe extern "C-unwind" fn($(functions!(@word $argument)),*) -> u32;
                    let driver = || {
                        let driver = DRIVERS[Row::$name as usize].load(Relaxed);
                        // SAFETY: it is the address of the driver's implementation, which has these arguments and returns a
                        // `CUresult`. It was stored before this function was put into the slot.
                        unsafe { mem::transmute::<usize, Implementation>(driver)($($argument),*) }
                    };
                    // SAFETY: the words are the arguments of this call, which has this shape.
                    unsafe { run($shape, &[$($argument),*], &driver) }
                }
            )*
        }

        /// The functions, by row.
        pub(super) fn replacements() -> [usize; FUNCTIONS.len()] {
            [$(replacement::$name as *const () as usize),*]
        }
    };
    (@word $argument:ident) => { u64 };
}
with_functions!(functions);

/// Makes a call of the driver, within which calls through other slots are the driver's own.
fn inside<T>(call: impl FnOnce() -> T) -> T {
    struct Restore(bool);

    impl Drop for Restore {
        fn drop(&mut self) {
            IS_INSIDE.set(self.0);
        }
    }

    let _restore = Restore(IS_INSIDE.replace(true));
    call()
}

/// Held for a few steps of the account, and never during a call of the driver.
fn memory() -> MutexGuard<'static, Memory> {
    MEMORY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All bytes of each card.
fn card() -> u64 {
    match MODE.get() {
        Some(Mode::Dry { card: Some(card), .. } | Mode::Limit { card }) => card.get(),
        _ => inside(|| {
            let mut bytes = 0;
            // SAFETY: the out-parameter is live. Without a device, the call fails.
            unsafe { sys::cuDeviceTotalMem_v2(&raw mut bytes, 0) }.result().map_or(0, |()| bytes as u64)
        }),
    }
}

fn is_real(bytes: u64) -> bool {
    matches!(MODE.get(), Some(Mode::Limit { .. })) || bytes <= LARGEST_REAL
}

/// Whether nothing may be done with this address: it has no memory, or holds addresses that have none, or would get memory if it were touched.
fn is_dry(address: u64) -> bool {
    (LOWEST.load(Relaxed)..HIGHEST.load(Relaxed)).contains(&address)
        && !matches!(memory().backing(address), None | Some(Backing::Real))
}

/// From now on [`is_dry`] looks at these addresses.
fn watch(address: u64, bytes: u64) {
    LOWEST.fetch_min(address, Relaxed);
    HIGHEST.fetch_max(address.saturating_add(bytes.next_multiple_of(PAGE)), Relaxed);
}

fn physical(handle: u64) -> Option<Physical> {
    memory().physical.get(&handle).copied()
}

fn is_dry_handle(handle: u64) -> bool {
    physical(handle).is_some_and(|physical| physical.is_dry)
}

fn code_of(error: ModelError) -> u32 {
    match error {
        ModelError::OutOfMemory => CUDA_ERROR_OUT_OF_MEMORY,
        ModelError::ZeroBytes | ModelError::UnknownAddress => CUDA_ERROR_INVALID_VALUE,
    }
}

/// Makes a call as it is on the program's cards. `driver` makes it on the real one.
///
/// # Safety
/// `words` are the arguments of a call of this shape, and those that are pointers are as the driver demands.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
unsafe fn run(shape: Shape, words: &[u64], driver: &dyn Fn() -> u32) -> u32 {
    let real = || inside(driver);
    // A page that gpumem allocates for itself is on no card.
    if IS_INSIDE.get() || STATE.get() == ThreadState::Library && matches!(shape, Shape::Create) {
        return driver();
    }
    // SAFETY: the caller passes pointers where the function has them.
    unsafe {
        match shape {
            Shape::Alloc => alloc(words[0], words[1], false, &real),
            Shape::AllocPooled => alloc(words[0], words[1], true, &real),
            Shape::AllocPitch => {
                // As the driver aligns rows (`CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT` is smaller).
                let pitch = words[2].checked_next_multiple_of(512);
                let Some((pitch, bytes)) = pitch.and_then(|pitch| Some((pitch, pitch.checked_mul(words[3])?))) else {
                    return CUDA_ERROR_OUT_OF_MEMORY;
                };
                let result = alloc(words[0], bytes, false, &real);
                if result == SUCCESS && !is_real(bytes) {
                    put(words[1], pitch);
                }
                result
            }
            Shape::AllocManaged => {
                let result = real();
                if result == SUCCESS && words[1] > LARGEST_REAL {
                    let address = get(words[0]);
                    watch(address, words[1]);
                    let (context, device) = here();
                    memory().insert(address, words[1], Backing::Managed, context, device, None);
                }
                result
            }
            Shape::Free => free(words[0], &real),
            Shape::Create => create(words, &real),
            Shape::Release => {
                let is_dry = is_dry_handle(words[0]);
                let result = if is_dry { SUCCESS } else { real() };
                if result == SUCCESS {
                    memory().release(words[0]);
                }
                result
            }
            Shape::Retain => {
                let mapping = memory().mapped_around(words[1]);
                let result = match mapping.filter(|mapping| mapping.backing == Backing::Dry) {
                    Some(mapping) => {
                        put(words[0], mapping.handle);
                        SUCCESS
                    }
                    None => real(),
                };
                if result == SUCCESS {
                    memory().retain(get(words[0]));
                }
                result
            }
            Shape::Map => {
                let is_dry = is_dry_handle(words[3]);
                let result = if is_dry { SUCCESS } else { real() };
                if result == SUCCESS {
                    if is_dry {
                        watch(words[0], words[1]);
                    }
                    memory().map(words[0], words[1], words[3]);
                }
                result
            }
            Shape::Unmap => unmap(words[0], words[1]),
            Shape::SetAccess => {
                let mapped = memory().mapped_in(words[0], words[1]);
                if mapped.iter().all(|(_, mapping)| mapping.backing != Backing::Dry) {
                    return real();
                }
                let real = mapped.iter().filter(|(_, mapping)| mapping.backing != Backing::Dry);
                let set = |(address, bytes): (u64, u64)| {
                    inside(|| sys::cuMemSetAccess(address, bytes as usize, words[2] as *const _, words[3] as usize))
                };
                real.map(|(address, mapping)| set((*address, mapping.bytes)) as u32)
                    .find(|code| *code != SUCCESS)
                    .unwrap_or(SUCCESS)
            }
            Shape::GetAccess if is_dry(words[2]) => {
                const CU_MEM_ACCESS_FLAGS_PROT_READWRITE: u64 = 3;
                put(words[0], CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
                SUCCESS
            }
            Shape::Properties => match physical(words[1]).filter(|physical| physical.is_dry) {
                Some(physical) => {
                    (words[0] as *mut [u64; 4]).write_unaligned(physical.properties);
                    SUCCESS
                }
                None => real(),
            },
            Shape::Info => {
                let (context, device) = here();
                if context == 0 {
                    return real();
                }
                let mut memory = memory();
                let card = memory.card(device);
                for (out, bytes) in [(words[0], card.free()), (words[1], card.total())] {
                    if out != 0 {
                        put(out, bytes);
                    }
                }
                SUCCESS
            }
            Shape::Total => {
                // The driver says whether this is a device.
                let result = real();
                if result == SUCCESS {
                    put(words[0], card());
                }
                result
            }
            Shape::Range => match dry_block(words[2]) {
                Some((start, block)) => {
                    for (out, value) in [(words[0], start), (words[1], block.bytes)] {
                        if out != 0 {
                            put(out, value);
                        }
                    }
                    SUCCESS
                }
                None => real(),
            },
            Shape::Attribute => match dry_block(words[2]) {
                Some(block) => attribute(words[0], words[1] as u32, words[2], block),
                None => real(),
            },
            Shape::Attributes => match dry_block(words[3]) {
                Some(block) => {
                    let attributes = slice::from_raw_parts(words[1] as *const u32, words[0] as u32 as usize);
                    for (at, number) in attributes.iter().enumerate() {
                        let data = (words[2] as *const u64).add(at).read();
                        // As the driver does, an attribute that the memory does not have is left at 0.
                        if attribute(data, *number, words[3], block) != SUCCESS {
                            (data as *mut u8).write(0);
                        }
                    }
                    SUCCESS
                }
                None => real(),
            },
            Shape::SetAttribute if is_dry(words[2]) => SUCCESS,
            Shape::PoolAttribute => {
                let (_, device) = here();
                let mut memory = memory();
                let card = memory.card(device);
                // From `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT` to `CU_MEMPOOL_ATTR_USED_MEM_HIGH`.
                let value = match words[1] as u32 {
                    5 => card.pool_reserved(),
                    6 => card.pool_reserved_high(),
                    7 => card.pool_used(),
                    8 => card.pool_used_high(),
                    _ => {
                        drop(memory);
                        return real();
                    }
                };
                put(words[2], value);
                SUCCESS
            }
            Shape::SetPoolAttribute => {
                let result = real();
                if result == SUCCESS {
                    let (_, device) = here();
                    let mut memory = memory();
                    let card = memory.card(device);
                    match words[1] as u32 {
                        4 => card.set_pool_release_threshold(get(words[2])),
                        6 => card.reset_pool_reserved_high(),
                        8 => card.reset_pool_used_high(),
                        _ => {}
                    }
                }
                result
            }
            Shape::Trim => {
                let result = real();
                let (_, device) = here();
                memory().card(device).trim_to(words[1]);
                result
            }
            Shape::Synchronize => {
                let result = real();
                memory().synchronize();
                result
            }
            Shape::ContextDestroy => {
                let result = real();
                if result == SUCCESS {
                    end_context(words[0]);
                }
                result
            }
            Shape::PrimaryReset => {
                let context = inside(|| cuda::primary_context(words[0] as c_int)).map_or(0, |context| context as u64);
                let result = real();
                if result == SUCCESS && context != 0 {
                    end_context(context);
                }
                result
            }
            Shape::RefuseAddress(at) if is_dry(words[at]) => CUDA_ERROR_NOT_SUPPORTED,
            Shape::RefuseHandle(at) if is_dry_handle(words[at]) => CUDA_ERROR_NOT_SUPPORTED,
            Shape::Refuse => CUDA_ERROR_NOT_SUPPORTED,
            Shape::Skip(addresses) if addresses.iter().any(|at| is_dry(words[*at])) => SUCCESS,
            Shape::CopyFromHost if is_dry(words[0]) => SUCCESS,
            Shape::CopyFromHost => {
                note_pointers(words[0], words[1], words[2]);
                real()
            }
            Shape::CopyToHost if is_dry(words[1]) => {
                fill(words[0], words[2]);
                SUCCESS
            }
            Shape::Copy => {
                if is_dry(words[0]) {
                    return SUCCESS;
                }
                if !is_dry(words[1]) {
                    return real();
                }
                if is_on_host(words[0]) {
                    fill(words[0], words[2]);
                }
                SUCCESS
            }
            Shape::Copy2D => copy_planes(&Planes::of_2d(words[0]), &real),
            Shape::Copy3D => copy_planes(&Planes::of_3d(words[0]), &real),
            Shape::CopyBatch => copy_batch(words, &real),
            Shape::Launch { function, parameters, extra } => {
                let extra = extra.map_or(0, |extra| words[extra]);
                if uses_dry_memory(words[function], words[parameters], extra) { SUCCESS } else { real() }
            }
            Shape::KernelNode(at) if kernel_uses_dry_memory(words[at]) => empty_node(words),
            Shape::CopyNode if Planes::of_3d(words[4]).has_dry() => empty_node(words),
            Shape::SetNode if is_dry(get(words[4])) => empty_node(words),
            Shape::Node { parameters } => {
                let at = words[parameters];
                // `CUgraphNodeParams`: the type, and from the 16th byte on what it needs.
                let has_dry = match (at as *const u32).read() {
                    0 => kernel_uses_dry_memory(at + 16),
                    1 => Planes::of_3d(at + 32).has_dry(),
                    2 => is_dry(get(at + 16)),
                    _ => false,
                };
                let without_edges = [words[0], words[1], words[2], words[parameters - 1]];
                if has_dry { empty_node(&without_edges) } else { real() }
            }
            Shape::SetKernelNode if kernel_uses_dry_memory(words[2]) => SUCCESS,
            Shape::StreamOperations => {
                // `CUstreamBatchMemOpParams` has six words, of which the second is the address.
                let addresses = (0..words[1] as u32 as usize).map(|at| (words[2] as *const u64).add(at * 6 + 1).read());
                if addresses.into_iter().any(is_dry) { SUCCESS } else { real() }
            }
            _ => real(),
        }
    }
}

/// # Safety
/// A word can be read there.
unsafe fn get(address: u64) -> u64 {
    // SAFETY: the caller says so.
    unsafe { (address as *const u64).read_unaligned() }
}

/// # Safety
/// A word can be written there.
unsafe fn put(address: u64, value: u64) {
    // SAFETY: the caller says so.
    unsafe { (address as *mut u64).write_unaligned(value) }
}

/// The current context of the thread, and its device.
fn here() -> (u64, u32) {
    inside(|| {
        let context = cuda::current_context().map_or(0, |context| context as u64);
        (context, cuda::current_ordinal().unwrap_or(0))
    })
}

/// # Safety
/// `real` makes the call, and `out` is where it writes the address.
unsafe fn alloc(out: u64, bytes: u64, is_pooled: bool, real: &dyn Fn() -> u32) -> u32 {
    let (context, device) = here();
    // The driver says what is wrong with a call without a context, or of no bytes.
    if context == 0 || bytes == 0 || out == 0 {
        return real();
    }
    let granted = memory().grant(device, bytes, is_pooled);
    let grant = match granted {
        Ok(grant) => grant,
        Err(error) => return code_of(error),
    };
    let begun = if is_real(bytes) {
        match real() {
            // SAFETY: the call succeeded, so it wrote the address.
            SUCCESS => Ok((unsafe { get(out) }, Backing::Real)),
            code => Err(code),
        }
    } else {
        reserve(bytes).map(|address| (address, Backing::Dry)).ok_or(CUDA_ERROR_OUT_OF_MEMORY)
    };
    match begun {
        Ok((address, backing)) => {
            memory().insert(address, bytes, backing, context, device, Some(grant));
            if backing == Backing::Dry {
                watch(address, bytes);
                // SAFETY: the caller passes the place for the address.
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

/// Addresses without memory.
#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
fn reserve(bytes: u64) -> Option<u64> {
    let mut address = 0;
    let bytes = bytes.checked_next_multiple_of(PAGE)?;
    // SAFETY: the out-parameter is live.
    inside(|| unsafe { sys::cuMemAddressReserve(&raw mut address, bytes as usize, PAGE as usize, 0, 0) })
        .result()
        .ok()?;
    Some(address)
}

/// Real memory begins as zeros, so that what a skipped kernel would have written there is a valid index.
#[allow(clippy::cast_possible_truncation, reason = "a block is as large as `usize` on these targets")]
fn clear(address: u64, bytes: u64) {
    // A stream of its own does not wait for the program's work, and may be used while a stream is captured.
    inside(|| {
        cuda::relaxed(|| {
            let mut stream = ptr::null_mut();
            let non_blocking = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the block was just allocated, and nobody else knows its address. The stream lives until this returns.
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

/// All blocks of a context end with it.
fn end_context(context: u64) {
    let dry = memory().remove_all(|block| block.context == context);
    dry.into_iter().for_each(|(address, block)| give_back(address, block));
}

#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
fn give_back(address: u64, block: Block) {
    let bytes = block.bytes.next_multiple_of(PAGE) as usize;
    // SAFETY: the range was reserved for this block, which nobody has any more.
    let _ = inside(|| unsafe { sys::cuMemAddressFree(address, bytes) }).result();
}

fn free(address: u64, real: &dyn Fn() -> u32) -> u32 {
    let known = memory().blocks.get(&address).copied();
    match known {
        Some(block) if block.backing == Backing::Dry => {
            // Afterwards another thread may get the address.
            let removed = memory().remove(address);
            if removed.is_none() {
                return CUDA_ERROR_INVALID_VALUE;
            }
            give_back(address, block);
            SUCCESS
        }
        Some(_) => {
            let removed = memory().blocks.remove(&address);
            let result = real();
            let mut memory = memory();
            match (removed, result) {
                (Some(block), SUCCESS) => memory.give_back(block),
                // The block is still there.
                (Some(block), _) => _ = memory.blocks.insert(address, block),
                (None, _) => {}
            }
            result
        }
        None => real(),
    }
}

/// # Safety
/// `words` are the arguments of `cuMemCreate`.
#[allow(clippy::cast_possible_truncation, reason = "an int is half a word")]
unsafe fn create(words: &[u64], real: &dyn Fn() -> u32) -> u32 {
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
    if !memory().hold(device, bytes) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    let is_dry = !is_real(bytes);
    if is_dry {
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

#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
fn unmap(address: u64, bytes: u64) -> u32 {
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

/// The dry block or the dry mapping at an address, and where it begins.
fn dry_block(address: u64) -> Option<(u64, Block)> {
    if !(LOWEST.load(Relaxed)..HIGHEST.load(Relaxed)).contains(&address) {
        return None;
    }
    let memory = memory();
    let block = memory.block_at(address).map(|(start, block)| (start, *block));
    block.or_else(|| memory.mapped_as_block(address)).filter(|(_, block)| block.backing == Backing::Dry)
}

/// # Safety
/// `data` is where the attribute is written.
unsafe fn attribute(data: u64, number: u32, address: u64, (start, block): (u64, Block)) -> u32 {
    const CU_MEMORYTYPE_DEVICE: u64 = 2;
    // `CUpointer_attribute`, and how many bytes each has.
    let (value, bytes) = match number {
        // The context, the address on the device, the number.
        1 => (block.context, 8),
        2 => (CU_MEMORYTYPE_DEVICE, 4),
        3 => (address, 8),
        7 => (1 << 62 | block.number, 8),
        // Whether operations wait; whether it is managed, and whether it can be shared, as booleans.
        6 => (0, 4),
        8 | 10 | 15 => (0, 1),
        9 => (block.device.into(), 4),
        11 | 19 => (start, 8),
        12 | 18 => (block.bytes, 8),
        // Whether it is mapped, as a boolean, and for reading and writing.
        13 => (1, 1),
        16 => (3, 4),
        // The types of handles, the pool.
        14 | 17 => (0, 8),
        20 => (1 << 62 | block.number, 8),
        _ => return CUDA_ERROR_INVALID_VALUE,
    };
    // SAFETY: the caller passes a place that is as large as the attribute.
    unsafe { ptr::copy_nonoverlapping(value.to_le_bytes().as_ptr(), data as *mut u8, bytes) };
    SUCCESS
}

/// Whether the driver says that this is memory of the host, or knows nothing of it.
fn is_on_host(address: u64) -> bool {
    const CU_MEMORYTYPE_DEVICE: u32 = 2;
    let mut kind = 0_u32;
    let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    // SAFETY: the out-parameter is live and as wide as the attribute.
    let asked = inside(|| unsafe { sys::cuPointerGetAttribute((&raw mut kind).cast::<c_void>(), attribute, address) });
    asked.result().is_err() || kind != CU_MEMORYTYPE_DEVICE
}

/// What dry memory contains, for the host.
///
/// # Safety
/// So many bytes can be written there.
#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
unsafe fn fill(to: u64, bytes: u64) {
    let fill = match MODE.get() {
        Some(Mode::Dry { fill, .. }) => *fill,
        _ => 0,
    };
    // SAFETY: the program asks for a copy of so many bytes to that place.
    unsafe { ptr::write_bytes(to as *mut u8, fill, bytes as usize) };
    note_reading(bytes);
}

/// A program that waits for a value which is never computed reads it again and again, while its memory does not change. One line says so.
fn note_reading(bytes: u64) {
    const READINGS: u64 = 20_000;
    const SECONDS: u64 = 60;

    struct Reading {
        /// How many dry blocks and handles there were when the program began to read only.
        dry: u64,
        since: Option<Instant>,
        count: u64,
        is_said: bool,
    }
    static READING: Mutex<Reading> = Mutex::new(Reading { dry: 0, since: None, count: 0, is_said: false });

    let dry = memory().dry_so_far();
    let mut reading = READING.lock().unwrap_or_else(PoisonError::into_inner);
    if reading.dry != dry {
        *reading = Reading { dry, since: None, count: 0, is_said: reading.is_said };
    }
    reading.count += 1;
    let seconds = reading.since.get_or_insert_with(Instant::now).elapsed().as_secs();
    if seconds >= SECONDS && reading.count >= READINGS && !reading.is_said {
        reading.is_said = true;
        eprintln!(
            "gpumem: dry run: in {seconds} s the program has allocated nothing large, and has read memory that is not there {} times, the \
             last time {bytes} bytes. It may wait for a value that a dry run does not compute. Ctrl-C ends it, and its recording is complete.",
            reading.count
        );
    }
}

/// If bytes that the program copies to real memory contain dry addresses, kernels must not use that memory.
///
/// # Safety
/// So many bytes can be read there.
#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
unsafe fn note_pointers(to: u64, from: u64, bytes: u64) {
    if bytes > LARGEST_REAL || HIGHEST.load(Relaxed) == 0 || from == 0 {
        return;
    }
    // SAFETY: the driver is about to read the same bytes.
    let mut words = (0..bytes / 8).map(|at| unsafe { (from as *const u64).add(at as usize).read_unaligned() });
    if words.any(is_dry) {
        let mut memory = memory();
        memory.holds_pointers(to);
        drop(memory);
        watch(to, bytes);
    }
}

/// A copy of rows: where they are on the host and on the device, on each side.
struct Planes {
    from: [u64; 2],
    to: [u64; 2],
    /// Where the first byte is written on the host, and the distance of rows and planes there.
    first: u64,
    pitch: u64,
    plane: u64,
    width: u64,
    height: u64,
    depth: u64,
}

impl Planes {
    /// # Safety
    /// It is the address of a `CUDA_MEMCPY2D`.
    unsafe fn of_2d(at: u64) -> Self {
        // SAFETY: the struct has 16 words.
        let word = |index: u64| unsafe { get(at + index * 8) };
        let (pitch, height) = (word(13), word(15));
        let to = Self::place(word(9), [word(11), word(12)]);
        let first = to[0].wrapping_add(word(8).wrapping_mul(pitch)).wrapping_add(word(7));
        let from = Self::place(word(2), [word(3), word(4)]);
        Self { from, to, first, pitch, plane: 0, width: word(14), height, depth: 1 }
    }

    /// # Safety
    /// It is the address of a `CUDA_MEMCPY3D` or of a `CUDA_MEMCPY3D_PEER`.
    unsafe fn of_3d(at: u64) -> Self {
        // SAFETY: both structs have 25 words.
        let word = |index: u64| unsafe { get(at + index * 8) };
        let (pitch, plane) = (word(20), word(20).wrapping_mul(word(21)));
        let to = Self::place(word(15), [word(16), word(17)]);
        let before = word(13).wrapping_mul(plane).wrapping_add(word(12).wrapping_mul(pitch)).wrapping_add(word(11));
        let from = Self::place(word(4), [word(5), word(6)]);
        Self {
            from,
            to,
            first: to[0].wrapping_add(before),
            pitch,
            plane,
            width: word(22),
            height: word(23),
            depth: word(24),
        }
    }

    /// The addresses on the host and on the device; 0 where this side is not. The sort is a `CUmemorytype`.
    #[allow(clippy::cast_possible_truncation, reason = "an int is half a word")]
    fn place(sort: u64, [host, device]: [u64; 2]) -> [u64; 2] {
        match sort as u32 {
            1 => [host, 0],
            2 => [0, device],
            // An address of either.
            4 if is_dry(device) || !is_on_host(device) => [0, device],
            4 => [device, 0],
            _ => [0, 0],
        }
    }

    fn has_dry(&self) -> bool {
        is_dry(self.from[1]) || is_dry(self.to[1])
    }
}

/// # Safety
/// It is a copy that the program asks for.
unsafe fn copy_planes(planes: &Planes, real: &dyn Fn() -> u32) -> u32 {
    if !planes.has_dry() {
        return real();
    }
    if planes.to[0] != 0 {
        for row in (0..planes.depth).flat_map(|z| (0..planes.height).map(move |y| (y, z))) {
            let (y, z) = row;
            // SAFETY: the program asks for a copy to these rows.
            unsafe { fill(planes.first + z * planes.plane + y * planes.pitch, planes.width) };
        }
    }
    SUCCESS
}

/// # Safety
/// `words` are the arguments of `cuMemcpyBatchAsync`.
#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
unsafe fn copy_batch(words: &[u64], real: &dyn Fn() -> u32) -> u32 {
    // SAFETY: the first three are lists of so many words.
    let copies: Vec<[u64; 3]> =
        (0..words[3]).map(|at| [0, 1, 2].map(|list: usize| unsafe { get(words[list] + at * 8) })).collect();
    if !copies.iter().any(|[to, from, _]| is_dry(*to) || is_dry(*from)) {
        return real();
    }
    let stream = words[words.len() - 1];
    for [to, from, bytes] in copies {
        // SAFETY: the program asks for this copy, on this stream.
        let code = unsafe {
            match (is_dry(to), is_dry(from)) {
                (true, _) => SUCCESS,
                (false, true) => {
                    if is_on_host(to) {
                        fill(to, bytes);
                    }
                    SUCCESS
                }
                (false, false) => inside(|| sys::cuMemcpyAsync(to, from, bytes as usize, stream as *mut _)) as u32,
            }
        };
        if code != SUCCESS {
            return code;
        }
    }
    SUCCESS
}

/// Whether a parameter of a launch contains a dry address. If the driver does not say what parameters a function has, it is taken to have one.
///
/// # Safety
/// The words are the function, and its parameters in one of the two forms, or 0.
unsafe fn uses_dry_memory(function: u64, parameters: u64, extra: u64) -> bool {
    if HIGHEST.load(Relaxed) == 0 {
        return false;
    }
    if parameters == 0 {
        // SAFETY: the caller says so.
        return extra != 0 && unsafe { extra_has_dry(extra) };
    }
    let infos = PARAM_INFO.get().into_iter().flatten().flatten();
    let ask = |info: &GetParamInfo, at: usize| {
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: the driver accepts functions and kernels as the program passes them, and both out-parameters are live.
        let code = inside(|| unsafe { info(function, at, &raw mut offset, &raw mut bytes) });
        (code, bytes as u64)
    };
    // The program may pass a `CUkernel` as a `CUfunction`.
    let mut is_known = false;
    for info in infos {
        let mut at = 0;
        loop {
            match ask(info, at) {
                // SAFETY: the list has an address for each parameter, where its bytes are.
                (SUCCESS, bytes) if unsafe { has_dry(get(parameters + at as u64 * 8), bytes) } => return true,
                (SUCCESS, _) => at += 1,
                // There are no more.
                (CUDA_ERROR_INVALID_VALUE, _) if at > 0 => return false,
                (code, _) => {
                    is_known |= code == CUDA_ERROR_INVALID_VALUE;
                    break;
                }
            }
        }
        if at > 0 {
            return true;
        }
    }
    // It has no parameters.
    !is_known
}

/// Whether one of these words is a dry address.
///
/// # Safety
/// So many bytes can be read there.
unsafe fn has_dry(at: u64, bytes: u64) -> bool {
    // SAFETY: the caller says so.
    (0..bytes / 8).any(|word| is_dry(unsafe { get(at + word * 8) }))
}

/// # Safety
/// It is the list that `cuLaunchKernel` takes: pairs, until 0.
unsafe fn extra_has_dry(extra: u64) -> bool {
    let (mut buffer, mut bytes, mut at) = (0, 0, extra);
    loop {
        // SAFETY: the list ends with 0.
        let (key, value) = unsafe { (get(at), get(at + 8)) };
        match key {
            0 => break,
            // `CU_LAUNCH_PARAM_BUFFER_POINTER`
            1 => buffer = value,
            // `CU_LAUNCH_PARAM_BUFFER_SIZE`: where the size is.
            // SAFETY: as above.
            2 => bytes = unsafe { get(value) },
            _ => return true,
        }
        at += 16;
    }
    // SAFETY: the program says that the buffer has so many bytes.
    unsafe { has_dry(buffer, bytes) }
}

/// # Safety
/// It is the address of a `CUDA_KERNEL_NODE_PARAMS` of any version.
unsafe fn kernel_uses_dry_memory(at: u64) -> bool {
    // SAFETY: the struct begins with the function; its 5th and 6th words are the parameters in the two forms.
    unsafe { uses_dry_memory(get(at), get(at + 40), get(at + 48)) }
}

/// A node that does nothing, in the place of one.
///
/// # Safety
/// The words are where the node goes, the graph, what it depends on, and how many these are.
#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
unsafe fn empty_node(words: &[u64]) -> u32 {
    let [out, graph, nodes, count, ..] = *words else { return CUDA_ERROR_INVALID_VALUE };
    // SAFETY: these are the arguments of the program's own call.
    inside(|| unsafe { sys::cuGraphAddEmptyNode(out as *mut _, graph as *mut _, nodes as *const _, count as usize) })
        as u32
}

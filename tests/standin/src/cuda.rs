//! `libcuda`: devices, the contexts of each thread, the attributes of pools, streams and events. Allocations are in
//! `memory.rs`.
//!
//! Work takes no time here: a stream is always idle, and an event has always happened.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::process;
use std::sync::atomic::Ordering;

use crate::card::Gpu;
use crate::cupti;
use crate::driver::{Call, lock};
use crate::ffi::{Out, Text};
use crate::graphs::{end_capture, not_capturing};
use crate::memory::settle_managed;
use crate::modules;
use crate::objects::{Capture, Objects, Stream, free_handle};
use crate::taken::{self, HEAP_OF_CONTEXT, LOCAL_OF_CONTEXT, Purpose};
use gpumem_core::device_model::{DeviceModel, ModelError};

/// A `CUresult` other than success.
pub(crate) struct ErrorCode(c_int);

pub(crate) const INVALID_VALUE: ErrorCode = ErrorCode(1);
pub(crate) const OUT_OF_MEMORY: ErrorCode = ErrorCode(2);
pub(crate) const NOT_INITIALIZED: ErrorCode = ErrorCode(3);
pub(crate) const NO_DEVICE: ErrorCode = ErrorCode(100);
pub(crate) const INVALID_DEVICE: ErrorCode = ErrorCode(101);
pub(crate) const INVALID_CONTEXT: ErrorCode = ErrorCode(201);
const UNSUPPORTED_LIMIT: ErrorCode = ErrorCode(215);
const PEER_ACCESS_UNSUPPORTED: ErrorCode = ErrorCode(217);
pub(crate) const INVALID_HANDLE: ErrorCode = ErrorCode(400);
pub(crate) const CONTEXT_IS_DESTROYED: ErrorCode = ErrorCode(709);
pub(crate) const NOT_SUPPORTED: ErrorCode = ErrorCode(801);
pub(crate) const STREAM_CAPTURE_UNSUPPORTED: ErrorCode = ErrorCode(900);
pub(crate) const STREAM_CAPTURE_INVALIDATED: ErrorCode = ErrorCode(901);
pub(crate) const STREAM_CAPTURE_IMPLICIT: ErrorCode = ErrorCode(906);

error_codes!(INVALID_VALUE);

impl From<ModelError> for ErrorCode {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::OutOfMemory => OUT_OF_MEMORY,
            ModelError::UnknownAddress | ModelError::ZeroBytes => INVALID_VALUE,
        }
    }
}

/// A `CUdevice`: the CUDA ordinal.
pub(crate) type Device = c_int;
/// A `CUdeviceptr`.
pub(crate) type Address = u64;
/// A `CUcontext`, `CUmemoryPool`, `CUstream`, `CUevent` or `CUgraph`; each kind has a separate range. There is one
/// primary context and one default pool for each GPU.
pub(crate) type Handle = usize;

pub(crate) const CONTEXTS: Handle = 0x1000_0000;
const CREATED_CONTEXTS: Handle = 0x1100_0000;
pub(crate) const POOLS: Handle = 0x2000_0000;
const STREAMS: Handle = 0x3100_0000;
const EVENTS: Handle = 0x3200_0000;

thread_local! {
    // The stack is never dropped, so that a thread's other destructors may still call CUDA.
    static CURRENT: ManuallyDrop<RefCell<Vec<Handle>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
}

/// Passes the calling thread's stack of contexts to `use_it`.
fn stack<T>(use_it: impl FnOnce(&mut Vec<Handle>) -> T) -> T {
    CURRENT.with(|stack| use_it(&mut stack.borrow_mut()))
}

pub(crate) fn current_context() -> Handle {
    stack(|stack| stack.last().copied()).unwrap_or(0)
}

fn card_of(handle: Handle, kind: Handle, call: &Call) -> Option<usize> {
    handle.checked_sub(kind).filter(|card| *card < call.driver.gpus.len())
}

pub(crate) fn ready(call: &Call) -> Result<(), ErrorCode> {
    if call.is_initialised() { Ok(()) } else { Err(NOT_INITIALIZED) }
}

/// Returns the GPU of an ordinal.
pub(crate) fn device(call: &Call, device: Device) -> Result<(usize, &'static Gpu), ErrorCode> {
    ready(call)?;
    let ordinal = usize::try_from(device).map_err(|_| INVALID_DEVICE)?;
    let card = *call.driver.visible.get(ordinal).ok_or(INVALID_DEVICE)?;
    Ok((card, call.on(card)?))
}

/// Returns the calling thread's current context, and its GPU.
pub(crate) fn context(call: &Call) -> Result<(Handle, usize, &'static Gpu), ErrorCode> {
    ready(call)?;
    let context = stack(|stack| stack.last().copied()).ok_or(INVALID_CONTEXT)?;
    let card = call.driver.context_card(context).ok_or(CONTEXT_IS_DESTROYED)?;
    let gpu = call.on(card)?;
    if context < CREATED_CONTEXTS && gpu.memory().retained == 0 {
        return Err(CONTEXT_IS_DESTROYED);
    }
    Ok((context, card, gpu))
}

/// Returns the GPU of the calling thread's current context.
pub(crate) fn current(call: &Call) -> Result<(usize, &'static Gpu), ErrorCode> {
    context(call).map(|(_, card, gpu)| (card, gpu))
}

/// Creates a context, with its memory and its id.
fn start_context(call: &Call, gpu: &Gpu, name: impl FnOnce(&mut Objects) -> Handle) -> Result<Handle, ErrorCode> {
    let mut objects = lock(&call.driver.objects);
    let context = name(&mut objects);
    if let Err(error) = taken::by_context(call, &mut gpu.memory(), context) {
        objects.contexts.remove(&context);
        return Err(error);
    }
    let uid = call.driver.contexts_created.fetch_add(1, Ordering::Relaxed) + 1;
    call.log("context_created", 0);
    objects.context_uids.insert(context, uid);
    Ok(context)
}

/// Frees everything in a context, and its own memory.
fn end_context(call: &Call, gpu: &Gpu, context: Handle) -> Result<(), ErrorCode> {
    cupti::announce_end(context);
    gpu.memory().end(context);
    let mut objects = lock(&call.driver.objects);
    objects.streams.retain(|_, stream| stream.context != context);
    objects.arrays.retain(|_, array| array.context != context);
    objects.managed.retain(|_, (_, owner)| *owner != context);
    objects.limits.retain(|(of, _), _| *of != context);
    modules::end(&mut objects, context);
    if gpu.memory().used_by_process().is_none() {
        // The pools are empty, because their blocks have ended with the primary context.
        gpu.memory().empty_pools();
        let card = objects.context_card(context, call.driver.gpus.len());
        objects.graph_blocks.retain(|_, (on, _)| Some(*on) != card);
        gpu.memory().unmap_for_graphs(0);
    }
    for executable in objects.executables.values_mut().filter(|executable| executable.context == context) {
        // Its memory is part of the context's.
        executable.context = 0;
    }
    settle_managed(call, &mut objects)
}

fn create_context(call: &Call, created: Out<Handle>, of: Device) -> Result<(), ErrorCode> {
    let (card, gpu) = device(call, of)?;
    let context = start_context(call, gpu, |objects| {
        let context = free_handle(CREATED_CONTEXTS, |taken| objects.contexts.contains_key(taken));
        objects.contexts.insert(context, card);
        context
    })?;
    stack(|stack| stack.push(context));
    Ok(created.put(context)?)
}

fn destroy_context(call: &Call, destroyed: Handle) -> Result<(), ErrorCode> {
    ready(call)?;
    let card = lock(&call.driver.objects).contexts.get(&destroyed).copied().ok_or(INVALID_CONTEXT)?;
    let gpu = call.on(card)?;
    end_context(call, gpu, destroyed)?;
    let mut objects = lock(&call.driver.objects);
    objects.contexts.remove(&destroyed);
    objects.attached.remove(&destroyed);
    stack(|stack| _ = stack.pop_if(|top| *top == destroyed));
    Ok(())
}

/// Returns the GPU of a stream. For the streams that every context has, this is the GPU of the current context.
pub(crate) fn stream_card(call: &Call, stream: Handle) -> Result<(usize, &'static Gpu), ErrorCode> {
    if stream <= 2 {
        return current(call);
    }
    ready(call)?;
    let card = lock(&call.driver.objects).streams.get(&stream).ok_or(INVALID_HANDLE)?.card;
    Ok((card, call.on(card)?))
}

/// Returns the GPU of a pool, and the pool's number on it.
pub(crate) fn pool(call: &Call, pool: Handle) -> Result<(usize, u64, &'static Gpu), ErrorCode> {
    ready(call)?;
    let default = card_of(pool, POOLS, call).map(|card| (card, 0));
    let created = || lock(&call.driver.objects).pools.get(&pool).copied();
    let (card, number) = default.or_else(created).ok_or(INVALID_VALUE)?;
    Ok((card, number, call.on(card)?))
}

/// Returns the handle of a GPU's current pool.
pub(crate) fn current_pool(call: &Call, card: usize) -> Handle {
    lock(&call.driver.objects).current_pools.get(&card).copied().unwrap_or(POOLS + card)
}

fn event(call: &Call, event: Handle) -> Result<(), ErrorCode> {
    ready(call)?;
    if lock(&call.driver.objects).events.contains(&event) { Ok(()) } else { Err(INVALID_HANDLE) }
}

/// The distance between the addresses of two GPUs, so that no two GPUs hand out the same address.
const CARD_ADDRESSES: Address = 1 << 44;
const FIRST_ADDRESS: Address = 0x7000_0000_0000;

pub(crate) fn address_out(card: usize, address: Address) -> Address {
    address + card as Address * CARD_ADDRESSES
}

/// Returns the GPU of an address, and the address in the GPU's model.
pub(crate) fn address_in(call: &Call, address: Address) -> Result<(&'static Gpu, Address), ErrorCode> {
    let card = address.checked_sub(FIRST_ADDRESS).ok_or(INVALID_VALUE)? / CARD_ADDRESSES;
    let gpu = usize::try_from(card).ok().and_then(|card| call.driver.gpus.get(card)).ok_or(INVALID_VALUE)?;
    Ok((gpu, address - card * CARD_ADDRESSES))
}

fn reported(call: &Call, bytes: u64) -> u64 {
    if call.driver.config.figures_max { u64::MAX } else { bytes }
}

fn reported_usize(call: &Call, bytes: u64) -> usize {
    usize::try_from(reported(call, bytes)).unwrap_or(usize::MAX)
}

fn count(number: usize) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}

/// Returns the total memory that CUDA reports for a device: the memory that the driver does not reserve.
pub(crate) fn total(model: &DeviceModel) -> u64 {
    model.total() - model.reserved()
}

/// Returns the bus id of a GPU. Each GPU has a separate bus.
pub(crate) fn bus_id(card: usize) -> String {
    format!("0000:{:02x}:00.0", card + 1)
}

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;

fn new_stream(call: &Call, created: Out<Handle>, flags: c_uint) -> Result<(), ErrorCode> {
    let (context, card, gpu) = context(call)?;
    let mut objects = lock(&call.driver.objects);
    let streams = objects.streams.values().filter(|stream| stream.context == context).count() + 1;
    taken::by_streams(call, gpu, context, streams)?;
    let handle = free_handle(STREAMS, |taken| objects.streams.contains_key(taken));
    let blocking = flags & NON_BLOCKING == 0;
    objects.streams.insert(handle, Stream { card, context, blocking, capture: None });
    Ok(created.put(handle)?)
}

fn synchronize(call: &Call, card: usize, gpu: &Gpu) -> Result<(), ErrorCode> {
    not_capturing(call, card)?;
    gpu.memory().synchronize();
    Ok(())
}

/// Returns the GPU of a device, if it supports pools.
fn pooling(call: &Call, of: Device) -> Result<usize, ErrorCode> {
    let (card, _) = device(call, of)?;
    if call.driver.config.pools { Ok(card) } else { Err(NOT_SUPPORTED) }
}

/// `CU_DEVICE_ATTRIBUTE_…` and the value. Any other attribute is 0.
const ATTRIBUTES: &[(c_int, c_int)] = &[
    (1, 1024),  // MAX_THREADS_PER_BLOCK
    (10, 32),   // WARP_SIZE
    (16, 132),  // MULTIPROCESSOR_COUNT
    (39, 2048), // MAX_THREADS_PER_MULTIPROCESSOR
    (41, 1),    // UNIFIED_ADDRESSING
    (75, 9),    // COMPUTE_CAPABILITY_MAJOR
    (76, 0),    // COMPUTE_CAPABILITY_MINOR
    (83, 1),    // MANAGED_MEMORY
];
const MEMORY_POOLS_SUPPORTED: c_int = 115;
const INTEGRATED: c_int = 18;

/// `CU_LIMIT_…`
const STACK_SIZE: c_int = 0;
const HEAP_SIZE: c_int = 2;

/// `CU_MEMPOOL_ATTR_…`
const RELEASE_THRESHOLD: c_int = 4;
const RESERVED_MEM_CURRENT: c_int = 5;
const RESERVED_MEM_HIGH: c_int = 6;
const USED_MEM_CURRENT: c_int = 7;
const USED_MEM_HIGH: c_int = 8;

dispatched! { jumps;
    fn cuInit(flags: c_uint) |call| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if call.driver.visible.is_empty() {
            return Err(NO_DEVICE);
        }
        let is_first = !call.is_initialised();
        if is_first && call.driver.initialised_by.swap(process::id(), Ordering::Relaxed) != 0 {
            // A forked process inherits no state of the driver from its parent, and cannot initialise the driver
            // itself.
            call.driver.initialised_by.store(u32::MAX, Ordering::Relaxed);
            return Err(NOT_INITIALIZED);
        }
        if is_first {
            taken::by_init(call)?;
        }
        call.driver.tear_down_at_exit();
        crate::injection::load(call)
    }

    fn cuDeviceGetCount(number: Out<c_int>) |call| {
        ready(call)?;
        Ok(number.put(count(call.driver.visible.len()))?)
    }

    fn cuDeviceGet(found: Out<Device>, ordinal: c_int) |call| {
        device(call, ordinal)?;
        Ok(found.put(ordinal)?)
    }

    fn cuDeviceGetName(name: Out<c_char>, length: c_int, of: Device) |call| {
        let (_, gpu) = device(call, of)?;
        Ok(name.put_text(&gpu.name, usize::try_from(length).map_err(|_| INVALID_VALUE)?)?)
    }

    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, of: Device) |call| {
        let (_, gpu) = device(call, of)?;
        Ok(uuid.put(gpu.mig.unwrap_or(gpu.uuid).0)?)
    }

    fn cuDeviceGetPCIBusId(text: Out<c_char>, length: c_int, of: Device) |call| {
        let (card, _) = device(call, of)?;
        Ok(text.put_text(&bus_id(card), usize::try_from(length).map_err(|_| INVALID_VALUE)?)?)
    }

    fn cuDeviceGetByPCIBusId(found: Out<Device>, text: Text) |call| {
        ready(call)?;
        let text = text.get()?;
        let ordinal = call.driver.visible.iter().position(|card| bus_id(*card) == text).ok_or(INVALID_DEVICE)?;
        Ok(found.put(count(ordinal))?)
    }

    // The GPUs are not connected.
    fn cuDeviceCanAccessPeer(can: Out<c_int>, of: Device, peer: Device) |call| {
        device(call, of)?;
        device(call, peer)?;
        Ok(can.put(0)?)
    }

    fn cuCtxEnablePeerAccess(_peer: Handle, _flags: c_uint) |_call| {
        Err(PEER_ACCESS_UNSUPPORTED)
    }

    fn cuCtxDisablePeerAccess(_peer: Handle) |_call| {
        Err(PEER_ACCESS_UNSUPPORTED)
    }

    fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_int, of: Device) |call| {
        device(call, of)?;
        let known = ATTRIBUTES.iter().find(|(known, _)| *known == attribute).map_or(0, |(_, value)| *value);
        Ok(value.put(match attribute {
            MEMORY_POOLS_SUPPORTED => c_int::from(call.driver.config.pools),
            INTEGRATED => c_int::from(call.driver.config.integrated),
            _ => known,
        })?)
    }

    fn cuDevicePrimaryCtxGetState(of: Device, flags: Out<c_uint>, active: Out<c_int>) |call| {
        let (_, gpu) = device(call, of)?;
        flags.put(0)?;
        Ok(active.put(c_int::from(gpu.memory().retained > 0))?)
    }

    fn cuDevicePrimaryCtxRetain(context: Out<Handle>, of: Device) |call| {
        let (card, gpu) = device(call, of)?;
        if gpu.memory().retained == 0 {
            start_context(call, gpu, |_| CONTEXTS + card)?;
        }
        gpu.memory().retained += 1;
        Ok(context.put(CONTEXTS + card)?)
    }

    fn cuDevicePrimaryCtxRelease | cuDevicePrimaryCtxRelease_v2(of: Device) |call| {
        let (card, gpu) = device(call, of)?;
        let left = {
            let mut memory = gpu.memory();
            memory.retained = memory.retained.checked_sub(1).ok_or(INVALID_CONTEXT)?;
            memory.retained
        };
        if left == 0 {
            end_context(call, gpu, CONTEXTS + card)?;
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxReset | cuDevicePrimaryCtxReset_v2(of: Device) |call| {
        // Everything in the context is freed, but its references must still be released.
        let (card, gpu) = device(call, of)?;
        if gpu.memory().retained > 0 {
            end_context(call, gpu, CONTEXTS + card)?;
            start_context(call, gpu, |_| CONTEXTS + card)?;
        }
        Ok(())
    }

    fn cuCtxCreate_v2(created: Out<Handle>, _flags: c_uint, of: Device) |call| {
        create_context(call, created, of)
    }

    fn cuCtxCreate_v3(created: Out<Handle>, _params: Out<c_void>, _count: c_int, _flags: c_uint, of: Device) |call| {
        create_context(call, created, of)
    }

    fn cuCtxCreate_v4(created: Out<Handle>, _params: Out<c_void>, _flags: c_uint, of: Device) |call| {
        create_context(call, created, of)
    }

    fn cuCtxDestroy | cuCtxDestroy_v2(destroyed: Handle) |call| {
        destroy_context(call, destroyed)
    }

    fn cuCtxAttach(attached: Out<Handle>, flags: c_uint) |call| {
        let (context, _, _) = context(call)?;
        if flags != 0 || context < CREATED_CONTEXTS {
            return Err(INVALID_VALUE);
        }
        *lock(&call.driver.objects).attached.entry(context).or_default() += 1;
        Ok(attached.put(context)?)
    }

    fn cuCtxDetach(detached: Handle) |call| {
        // This concerns only the calling thread's current context, which is destroyed if nothing has attached to it.
        let (context, _, _) = context(call)?;
        if detached != context {
            return Err(INVALID_CONTEXT);
        }
        let is_attached = match lock(&call.driver.objects).attached.get_mut(&context) {
            Some(times @ 1..) => {
                *times -= 1;
                true
            }
            _ => false,
        };
        if is_attached { Ok(()) } else { destroy_context(call, context) }
    }

    fn cuCtxGetId(of: Handle, found: Out<u64>) |call| {
        ready(call)?;
        let of = if of == 0 { context(call)?.0 } else { of };
        let card = call.driver.context_card(of).ok_or(CONTEXT_IS_DESTROYED)?;
        if of < CREATED_CONTEXTS && call.on(card)?.memory().retained == 0 {
            return Err(CONTEXT_IS_DESTROYED);
        }
        Ok(found.put(call.driver.context_uid(of).into())?)
    }

    fn cuCtxGetCurrent(context: Out<Handle>) |call| {
        ready(call)?;
        Ok(context.put(stack(|stack| stack.last().copied()).unwrap_or(0))?)
    }

    fn cuCtxSetCurrent(context: Handle) |call| {
        ready(call)?;
        if context != 0 && call.driver.context_card(context).is_none() {
            return Err(INVALID_CONTEXT);
        }
        stack(|stack| {
            stack.pop();
            stack.extend(Some(context).filter(|context| *context != 0));
        });
        Ok(())
    }

    fn cuCtxPushCurrent_v2(context: Handle) |call| {
        ready(call)?;
        call.driver.context_card(context).ok_or(INVALID_CONTEXT)?;
        stack(|stack| stack.push(context));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(context: Out<Handle>) |call| {
        ready(call)?;
        let popped = stack(Vec::pop).ok_or(INVALID_CONTEXT)?;
        if context.is_null() { Ok(()) } else { Ok(context.put(popped)?) }
    }

    fn cuCtxGetDevice(found: Out<Device>) |call| {
        let (card, _) = current(call)?;
        let ordinal = call.driver.visible.iter().position(|visible| *visible == card).ok_or(INVALID_CONTEXT)?;
        Ok(found.put(count(ordinal))?)
    }

    fn cuCtxSynchronize() |call| {
        let (card, gpu) = current(call)?;
        synchronize(call, card, gpu)
    }

    fn cuCtxSetLimit(limit: c_int, bytes: usize) |call| {
        let (context, _, gpu) = context(call)?;
        let bytes = bytes as u64;
        match limit {
            STACK_SIZE => taken::by_stack_limit(call, gpu, context, bytes)?,
            HEAP_SIZE => taken::take(call, gpu, Purpose::Heap(context), bytes.saturating_sub(HEAP_OF_CONTEXT))?,
            _ => return Err(UNSUPPORTED_LIMIT),
        }
        lock(&call.driver.objects).limits.insert((context, limit), bytes);
        Ok(())
    }

    fn cuCtxGetLimit(bytes: Out<usize>, limit: c_int) |call| {
        let (context, _, _) = context(call)?;
        let initial = match limit {
            STACK_SIZE => LOCAL_OF_CONTEXT,
            HEAP_SIZE => HEAP_OF_CONTEXT,
            _ => return Err(UNSUPPORTED_LIMIT),
        };
        let set = lock(&call.driver.objects).limits.get(&(context, limit)).copied();
        Ok(bytes.put(usize::try_from(set.unwrap_or(initial)).unwrap_or(usize::MAX))?)
    }

    fn cuMemGetInfo_v2(free: Out<usize>, all: Out<usize>) |call| {
        let (_, gpu) = current(call)?;
        let mut memory = gpu.memory();
        free.put(reported_usize(call, memory.cuda().free()))?;
        Ok(all.put(reported_usize(call, total(memory.cuda())))?)
    }

    fn cuDeviceGetMemPool(found: Out<Handle>, of: Device) |call| {
        let card = pooling(call, of)?;
        Ok(found.put(current_pool(call, card))?)
    }

    fn cuDeviceGetDefaultMemPool(found: Out<Handle>, of: Device) |call| {
        Ok(found.put(POOLS + pooling(call, of)?)?)
    }

    fn cuMemPoolTrimTo(of: Handle, keep: usize) |call| {
        let (card, number, gpu) = pool(call, of)?;
        not_capturing(call, card)?;
        Ok(gpu.memory().in_pool(number, |model| {
            model.trim_to(keep as u64);
            Ok(())
        })?)
    }

    fn cuMemPoolGetAttribute(of: Handle, attribute: c_int, value: Out<c_void>) |call| {
        let (card, number, gpu) = pool(call, of)?;
        not_capturing(call, card)?;
        let mut memory = gpu.memory();
        let model = memory.pool(number).ok_or(INVALID_VALUE)?;
        let bytes = match attribute {
            // The reuse policies are numbers of the size of an `int`.
            1..=3 => return Ok(value.cast::<c_int>().put(1)?),
            RELEASE_THRESHOLD => model.pool_release_threshold(),
            RESERVED_MEM_CURRENT => model.pool_reserved(),
            RESERVED_MEM_HIGH => model.pool_reserved_high(),
            USED_MEM_CURRENT => model.pool_used(),
            USED_MEM_HIGH => model.pool_used_high(),
            _ => return Err(INVALID_VALUE),
        };
        Ok(value.cast().put(reported(call, bytes))?)
    }

    fn cuMemPoolSetAttribute(of: Handle, attribute: c_int, value: Out<c_void>) |call| {
        let (card, number, gpu) = pool(call, of)?;
        not_capturing(call, card)?;
        let mut memory = gpu.memory();
        let model = memory.pool(number).ok_or(INVALID_VALUE)?;
        let requested = if (1..=3).contains(&attribute) { 0 } else { value.cast::<u64>().get()? };
        match attribute {
            1..=3 => (),
            RELEASE_THRESHOLD => model.set_pool_release_threshold(requested),
            // The highest values can only be reset.
            RESERVED_MEM_HIGH if requested == 0 => model.reset_pool_reserved_high(),
            USED_MEM_HIGH if requested == 0 => model.reset_pool_used_high(),
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    }

    fn cuMemsetD8Async(address: Address, _value: u8, length: usize, stream: Handle) |call| {
        stream_card(call, stream)?;
        // The content of a block is never read here.
        let (gpu, address) = address_in(call, address)?;
        let (start, bytes) = gpu.memory().block_at(address).ok_or(INVALID_VALUE)?;
        if address - start + length as u64 <= bytes { Ok(()) } else { Err(INVALID_VALUE) }
    }

    fn cuStreamCreate(created: Out<Handle>, flags: c_uint) |call| {
        new_stream(call, created, flags)
    }

    fn cuStreamCreateWithPriority(created: Out<Handle>, flags: c_uint, _priority: c_int) |call| {
        new_stream(call, created, flags)
    }

    fn cuStreamDestroy | cuStreamDestroy_v2(stream: Handle) |call| {
        ready(call)?;
        let mut objects = lock(&call.driver.objects);
        let Stream { capture, .. } = objects.streams.remove(&stream).ok_or(INVALID_HANDLE)?;
        if let Some(Capture { graph, is_origin: true, .. }) = capture {
            end_capture(&mut objects, graph);
            objects.graphs.remove(&graph);
        }
        Ok(())
    }

    fn cuStreamSynchronize(stream: Handle) |call| {
        let (card, gpu) = stream_card(call, stream)?;
        synchronize(call, card, gpu)
    }

    fn cuStreamWaitEvent(stream: Handle, waited: Handle, _flags: c_uint) |call| {
        stream_card(call, stream)?;
        event(call, waited)?;
        let mut objects = lock(&call.driver.objects);
        // A wait for captured work is captured with it.
        let joined = objects.recorded.get(&waited).copied();
        if let (Some(capture), Some(stream)) = (joined, objects.streams.get_mut(&stream)) {
            stream.capture = stream.capture.or(Some(Capture { is_origin: false, ..capture }));
        }
        Ok(())
    }

    fn cuEventCreate(created: Out<Handle>, _flags: c_uint) |call| {
        current(call)?;
        let mut objects = lock(&call.driver.objects);
        let handle = free_handle(EVENTS, |taken| objects.events.contains(taken));
        objects.events.insert(handle);
        Ok(created.put(handle)?)
    }

    fn cuEventRecord(recorded: Handle, stream: Handle) |call| {
        stream_card(call, stream)?;
        event(call, recorded)?;
        let mut objects = lock(&call.driver.objects);
        match objects.streams.get(&stream).and_then(|stream| stream.capture) {
            Some(capture) => objects.recorded.insert(recorded, capture),
            None => objects.recorded.remove(&recorded),
        };
        Ok(())
    }

    fn cuEventDestroy_v2(destroyed: Handle) |call| {
        ready(call)?;
        if lock(&call.driver.objects).events.remove(&destroyed) { Ok(()) } else { Err(INVALID_HANDLE) }
    }
}

/// `CUresult` codes, with their names and NVIDIA's descriptions.
const ERRORS: &[(c_int, &std::ffi::CStr, &std::ffi::CStr)] = &[
    (0, c"CUDA_SUCCESS", c"no error"),
    (1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (34, c"CUDA_ERROR_STUB_LIBRARY", c"CUDA driver is a stub library"),
    (46, c"CUDA_ERROR_DEVICE_UNAVAILABLE", c"CUDA-capable device(s) is/are busy or unavailable"),
    (100, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
    (101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (200, c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (214, c"CUDA_ERROR_ECC_UNCORRECTABLE", c"uncorrectable ECC error encountered"),
    (215, c"CUDA_ERROR_UNSUPPORTED_LIMIT", c"limit is not supported on this architecture"),
    (400, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (500, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed"),
    (800, c"CUDA_ERROR_NOT_PERMITTED", c"operation not permitted"),
    (712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"part or all of the requested memory range is already mapped"),
    (713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"pointer does not correspond to a registered memory region"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
    (802, c"CUDA_ERROR_SYSTEM_NOT_READY", c"system not yet initialized"),
    (803, c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", c"system has unsupported display driver / cuda driver combination"),
    (900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"operation not permitted when stream is capturing"),
    (901, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"operation failed due to a previous error during capture"),
    (
        906,
        c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        c"operation would make the legacy stream depend on a capturing blocking stream",
    ),
    (999, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

fn error(code: c_int) -> Result<(*const c_char, *const c_char), ErrorCode> {
    let (_, name, words) = ERRORS.iter().find(|(known, ..)| *known == code).ok_or(INVALID_VALUE)?;
    Ok((name.as_ptr(), words.as_ptr()))
}

/// NVIDIA's `cuGetErrorName`, for the codes that occur in the tests.
#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(code: c_int, name: Out<*const c_char>) -> c_int {
    crate::ffi::code_of(error(code).and_then(|(text, _)| Ok(name.put(text)?)))
}

/// NVIDIA's `cuGetErrorString`, for the same codes.
#[unsafe(no_mangle)]
extern "C" fn cuGetErrorString(code: c_int, words: Out<*const c_char>) -> c_int {
    crate::ffi::code_of(error(code).and_then(|(_, text)| Ok(words.put(text)?)))
}

//! The raw calls: every result is checked, nothing is wrapped more than the tests need.

use std::{
    collections::HashMap,
    ffi::c_void,
    ptr,
    sync::{Mutex, PoisonError},
};

use cudarc::driver::{DriverError, result, sys};

type Result<T> = std::result::Result<T, DriverError>;

/// A way to allocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Plain,
    Pitched,
    Array,
    /// On the null stream.
    Async,
    Managed,
    Pinned,
    /// Created, mapped; unmapped and then released.
    Vmm,
    /// Created, mapped and released at once, so that the mapping alone holds it.
    VmmReleasedEarly,
}

impl Way {
    pub(crate) const ALL: [Self; 8] = [
        Self::Plain,
        Self::Pitched,
        Self::Array,
        Self::Async,
        Self::Managed,
        Self::Pinned,
        Self::Vmm,
        Self::VmmReleasedEarly,
    ];

    pub(crate) fn call(self) -> &'static str {
        match self {
            Self::Plain => "cuMemAlloc",
            Self::Pitched => "cuMemAllocPitch",
            Self::Array => "cuArrayCreate",
            Self::Async => "cuMemAllocAsync",
            Self::Managed => "cuMemAllocManaged",
            Self::Pinned => "cuMemAllocHost",
            Self::Vmm | Self::VmmReleasedEarly => "cuMemCreate",
        }
    }
}

/// What was allocated. Forgotten, not freed, when it is dropped, as where its context goes first.
#[derive(Debug)]
pub(crate) struct Block {
    way: Way,
    /// The address, the array or the handle.
    name: u64,
    bytes: usize,
    /// Where it is mapped.
    mapped: u64,
}

impl Block {
    pub(crate) fn name(&self) -> u64 {
        self.name
    }

    /// What a trace is to count of it.
    pub(crate) fn counted(&self) -> i64 {
        match self.way {
            Way::Managed | Way::Pinned => 0,
            _ => i64::try_from(self.bytes).expect("it fits into memory"),
        }
    }
}

pub(crate) fn take(way: Way, bytes: usize) -> Result<Block> {
    let plain = |name, bytes| Block { way, name, bytes, mapped: 0 };
    let mut at = 0;
    Ok(match way {
        Way::Plain => {
            // SAFETY: the out-parameter is live.
            unsafe { sys::cuMemAlloc_v2(&raw mut at, bytes) }.result()?;
            plain(at, bytes)
        }
        Way::Pitched => {
            let (width, mut pitch) = (bytes.clamp(1, 1000), 0);
            let height = bytes.div_ceil(width);
            // SAFETY: both out-parameters are live.
            unsafe { sys::cuMemAllocPitch_v2(&raw mut at, &raw mut pitch, width, height, 4) }.result()?;
            plain(at, pitch * height)
        }
        Way::Array => {
            let floats = bytes.div_ceil(4);
            let width = floats.clamp(1, 1024);
            let height = floats.div_ceil(width);
            let descriptor = sys::CUDA_ARRAY_DESCRIPTOR {
                Width: width,
                Height: height,
                Format: sys::CUarray_format::CU_AD_FORMAT_FLOAT,
                NumChannels: 1,
            };
            let mut array = ptr::null_mut();
            // SAFETY: the out-parameter and the descriptor are live.
            unsafe { sys::cuArrayCreate_v2(&raw mut array, &raw const descriptor) }.result()?;
            plain(array as u64, width * height * 4)
        }
        Way::Async => plain(alloc_async(bytes, ptr::null_mut())?, bytes),
        Way::Managed => {
            const CU_MEM_ATTACH_GLOBAL: u32 = 1;
            // SAFETY: the out-parameter is live.
            unsafe { sys::cuMemAllocManaged(&raw mut at, bytes, CU_MEM_ATTACH_GLOBAL) }.result()?;
            plain(at, bytes)
        }
        Way::Pinned => {
            let mut host = ptr::null_mut();
            // SAFETY: the out-parameter is live.
            unsafe { sys::cuMemAllocHost_v2(&raw mut host, bytes) }.result()?;
            plain(host as u64, bytes)
        }
        Way::Vmm | Way::VmmReleasedEarly => {
            let bytes = bytes.next_multiple_of(granularity(0)?);
            let name = create(bytes, 0)?;
            let mapped = map(name, bytes).inspect_err(|_| {
                let _ = release(name);
            })?;
            if way == Way::VmmReleasedEarly {
                release(name)?;
            }
            Block { way, name, bytes, mapped }
        }
    })
}

#[expect(clippy::needless_pass_by_value, reason = "a block is given back once")]
pub(crate) fn give(block: Block) -> Result<()> {
    let Block { way, name, bytes, mapped } = block;
    match way {
        Way::Plain | Way::Pitched | Way::Managed => free(name),
        Way::Async => free_async(name),
        Way::Pinned => free_host(name),
        // SAFETY: the array is live, since a block is given back once.
        Way::Array => unsafe { sys::cuArrayDestroy(address::<sys::CUarray_st>(name)) }.result(),
        Way::Vmm | Way::VmmReleasedEarly => {
            // SAFETY: the range is mapped and reserved, and nothing on the device uses it.
            unsafe { sys::cuMemUnmap(mapped, bytes) }.result()?;
            // SAFETY: as above; nothing is mapped there any more.
            unsafe { sys::cuMemAddressFree(mapped, bytes) }.result()?;
            if way == Way::Vmm { release(name) } else { Ok(()) }
        }
    }
}

fn address<T>(name: u64) -> *mut T {
    ptr::with_exposed_provenance_mut(usize::try_from(name).expect("64 bits"))
}

pub(crate) fn free(at: u64) -> Result<()> {
    // SAFETY: the driver refuses what is no block; nothing on the device uses those of the tests.
    unsafe { sys::cuMemFree_v2(at) }.result()
}

pub(crate) fn free_async(at: u64) -> Result<()> {
    free_on(at, ptr::null_mut())
}

pub(crate) fn free_host(at: u64) -> Result<()> {
    // SAFETY: the driver refuses what is no block; nobody uses those of the tests.
    unsafe { sys::cuMemFreeHost(address::<c_void>(at)) }.result()
}

pub(crate) fn alloc_async(bytes: usize, stream: sys::CUstream) -> Result<u64> {
    let mut at = 0;
    // SAFETY: the out-parameter is live, and the stream too, or it is the null stream.
    unsafe { sys::cuMemAllocAsync(&raw mut at, bytes, stream) }.result()?;
    Ok(at)
}

pub(crate) fn free_on(at: u64, stream: sys::CUstream) -> Result<()> {
    // SAFETY: the stream is live or the null stream, and the driver refuses what is no block.
    unsafe { sys::cuMemFreeAsync(at, stream) }.result()
}

pub(crate) fn alloc_from_pool(bytes: usize, pool: sys::CUmemoryPool, stream: sys::CUstream) -> Result<u64> {
    let mut at = 0;
    // SAFETY: the out-parameter, the pool and the stream are live.
    unsafe { sys::cuMemAllocFromPoolAsync(&raw mut at, bytes, pool, stream) }.result()?;
    Ok(at)
}

/// The front of `CUmemAllocationProp` and `CUmemPoolProps`, which cudarc spells differently for each CUDA version.
#[repr(C)]
struct Properties {
    kind: u32,
    handle_types: u32,
    location: u32,
    ordinal: i32,
    rest: [u64; 16],
}

impl Properties {
    fn on(ordinal: u32) -> Self {
        // Pinned, on a device.
        Self { kind: 1, handle_types: 0, location: 1, ordinal: number(ordinal), rest: [0; 16] }
    }
}

fn number(ordinal: u32) -> i32 {
    i32::try_from(ordinal).expect("few devices")
}

pub(crate) fn granularity(ordinal: u32) -> Result<usize> {
    let (properties, mut bytes) = (Properties::on(ordinal), 0);
    let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: the out-parameter is live, and the properties are at least as long as the driver reads.
    unsafe { sys::cuMemGetAllocationGranularity(&raw mut bytes, (&raw const properties).cast(), minimum) }.result()?;
    Ok(bytes)
}

pub(crate) fn create(bytes: usize, ordinal: u32) -> Result<u64> {
    let (properties, mut handle) = (Properties::on(ordinal), 0);
    // SAFETY: the out-parameter is live, and the properties are at least as long as the driver reads.
    unsafe { sys::cuMemCreate(&raw mut handle, bytes, (&raw const properties).cast(), 0) }.result()?;
    Ok(handle)
}

pub(crate) fn release(handle: u64) -> Result<()> {
    // SAFETY: the handle is held once by the caller.
    unsafe { sys::cuMemRelease(handle) }.result()
}

/// Maps a handle of device 0 for device 0.
fn map(handle: u64, bytes: usize) -> Result<u64> {
    let mut at = 0;
    // SAFETY: the out-parameter is live.
    unsafe { sys::cuMemAddressReserve(&raw mut at, bytes, 0, 0, 0) }.result()?;
    // SAFETY: the range was just reserved, the handle is live and as large.
    unsafe { sys::cuMemMap(at, bytes, 0, handle, 0) }.result()?;
    // `CUmemAccessDesc`: a device, its ordinal, read and write.
    let access = [1_u32, 0, 3];
    // SAFETY: the range is mapped, and the description is live.
    unsafe { sys::cuMemSetAccess(at, bytes, access.as_ptr().cast(), 1) }.result()?;
    Ok(at)
}

pub(crate) fn register(host: &mut [u8]) -> Result<()> {
    // SAFETY: the memory is the caller's, who unregisters it before it is freed.
    unsafe { sys::cuMemHostRegister_v2(host.as_mut_ptr().cast(), host.len(), 0) }.result()
}

pub(crate) fn unregister(host: &mut [u8]) -> Result<()> {
    // SAFETY: the memory is live, and the driver refuses what is not registered.
    unsafe { sys::cuMemHostUnregister(host.as_mut_ptr().cast()) }.result()
}

/// Free bytes of the current context's device.
pub(crate) fn free_memory() -> Result<i64> {
    result::mem_get_info().map(|(free, _)| i64::try_from(free).expect("it fits into memory"))
}

/// The device of an address, as the driver reports it.
pub(crate) fn ordinal_of(at: u64) -> Result<u32> {
    let mut ordinal = 0_u32;
    let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    // SAFETY: the attribute is an int, and the out-parameter is as wide.
    unsafe { sys::cuPointerGetAttribute((&raw mut ordinal).cast(), attribute, at) }.result()?;
    Ok(ordinal)
}

pub(crate) fn stream() -> Result<sys::CUstream> {
    result::stream::create(result::stream::StreamKind::NonBlocking)
}

pub(crate) fn stream_destroy(stream: sys::CUstream) -> Result<()> {
    // SAFETY: the stream is live and not used again.
    unsafe { result::stream::destroy(stream) }
}

pub(crate) fn synchronize(stream: sys::CUstream) -> Result<()> {
    // SAFETY: the stream is live.
    unsafe { result::stream::synchronize(stream) }
}

pub(crate) fn default_pool(ordinal: u32) -> Result<sys::CUmemoryPool> {
    let device = result::device::get(number(ordinal))?;
    // SAFETY: the device came from the driver.
    unsafe { result::device::get_default_mem_pool(device) }
}

/// How much the default pool keeps when nothing of it is in use.
pub(crate) fn keep_pool(ordinal: u32, mut bytes: u64) -> Result<()> {
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let pool = default_pool(ordinal)?;
    // SAFETY: the attribute is 64 bits wide, as what is passed is, and default pools are always there.
    unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut bytes).cast()) }.result()?;
    // SAFETY: as above. What is in use stays.
    unsafe { sys::cuMemPoolTrimTo(pool, 0) }.result()
}

pub(crate) fn pool_create(ordinal: u32) -> Result<sys::CUmemoryPool> {
    let (properties, mut pool) = (Properties::on(ordinal), ptr::null_mut());
    // SAFETY: the out-parameter is live, and the properties are at least as long as the driver reads.
    unsafe { sys::cuMemPoolCreate(&raw mut pool, (&raw const properties).cast()) }.result()?;
    Ok(pool)
}

pub(crate) fn pool_destroy(pool: sys::CUmemoryPool) -> Result<()> {
    // SAFETY: the pool is live and not used again.
    unsafe { sys::cuMemPoolDestroy(pool) }.result()
}

/// Lets a device at a pool.
pub(crate) fn pool_access(pool: sys::CUmemoryPool, ordinal: u32) -> Result<()> {
    let access = [1_u32, ordinal, 3];
    // SAFETY: the pool and the description are live.
    unsafe { sys::cuMemPoolSetAccess(pool, access.as_ptr().cast(), 1) }.result()
}

pub(crate) fn can_access(from: u32, to: u32) -> Result<bool> {
    let (from, to) = (result::device::get(number(from))?, result::device::get(number(to))?);
    let mut can = 0;
    // SAFETY: the devices came from the driver, and the out-parameter is live.
    unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, from, to) }.result()?;
    Ok(can != 0)
}

pub(crate) fn copy_peer(to: (u64, Context), from: (u64, Context), bytes: usize) -> Result<()> {
    // SAFETY: both blocks are live in their contexts and at least so large.
    unsafe { sys::cuMemcpyPeer(to.0, to.1.raw(), from.0, from.1.raw(), bytes) }.result()
}

pub(crate) fn init() -> Result<()> {
    result::init()
}

/// Gives back the one reference that [`Context::primary`] took.
pub(crate) fn primary_release(ordinal: u32) -> Result<()> {
    let device = result::device::get(number(ordinal))?;
    // SAFETY: the process, which is a test's, uses the context no more.
    unsafe { result::primary_ctx::release(device) }
}

pub(crate) fn primary_reset(ordinal: u32) -> Result<()> {
    let device = result::device::get(number(ordinal))?;
    // SAFETY: as above.
    unsafe { sys::cuDevicePrimaryCtxReset_v2(device) }.result()
}

/// A `CUcontext`, as a number: it may be used by any thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context(u64);

impl Context {
    fn raw(self) -> sys::CUcontext {
        address(self.0)
    }

    /// A device's primary context, retained once and for ever.
    pub(crate) fn primary(ordinal: u32) -> Result<Self> {
        static RETAINED: Mutex<Option<HashMap<u32, Context>>> = Mutex::new(None);
        let mut retained = RETAINED.lock().unwrap_or_else(PoisonError::into_inner);
        let retained = retained.get_or_insert_default();
        if let Some(context) = retained.get(&ordinal) {
            return Ok(*context);
        }
        result::init()?;
        let device = result::device::get(number(ordinal))?;
        // SAFETY: the device came from the driver.
        let context = Self(unsafe { result::primary_ctx::retain(device) }? as u64);
        retained.insert(ordinal, context);
        Ok(context)
    }

    /// A context beside the primary one, current on this thread. Newer versions of the call have other arguments.
    pub(crate) fn create(ordinal: u32) -> Result<Self> {
        type Create = unsafe extern "C" fn(*mut sys::CUcontext, u32, sys::CUdevice) -> sys::CUresult;
        let device = result::device::get(number(ordinal))?;
        // SAFETY: the driver is loaded already.
        let driver = unsafe { libloading::Library::new("libcuda.so.1") }.expect("the driver is there");
        // SAFETY: that is the signature of version 2, which each driver has.
        let create = unsafe { driver.get::<Create>(b"cuCtxCreate_v2") }.expect("each driver has it");
        let mut context = ptr::null_mut();
        // SAFETY: the out-parameter is live.
        unsafe { create(&raw mut context, 0, device) }.result()?;
        Ok(Self(context as u64))
    }

    pub(crate) fn make_current(self) {
        // SAFETY: the context is alive: primary ones are retained for ever.
        unsafe { result::ctx::set_current(self.raw()) }.expect("a live context can be current");
    }

    /// Lets the current context at the memory of another.
    pub(crate) fn enable_peer(self, other: Self) -> Result<()> {
        self.make_current();
        // SAFETY: both are alive.
        unsafe { sys::cuCtxEnablePeerAccess(other.raw(), 0) }.result()
    }

    pub(crate) fn destroy(self) -> Result<()> {
        // SAFETY: the context was created by `create` and is not used again.
        unsafe { sys::cuCtxDestroy_v2(self.raw()) }.result()
    }
}

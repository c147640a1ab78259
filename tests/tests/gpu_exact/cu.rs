//! The raw calls: every result is checked, nothing is wrapped more than the tests need.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use gpumem_tests::driver::{call, done, try_put};

/// The `CUresult` of a call that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused(i32);

type Result<T> = std::result::Result<T, Refused>;

fn result(code: i32) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(Refused(code)) }
}

fn called(function: &str, arguments: &[u64]) -> Result<()> {
    result(call(function, arguments))
}

/// What a call puts where its out-parameter is.
fn put(function: &str, arguments: impl FnOnce(u64) -> Vec<u64>) -> Result<u64> {
    let (code, out) = try_put(function, arguments);
    result(code).map(|()| out)
}

/// A `CUstream` or a `CUmemoryPool`.
pub(crate) type Handle = u64;

const NULL_STREAM: Handle = 0;

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
    let block = |name, bytes| Ok(Block { way, name, bytes, mapped: 0 });
    let size = bytes as u64;
    match way {
        Way::Plain => block(put("cuMemAlloc_v2", |at| vec![at, size])?, bytes),
        Way::Pitched => {
            let width = bytes.clamp(1, 1000);
            let height = bytes.div_ceil(width);
            let mut pitch = 0_u64;
            let pitch_at = (&raw mut pitch).expose_provenance() as u64;
            let arguments = |at| vec![at, pitch_at, width as u64, height as u64, 4];
            let at = put("cuMemAllocPitch_v2", arguments)?;
            block(at, usize::try_from(pitch).expect("64 bits") * height)
        }
        Way::Array => {
            const FLOAT: u64 = 0x20;
            let floats = bytes.div_ceil(4);
            let width = floats.clamp(1, 1024);
            let height = floats.div_ceil(width);
            // `CUDA_ARRAY_DESCRIPTOR`: width, height, format and one channel.
            let descriptor = [width as u64, height as u64, FLOAT | 1 << 32];
            block(put("cuArrayCreate_v2", |array| vec![array, address(&descriptor)])?, width * height * 4)
        }
        Way::Async => block(alloc_async(bytes, NULL_STREAM)?, bytes),
        Way::Managed => {
            const CU_MEM_ATTACH_GLOBAL: u64 = 1;
            block(put("cuMemAllocManaged", |at| vec![at, size, CU_MEM_ATTACH_GLOBAL])?, bytes)
        }
        Way::Pinned => block(put("cuMemAllocHost_v2", |host| vec![host, size])?, bytes),
        Way::Vmm | Way::VmmReleasedEarly => {
            let bytes = bytes.next_multiple_of(granularity(0)?);
            let name = create(bytes, 0)?;
            let mapped = map(name, bytes).inspect_err(|_| {
                let _ = release(name);
            })?;
            if way == Way::VmmReleasedEarly {
                release(name)?;
            }
            Ok(Block { way, name, bytes, mapped })
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "a block is given back once")]
pub(crate) fn give(block: Block) -> Result<()> {
    let Block { way, name, bytes, mapped } = block;
    match way {
        Way::Plain | Way::Pitched | Way::Managed => free(name),
        Way::Async => free_async(name),
        Way::Pinned => free_host(name),
        Way::Array => called("cuArrayDestroy", &[name]),
        Way::Vmm | Way::VmmReleasedEarly => {
            called("cuMemUnmap", &[mapped, bytes as u64])?;
            called("cuMemAddressFree", &[mapped, bytes as u64])?;
            if way == Way::Vmm { release(name) } else { Ok(()) }
        }
    }
}

fn address<T: ?Sized>(of: &T) -> u64 {
    (&raw const *of).expose_provenance() as u64
}

pub(crate) fn free(at: u64) -> Result<()> {
    called("cuMemFree_v2", &[at])
}

pub(crate) fn free_async(at: u64) -> Result<()> {
    free_on(at, NULL_STREAM)
}

pub(crate) fn free_host(at: u64) -> Result<()> {
    called("cuMemFreeHost", &[at])
}

pub(crate) fn alloc_async(bytes: usize, stream: Handle) -> Result<u64> {
    put("cuMemAllocAsync", |at| vec![at, bytes as u64, stream])
}

pub(crate) fn free_on(at: u64, stream: Handle) -> Result<()> {
    called("cuMemFreeAsync", &[at, stream])
}

pub(crate) fn alloc_from_pool(bytes: usize, pool: Handle, stream: Handle) -> Result<u64> {
    put("cuMemAllocFromPoolAsync", |at| vec![at, bytes as u64, pool, stream])
}

/// `CUmemAllocationProp` and the front of `CUmemPoolProps`: pinned; on a device, and which.
fn properties_on(ordinal: u32) -> [u64; 18] {
    let mut properties = [0; 18];
    (properties[0], properties[1]) = (1, 1 | u64::from(ordinal) << 32);
    properties
}

/// `CUmemAccessDesc`: a device, its ordinal, read and write.
fn access_of(ordinal: u32) -> [u32; 3] {
    [1, ordinal, 3]
}

pub(crate) fn granularity(ordinal: u32) -> Result<usize> {
    const MINIMUM: u64 = 0;
    let properties = properties_on(ordinal);
    let bytes = put("cuMemGetAllocationGranularity", |bytes| vec![bytes, address(&properties), MINIMUM])?;
    Ok(usize::try_from(bytes).expect("64 bits"))
}

pub(crate) fn create(bytes: usize, ordinal: u32) -> Result<u64> {
    let properties = properties_on(ordinal);
    put("cuMemCreate", |handle| vec![handle, bytes as u64, address(&properties), 0])
}

pub(crate) fn release(handle: u64) -> Result<()> {
    called("cuMemRelease", &[handle])
}

/// Maps a handle of device 0 for device 0.
fn map(handle: u64, bytes: usize) -> Result<u64> {
    let (bytes, access) = (bytes as u64, access_of(0));
    let at = put("cuMemAddressReserve", |at| vec![at, bytes, 0, 0, 0])?;
    called("cuMemMap", &[at, bytes, 0, handle, 0])?;
    called("cuMemSetAccess", &[at, bytes, address(&access), 1])?;
    Ok(at)
}

pub(crate) fn register(host: &mut [u8]) -> Result<()> {
    called("cuMemHostRegister_v2", &[address(host), host.len() as u64, 0])
}

pub(crate) fn unregister(host: &mut [u8]) -> Result<()> {
    called("cuMemHostUnregister", &[address(host)])
}

/// Free bytes of the current context's device.
pub(crate) fn free_memory() -> Result<i64> {
    let mut total = 0_u64;
    let total = (&raw mut total).expose_provenance() as u64;
    put("cuMemGetInfo_v2", |free| vec![free, total]).map(u64::cast_signed)
}

/// The device of an address, as the driver reports it.
pub(crate) fn ordinal_of(at: u64) -> Result<u64> {
    const CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: u64 = 9;
    put("cuPointerGetAttribute", |ordinal| vec![ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at])
}

pub(crate) fn stream() -> Result<Handle> {
    const CU_STREAM_NON_BLOCKING: u64 = 1;
    put("cuStreamCreate", |stream| vec![stream, CU_STREAM_NON_BLOCKING])
}

pub(crate) fn stream_destroy(stream: Handle) -> Result<()> {
    called("cuStreamDestroy_v2", &[stream])
}

pub(crate) fn synchronize(stream: Handle) -> Result<()> {
    called("cuStreamSynchronize", &[stream])
}

pub(crate) fn default_pool(ordinal: u32) -> Result<Handle> {
    put("cuDeviceGetDefaultMemPool", |pool| vec![pool, ordinal.into()])
}

/// How much the default pool keeps when nothing of it is in use.
pub(crate) fn keep_pool(ordinal: u32, bytes: u64) -> Result<()> {
    const CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: u64 = 4;
    let pool = default_pool(ordinal)?;
    called("cuMemPoolSetAttribute", &[pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, address(&bytes)])?;
    called("cuMemPoolTrimTo", &[pool, 0])
}

pub(crate) fn pool_create(ordinal: u32) -> Result<Handle> {
    let properties = properties_on(ordinal);
    put("cuMemPoolCreate", |pool| vec![pool, address(&properties)])
}

pub(crate) fn pool_destroy(pool: Handle) -> Result<()> {
    called("cuMemPoolDestroy", &[pool])
}

/// Lets a device at a pool.
pub(crate) fn pool_access(pool: Handle, ordinal: u32) -> Result<()> {
    called("cuMemPoolSetAccess", &[pool, address(&access_of(ordinal)), 1])
}

pub(crate) fn can_access(from: u32, to: u32) -> Result<bool> {
    put("cuDeviceCanAccessPeer", |can| vec![can, from.into(), to.into()]).map(|can| can != 0)
}

pub(crate) fn copy_peer(to: (u64, Context), from: (u64, Context), bytes: usize) -> Result<()> {
    called("cuMemcpyPeer", &[to.0, to.1.0, from.0, from.1.0, bytes as u64])
}

pub(crate) fn init() -> Result<()> {
    called("cuInit", &[0])
}

/// Gives back the one reference that [`Context::primary`] took.
pub(crate) fn primary_release(ordinal: u32) -> Result<()> {
    called("cuDevicePrimaryCtxRelease_v2", &[ordinal.into()])
}

pub(crate) fn primary_reset(ordinal: u32) -> Result<()> {
    called("cuDevicePrimaryCtxReset_v2", &[ordinal.into()])
}

/// A `CUcontext`, as a number: it may be used by any thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context(u64);

impl Context {
    /// A device's primary context, retained once and for ever.
    pub(crate) fn primary(ordinal: u32) -> Result<Self> {
        static RETAINED: Mutex<Option<HashMap<u32, Context>>> = Mutex::new(None);
        let mut retained = RETAINED.lock().unwrap_or_else(PoisonError::into_inner);
        let retained = retained.get_or_insert_default();
        if let Some(context) = retained.get(&ordinal) {
            return Ok(*context);
        }
        init()?;
        let context = Self(put("cuDevicePrimaryCtxRetain", |context| vec![context, ordinal.into()])?);
        retained.insert(ordinal, context);
        Ok(context)
    }

    /// A context beside the primary one, current on this thread.
    pub(crate) fn create(ordinal: u32) -> Result<Self> {
        put("cuCtxCreate_v2", |context| vec![context, 0, ordinal.into()]).map(Self)
    }

    pub(crate) fn make_current(self) {
        done("cuCtxSetCurrent", &[self.0]);
    }

    /// Lets the current context at the memory of another.
    pub(crate) fn enable_peer(self, other: Self) -> Result<()> {
        self.make_current();
        called("cuCtxEnablePeerAccess", &[other.0, 0])
    }

    pub(crate) fn destroy(self) -> Result<()> {
        called("cuCtxDestroy_v2", &[self.0])
    }
}

//! Allocates memory in each way, through the driver's functions.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use gpumem_tests::driver::{call_for_output, call_ok, try_call_for_output};

/// The `CUresult` of a call that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CudaError(i32);

/// Calls a function of the driver. Returns the value that it writes to its out-parameter.
fn output_of(function: &str, arguments: impl FnOnce(u64) -> Vec<u64>) -> Result<u64, CudaError> {
    match try_call_for_output(function, arguments) {
        (0, out) => Ok(out),
        (code, _) => Err(CudaError(code)),
    }
}

/// A stream or a pool of the driver.
pub(crate) type Handle = u64;

pub(crate) const NULL_STREAM: Handle = 0;

/// A way to allocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Plain,
    Pitched,
    Array,
    /// Allocates on the null stream.
    Async,
    Managed,
    Pinned,
    /// Creates memory and maps it. To free it, unmaps it and then releases it.
    Vmm,
    /// Creates memory, maps it and releases it at once, so that only the mapping keeps it.
    VmmReleasedEarly,
    /// Allocates on this stream.
    On(Handle),
    /// Allocates from this pool, on this stream.
    FromPool(Handle, Handle),
    /// Creates memory that other processes can import, and does not map it.
    Exportable,
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
            Self::Async | Self::On(_) => "cuMemAllocAsync",
            Self::FromPool(..) => "cuMemAllocFromPoolAsync",
            Self::Managed => "cuMemAllocManaged",
            Self::Pinned => "cuMemAllocHost",
            Self::Vmm | Self::VmmReleasedEarly | Self::Exportable => "cuMemCreate",
        }
    }
}

/// A block. Dropping this value does not free the block, because the block's context may have ended before.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) way: Way,
    /// The address, the array or the handle.
    name: u64,
    bytes: usize,
    /// The address at which the memory is mapped; 0 if it is not mapped.
    mapped: u64,
}

impl Block {
    pub(crate) fn name(&self) -> u64 {
        self.name
    }

    /// Returns the bytes that a trace counts for the block.
    pub(crate) fn counted(&self) -> i64 {
        match self.way {
            Way::Managed | Way::Pinned => 0,
            _ => i64::try_from(self.bytes).expect("it fits into memory"),
        }
    }
}

pub(crate) fn allocate(way: Way, bytes: usize) -> Result<Block, CudaError> {
    let block = |name, bytes| Ok(Block { way, name, bytes, mapped: 0 });
    let size = bytes as u64;
    match way {
        Way::Plain => block(output_of("cuMemAlloc_v2", |at| vec![at, size])?, bytes),
        Way::Pitched => {
            let width = bytes.clamp(1, 1000);
            let height = bytes.div_ceil(width);
            let mut pitch = 0_u64;
            let pitch_at = (&raw mut pitch).expose_provenance() as u64;
            let arguments = |at| vec![at, pitch_at, width as u64, height as u64, 4];
            let at = output_of("cuMemAllocPitch_v2", arguments)?;
            block(at, usize::try_from(pitch).expect("64 bits") * height)
        }
        Way::Array => {
            const FLOAT: u64 = 0x20;
            let floats = bytes.div_ceil(4);
            let width = floats.clamp(1, 1024);
            let height = floats.div_ceil(width);
            // This is a `CUDA_ARRAY_DESCRIPTOR`: width, height, format and one channel.
            let descriptor = [width as u64, height as u64, FLOAT | 1 << 32];
            block(output_of("cuArrayCreate_v2", |array| vec![array, address(&descriptor)])?, width * height * 4)
        }
        Way::Async => block(output_of("cuMemAllocAsync", |at| vec![at, size, NULL_STREAM])?, bytes),
        Way::On(stream) => block(output_of("cuMemAllocAsync", |at| vec![at, size, stream])?, bytes),
        Way::FromPool(pool, stream) => {
            block(output_of("cuMemAllocFromPoolAsync", |at| vec![at, size, pool, stream])?, bytes)
        }
        Way::Exportable => {
            const CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: u64 = 1 << 32;
            let bytes = bytes.next_multiple_of(usize::try_from(granularity(0)).expect("64 bits"));
            let mut properties = properties_on(0);
            properties[0] |= CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
            block(output_of("cuMemCreate", |handle| vec![handle, bytes as u64, address(&properties), 0])?, bytes)
        }
        Way::Managed => {
            const CU_MEM_ATTACH_GLOBAL: u64 = 1;
            block(output_of("cuMemAllocManaged", |at| vec![at, size, CU_MEM_ATTACH_GLOBAL])?, bytes)
        }
        Way::Pinned => block(output_of("cuMemAllocHost_v2", |host| vec![host, size])?, bytes),
        Way::Vmm | Way::VmmReleasedEarly => {
            let bytes = bytes.next_multiple_of(usize::try_from(granularity(0)).expect("64 bits"));
            let (size, properties, access) = (bytes as u64, properties_on(0), access_of(0));
            let name = output_of("cuMemCreate", |handle| vec![handle, size, address(&properties), 0])?;
            let mapped = call_for_output("cuMemAddressReserve", |at| vec![at, size, 0, 0, 0]);
            call_ok("cuMemMap", &[mapped, size, 0, name, 0]);
            call_ok("cuMemSetAccess", &[mapped, size, address(&access), 1]);
            if way == Way::VmmReleasedEarly {
                call_ok("cuMemRelease", &[name]);
            }
            Ok(Block { way, name, bytes, mapped })
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "a block is given back once")]
pub(crate) fn free_block(block: Block) {
    let Block { way, name, bytes, mapped } = block;
    match way {
        Way::Plain | Way::Pitched | Way::Managed => call_ok("cuMemFree_v2", &[name]),
        Way::Async => call_ok("cuMemFreeAsync", &[name, NULL_STREAM]),
        Way::On(stream) | Way::FromPool(_, stream) => call_ok("cuMemFreeAsync", &[name, stream]),
        Way::Exportable => call_ok("cuMemRelease", &[name]),
        Way::Pinned => call_ok("cuMemFreeHost", &[name]),
        Way::Array => call_ok("cuArrayDestroy", &[name]),
        Way::Vmm | Way::VmmReleasedEarly => {
            call_ok("cuMemUnmap", &[mapped, bytes as u64]);
            call_ok("cuMemAddressFree", &[mapped, bytes as u64]);
            if way == Way::Vmm {
                call_ok("cuMemRelease", &[name]);
            }
        }
    }
}

pub(crate) fn address<T: ?Sized>(of: &T) -> u64 {
    (&raw const *of).expose_provenance() as u64
}

/// Returns a `CUmemAllocationProp` for pinned memory on this device. A `CUmemPoolProps` starts with the same fields.
pub(crate) fn properties_on(ordinal: u32) -> [u64; 18] {
    let mut properties = [0; 18];
    (properties[0], properties[1]) = (1, 1 | u64::from(ordinal) << 32);
    properties
}

/// Returns a `CUmemAccessDesc`: the device may read and write.
pub(crate) fn access_of(ordinal: u32) -> [u32; 3] {
    [1, ordinal, 3]
}

pub(crate) fn granularity(ordinal: u32) -> u64 {
    const MINIMUM: u64 = 0;
    let properties = properties_on(ordinal);
    call_for_output("cuMemGetAllocationGranularity", |bytes| vec![bytes, address(&properties), MINIMUM])
}

pub(crate) fn stream() -> Handle {
    const CU_STREAM_NON_BLOCKING: u64 = 1;
    call_for_output("cuStreamCreate", |stream| vec![stream, CU_STREAM_NON_BLOCKING])
}

pub(crate) fn default_pool(ordinal: u32) -> Handle {
    call_for_output("cuDeviceGetDefaultMemPool", |pool| vec![pool, ordinal.into()])
}

pub(crate) fn pool_create(ordinal: u32) -> Handle {
    let properties = properties_on(ordinal);
    call_for_output("cuMemPoolCreate", |pool| vec![pool, address(&properties)])
}

/// Sets how much the default pool keeps while none of it is in use.
pub(crate) fn keep_pool(ordinal: u32, bytes: u64) {
    const CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: u64 = 4;
    let pool = default_pool(ordinal);
    call_ok("cuMemPoolSetAttribute", &[pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, address(&bytes)]);
    call_ok("cuMemPoolTrimTo", &[pool, 0]);
}

/// A `CUcontext`, as a number, because any thread may use it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context(pub(crate) u64);

impl Context {
    /// Retains a device's primary context for ever.
    pub(crate) fn primary(ordinal: u32) -> Self {
        static RETAINED: Mutex<Option<HashMap<u32, Context>>> = Mutex::new(None);
        let mut retained = RETAINED.lock().unwrap_or_else(PoisonError::into_inner);
        *retained.get_or_insert_default().entry(ordinal).or_insert_with(|| {
            call_ok("cuInit", &[0]);
            Self(call_for_output("cuDevicePrimaryCtxRetain", |context| vec![context, ordinal.into()]))
        })
    }

    /// Creates a context in addition to the primary one, and makes it current on this thread.
    pub(crate) fn create(ordinal: u32) -> Self {
        Self(call_for_output("cuCtxCreate_v2", |context| vec![context, 0, ordinal.into()]))
    }

    pub(crate) fn make_current(self) {
        call_ok("cuCtxSetCurrent", &[self.0]);
    }

    pub(crate) fn destroy(self) {
        call_ok("cuCtxDestroy_v2", &[self.0]);
    }
}

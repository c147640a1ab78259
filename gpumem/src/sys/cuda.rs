//! The CUDA driver through cudarc's `result` calls: device numbers, the current device, pools.
//!
//! Nothing here creates a context but [`preload`], nothing synchronises but [`trim`], and the calling thread's current
//! context is afterwards what it was before.

use std::ffi::c_int;

use cudarc::driver::{
    result::{self, DriverError},
    sys,
};
use once_cell::sync::OnceCell;

#[cfg(any(feature = "cupti", feature = "dispatch"))]
use super::calls::unheard;
use super::dl;
use crate::error::{Error, Kind};

pub(super) const LIBRARY: &str = "libcuda";
const NAMES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };

/// Every function that is called below: one that is missing is an error here and would be a panic in cudarc.
const SYMBOLS: &[&str] = &[
    "cuInit",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDeviceGetDefaultMemPool",
    "cuDeviceGetMemPool",
    "cuDevicePrimaryCtxGetState",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSynchronize",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemGetAddressRange_v2",
    "cuMemGetInfo_v2",
    "cuMemMap",
    "cuMemPoolGetAttribute",
    "cuMemPoolSetAttribute",
    "cuMemPoolTrimTo",
    "cuMemRelease",
    "cuMemUnmap",
    "cuPointerGetAttribute",
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
];

/// One CUDA device, and the proof that the driver is loaded and initialised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CudaDevice {
    device: sys::CUdevice,
    pub(crate) ordinal: u32,
    pub(crate) uuid: [u8; 16],
}

/// Loads the driver without initialising it, and makes sure that it has every function that is called here.
pub(super) fn load() -> Result<(), Error> {
    static LOADED: OnceCell<Result<(), Error>> = OnceCell::new();
    LOADED.get_or_init(|| dl::load(LIBRARY, NAMES, SYMBOLS)).clone()
}

/// Loads and initialises the driver once and lists its devices, which are fixed from then on.
#[doc(alias("cuInit", "cuDeviceGetCount", "cuDeviceGetUuid_v2"))]
pub(crate) fn devices() -> Result<&'static [CudaDevice], Error> {
    static DEVICES: OnceCell<Result<Vec<CudaDevice>, Error>> = OnceCell::new();
    let devices = DEVICES.get_or_init(|| {
        load()?;
        match result::init() {
            Ok(()) => {}
            Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => return Ok(Vec::new()),
            Err(error) => return Err(told("cuInit", error, None)),
        }
        let count = result::device::get_count().map_err(|error| told("cuDeviceGetCount", error, None))?;
        (0..count).map(device).collect()
    });
    devices.as_deref().map_err(Clone::clone)
}

fn device(number: c_int) -> Result<CudaDevice, Error> {
    let ordinal = number.unsigned_abs();
    let device = result::device::get(number).map_err(|error| told("cuDeviceGet", error, Some(ordinal)))?;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the driver is initialised, `device` came from it, and `uuid` is a live out-parameter of the bound type.
    // Version 2 tells the UUID of the MIG slice where there is one, version 1 that of the card around it.
    unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) }
        .result()
        .map_err(|error| told("cuDeviceGetUuid_v2", error, Some(ordinal)))?;
    let uuid = uuid.bytes.map(|byte| byte.to_ne_bytes()[0]);
    Ok(CudaDevice { device, ordinal, uuid })
}

/// The ordinal of the calling thread's current context, or `None` if it has none.
#[doc(alias("cuCtxGetCurrent", "cuCtxGetDevice"))]
pub(crate) fn current() -> Result<Option<u32>, Error> {
    let devices = devices()?;
    let Some(device) = current_device()? else { return Ok(None) };
    Ok(devices.iter().find(|known| known.device == device).map(|known| known.ordinal))
}

fn current_device() -> Result<Option<sys::CUdevice>, Error> {
    if result::ctx::get_current().map_err(|error| told("cuCtxGetCurrent", error, None))?.is_none() {
        return Ok(None);
    }
    let mut device = 0;
    // SAFETY: the driver is initialised and the out-parameter is a live `CUdevice`.
    unsafe { sys::cuCtxGetDevice(&raw mut device) }.result().map_err(|error| told("cuCtxGetDevice", error, None))?;
    Ok(Some(device))
}

/// The calling thread's current context, if it has one. May be called within a call of the driver that was intercepted.
#[doc(alias = "cuCtxGetCurrent")]
#[cfg(feature = "dispatch")]
pub(crate) fn current_context() -> Option<usize> {
    result::ctx::get_current().ok().flatten().map(<*mut _>::addr)
}

/// The device of the current context, and a number that no other context of the process has; 0 where the driver is older
/// than 12.0.
#[doc(alias("cuCtxGetDevice", "cuCtxGetId"))]
#[cfg(feature = "dispatch")]
pub(crate) fn identify_context() -> Option<(u32, u64)> {
    let device = u32::try_from(current_device().ok()??).ok()?;
    let mut uid = 0;
    if let Some(get) = ctx_get_id() {
        // SAFETY: null stands for the current context, and the out-parameter is live.
        unsafe { get(std::ptr::null_mut(), &raw mut uid) };
    }
    Some((device, uid))
}

/// Whether a stream is being captured, or was until something broke the capture. To ask is legal meanwhile.
#[doc(alias = "cuStreamIsCapturing")]
#[cfg(any(feature = "cupti", feature = "dispatch"))]
pub(crate) fn is_capturing(stream: u64) -> Option<bool> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let stream = std::ptr::with_exposed_provenance_mut(usize::try_from(stream).ok()?);
    // SAFETY: the stream is one that the program has just used in a call which succeeded; the out-parameter is live.
    unsafe { sys::cuStreamIsCapturing(stream, &raw mut status) }.result().ok()?;
    Some(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Loads the driver and finds the functions that not every driver has. A hook must not do this: it takes the loader's lock.
#[cfg(any(feature = "cupti", feature = "dispatch"))]
pub(crate) fn load_for_hooks() -> Result<(), Error> {
    load()?;
    #[cfg(feature = "dispatch")]
    ctx_get_id();
    get_graph_mem_attribute();
    Ok(())
}

#[cfg(feature = "dispatch")]
type CtxGetId = unsafe extern "C" fn(sys::CUcontext, *mut u64) -> u32;

#[cfg(feature = "dispatch")]
fn ctx_get_id() -> Option<CtxGetId> {
    static FOUND: OnceCell<Option<CtxGetId>> = OnceCell::new();
    // SAFETY: the symbol is the driver's function (from 12.0 on), of this type.
    *FOUND.get_or_init(|| unsafe { dl::symbol(NAMES, c"cuCtxGetId") })
}

#[cfg(any(feature = "cupti", feature = "dispatch"))]
type GetGraphMemAttribute = unsafe extern "C" fn(sys::CUdevice, u32, *mut u64) -> u32;

#[cfg(any(feature = "cupti", feature = "dispatch"))]
fn get_graph_mem_attribute() -> Option<GetGraphMemAttribute> {
    static FOUND: OnceCell<Option<GetGraphMemAttribute>> = OnceCell::new();
    // SAFETY: the symbol is the driver's function (from 11.4 on), of this type.
    *FOUND.get_or_init(|| unsafe { dl::symbol(NAMES, c"cuDeviceGetGraphMemAttribute") })
}

/// What a device has mapped for memory nodes of graphs, in bytes; none where the driver has no such nodes. Legal in every
/// context, in none, and while a stream is being captured.
#[doc(alias("cuDeviceGetGraphMemAttribute", "CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT"))]
#[cfg(any(feature = "cupti", feature = "dispatch"))]
pub(crate) fn graph_memory(ordinal: u32) -> Result<Option<u64>, Error> {
    const CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT: u32 = 0;
    const CUDA_ERROR_NOT_SUPPORTED: u32 = 801;

    let (Some(get), Ok(device)) = (get_graph_mem_attribute(), c_int::try_from(ordinal)) else { return Ok(None) };
    let mut bytes = 0;
    // SAFETY: any number may be asked about, and the attribute is a `cuuint64_t`, as the live out-parameter is.
    match unsafe { get(device, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &raw mut bytes) } {
        0 => Ok(Some(bytes)),
        CUDA_ERROR_NOT_SUPPORTED => Ok(None),
        code => {
            let (call, name) = ("cuDeviceGetGraphMemAttribute", "a CUDA error".to_owned());
            Err(Kind::Call { library: LIBRARY, call, code, name, device: Some(ordinal), fatal: false }.into())
        }
    }
}

/// Whether the device's primary context exists.
#[doc(alias = "cuDevicePrimaryCtxGetState")]
#[cfg(feature = "dispatch")]
pub(super) fn has_primary_context(device: sys::CUdevice) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: any number may be asked about, and both out-parameters are live.
    let asked = unsafe { sys::cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut active) };
    asked.result().is_ok() && active != 0
}

/// The device's primary context, if it exists.
#[cfg(feature = "dispatch")]
pub(super) fn primary_context(device: sys::CUdevice) -> Option<usize> {
    if !has_primary_context(device) {
        return None;
    }
    // SAFETY: the context exists, so that this adds a reference to it and creates none; the same one is given back.
    unsafe {
        let context = result::primary_ctx::retain(device).ok()?;
        let _ = result::primary_ctx::release(device);
        Some(context.addr())
    }
}

/// One allocation as the driver knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) bytes: u64,
    pub(crate) ordinal: u32,
    pub(crate) managed: bool,
    pub(crate) on_host: bool,
}

/// The device of an allocation.
#[doc(alias = "cuPointerGetAttribute")]
pub(crate) fn device_at(address: u64) -> Option<u32> {
    let device = attribute_at(address, sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)?;
    u32::try_from(device).ok()
}

/// An attribute of a block; none where nothing is at this address.
fn attribute_at(address: u64, attribute: sys::CUpointer_attribute) -> Option<u64> {
    let mut value = 0_u64;
    // SAFETY: any address may be asked about. The attributes asked for in this file are at most 64 bits wide; narrower ones are
    // written at the front of a zeroed word.
    unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, address) }.result().ok()?;
    Some(value)
}

/// The number of a live block. Each block has one of its own, and a later block has a higher one, wherever it is: the driver counts
/// them.
#[doc(alias = "CU_POINTER_ATTRIBUTE_BUFFER_ID")]
#[cfg(any(feature = "cupti", feature = "dispatch"))]
pub(crate) fn block_number(address: u64) -> Option<u64> {
    attribute_at(address, sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID)
}

/// A number that all blocks exceed which are allocated after this; none if the calling thread has no context. The driver says the
/// number of a block only, so that one is made and goes: a page of physical memory. Other memory would do as well, but to free it
/// waits for the device, which may wait for what this thread is about to launch.
#[doc(alias("cuMemCreate", "cuMemMap", "cuMemUnmap"))]
#[cfg(any(feature = "cupti", feature = "dispatch"))]
pub(crate) fn next_block_number() -> Option<u64> {
    let device = current_device().ok()??;
    unheard(|| relaxed(|| number_of_a_page(device)))
}

#[cfg(any(feature = "cupti", feature = "dispatch"))]
fn number_of_a_page(device: sys::CUdevice) -> Option<u64> {
    const PAGE: usize = 2 << 20;
    // `CUmemAllocationProp`, which cudarc spells differently for each CUDA version: pinned, not to be shared, on a device.
    let properties: [c_int; 8] = [1, 0, 1, device, 0, 0, 0, 0];
    let (mut page, mut at) = (0, 0);
    // SAFETY: the out-parameters are live, and the properties are as long as the driver reads. The page, the addresses and the
    // mapping are this function's own, and are given back in the order in which the driver wants that.
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

/// Whether a live block of the device's is a graph's: it is in no pool, and was allocated in no context. `None` if nothing is there.
#[doc(alias("CU_POINTER_ATTRIBUTE_CONTEXT", "CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE"))]
#[cfg(any(feature = "cupti", feature = "dispatch"))]
pub(crate) fn is_of_a_graph(address: u64) -> Option<bool> {
    use sys::CUpointer_attribute as Attribute;

    const CU_MEMORYTYPE_DEVICE: u64 = 2;
    let is_nowhere = |attribute| attribute_at(address, attribute) == Some(0);
    let kind = attribute_at(address, Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)?;
    let nowhere = [Attribute::CU_POINTER_ATTRIBUTE_CONTEXT, Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE];
    Some(kind == CU_MEMORYTYPE_DEVICE && nowhere.into_iter().all(is_nowhere))
}

/// Makes calls that break a capture which is under way, in this thread or another, unless the thread says that it knows what it
/// does: none of them is about a stream that is captured.
#[doc(alias = "cuThreadExchangeStreamCaptureMode")]
fn relaxed<T>(calls: impl FnOnce() -> T) -> T {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the parameter is live, and is the thread's earlier mode after the call.
    let exchange = |mode: &mut _| unsafe { sys::cuThreadExchangeStreamCaptureMode(mode) }.result().is_ok();
    let exchanged = exchange(&mut mode);
    let done = calls();
    if exchanged {
        exchange(&mut mode);
    }
    done
}

/// The allocation that begins at an address, if the driver knows one.
#[doc(alias("cuMemGetAddressRange", "cuPointerGetAttribute"))]
pub(crate) fn range_at(address: u64) -> Option<Range> {
    use sys::CUpointer_attribute as Attribute;

    const CU_MEMORYTYPE_HOST: u64 = 1;
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: any address may be asked for, and both out-parameters are live.
    unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, address) }.result().ok()?;
    let attribute = |attribute| attribute_at(address, attribute);
    Some(Range {
        bytes: (base == address).then_some(bytes as u64)?,
        ordinal: device_at(address)?,
        managed: attribute(Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED)? != 0,
        on_host: attribute(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)? == CU_MEMORYTYPE_HOST,
    })
}

/// A high-water mark of a stream-ordered pool, which can be made to begin anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoolMark {
    /// Of what is in the hands of the program.
    Used,
    /// Of what was taken from the device.
    Reserved,
}

/// What the driver counts of one stream-ordered pool, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolFigures {
    /// The pool's handle, to tell it from another.
    pub(crate) pool: u64,
    pub(crate) used: u64,
    pub(crate) used_high: u64,
    pub(crate) reserved: u64,
    pub(crate) reserved_high: u64,
}

impl CudaDevice {
    #[doc(alias = "cuDeviceGetName")]
    pub(crate) fn name(self) -> Result<String, Error> {
        result::device::get_name(self.device).map_err(self.told("cuDeviceGetName"))
    }

    /// Free and total bytes, or `None` where the device has no context to ask in.
    #[doc(alias = "cuMemGetInfo")]
    pub(crate) fn mem_get_info(self) -> Result<Option<(u64, u64)>, Error> {
        self.in_context(|| {
            let (free, total) = result::mem_get_info().map_err(self.told("cuMemGetInfo_v2"))?;
            Ok((free as u64, total as u64))
        })
    }

    /// Waits for the device, then gives the unused memory of its stream-ordered pools back. Without a context there is
    /// none. The other order would recover nothing: what was freed on a stream returns at the next synchronisation.
    #[doc(alias("cuCtxSynchronize", "cuMemPoolTrimTo"))]
    pub(crate) fn trim(self) -> Result<(), Error> {
        let trimmed = self.in_context(|| {
            refuse_capture().map_err(self.told("cuStreamIsCapturing"))?;
            result::ctx::synchronize().map_err(self.told("cuCtxSynchronize"))?;
            // SAFETY: the device came from the driver, which is initialised.
            let pools = unsafe {
                [result::device::get_default_mem_pool(self.device), result::device::get_mem_pool(self.device)]
            };
            for pool in pools {
                let pool = match pool {
                    Ok(pool) => pool,
                    // A device without pools (some virtual GPUs) has nothing to give back.
                    Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED)) => continue,
                    Err(error) => return Err(told("cuDeviceGetMemPool", error, Some(self.ordinal))),
                };
                // SAFETY: the pool is the device's own: the default pool lives as long as the driver, and the current
                // one is kept alive by the device that it is current on.
                unsafe { result::mem_pool::trim_to(pool, 0) }.map_err(self.told("cuMemPoolTrimTo"))?;
            }
            Ok(())
        });
        trimmed.map(|_| ())
    }

    /// The figures of the device's current pool, which is what `cuMemAllocAsync` takes from: the high marks first. `reset`
    /// has one mark begin anew as soon as it is read, from what is then in use, or held.
    #[doc(alias(
        "cuMemPoolGetAttribute",
        "cuMemPoolSetAttribute",
        "CU_MEMPOOL_ATTR_USED_MEM_HIGH",
        "CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH"
    ))]
    pub(crate) fn read_pool(self, reset: Option<PoolMark>) -> Result<PoolFigures, Error> {
        // SAFETY: the device came from the driver, which is initialised.
        let pool = unsafe { result::device::get_mem_pool(self.device) }.map_err(|error| match error {
            DriverError(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED) => {
                let why = "the device has no stream-ordered pools; use another gauge";
                Kind::NoGauge { gauge: "pool", why }.into()
            }
            error => told("cuDeviceGetMemPool", error, Some(self.ordinal)),
        })?;
        relaxed(|| self.read_figures(pool, reset))
    }

    fn read_figures(self, pool: sys::CUmemoryPool, reset: Option<PoolMark>) -> Result<PoolFigures, Error> {
        use sys::CUmemPool_attribute as Attribute;

        let figure = |attribute| {
            let mut bytes = 0_u64;
            // SAFETY: the four attributes below are `cuuint64_t`, as the live out-parameter is. The pool is alive: the driver
            // just named it as the device's current one, and a program that destroys that one while other threads may
            // allocate from it has the same race with its own `cuMemAllocAsync`.
            unsafe { result::mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast()) }
                .map_err(self.told("cuMemPoolGetAttribute"))?;
            Ok::<_, Error>(bytes)
        };
        let reserved_high = figure(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?;
        let used_high = figure(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?;
        if let Some(reset) = reset {
            let mark = match reset {
                PoolMark::Used => Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
                PoolMark::Reserved => Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
            };
            let mut zero = 0_u64;
            // SAFETY: as above. 0 is the one value that these attributes take.
            unsafe { result::mem_pool::set_attribute(pool, mark, (&raw mut zero).cast()) }
                .map_err(self.told("cuMemPoolSetAttribute"))?;
        }
        let used = figure(Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
        let reserved = figure(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
        Ok(PoolFigures { pool: pool.addr() as u64, used, used_high, reserved, reserved_high })
    }

    /// Creates the device's primary context, if there is none, and keeps it for the life of the process.
    #[doc(alias = "cuDevicePrimaryCtxRetain")]
    pub(crate) fn preload(self) -> Result<(), Error> {
        // SAFETY: the device came from the driver. The reference is never released: that is the purpose.
        unsafe { result::primary_ctx::retain(self.device) }.map(|_| ()).map_err(self.told("cuDevicePrimaryCtxRetain"))
    }

    /// Runs `action` with a context of this device current, without creating one: the calling thread's own context if
    /// it is on this device, else the primary context if it is active. `None` where there is neither.
    fn in_context<T>(self, action: impl FnOnce() -> Result<T, Error>) -> Result<Option<T>, Error> {
        if current_device()? == Some(self.device) {
            return action().map(Some);
        }
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the device came from the driver, and both out-parameters are live integers of the bound types.
        unsafe { sys::cuDevicePrimaryCtxGetState(self.device, &raw mut flags, &raw mut active) }
            .result()
            .map_err(self.told("cuDevicePrimaryCtxGetState"))?;
        if active == 0 {
            return Ok(None);
        }
        let _held = Pushed::primary(self)?;
        action().map(Some)
    }

    fn told(self, call: &'static str) -> impl Fn(DriverError) -> Error {
        move |error| told(call, error, Some(self.ordinal))
    }
}

/// The primary context of a device, retained and current until this is dropped.
struct Pushed(sys::CUdevice);

impl Pushed {
    fn primary(of: CudaDevice) -> Result<Self, Error> {
        // SAFETY: the device came from the driver; the reference taken here is released by `Drop`, or below.
        let context = unsafe { result::primary_ctx::retain(of.device) }.map_err(of.told("cuDevicePrimaryCtxRetain"))?;
        // SAFETY: the context is alive, since it was just retained.
        if let Err(error) = unsafe { sys::cuCtxPushCurrent_v2(context) }.result() {
            // SAFETY: this gives back the reference taken above and no other.
            let _ = unsafe { result::primary_ctx::release(of.device) };
            return Err(told("cuCtxPushCurrent_v2", error, Some(of.ordinal)));
        }
        Ok(Self(of.device))
    }
}

impl Drop for Pushed {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: the context on top of this thread's stack is the one that was pushed: nothing between changes the
        // stack. The out-parameter is live. The reference that is released is the one taken with it; errors are those
        // of earlier work, which the user's own next call reports.
        unsafe {
            let _ = sys::cuCtxPopCurrent_v2(&raw mut popped).result();
            let _ = result::primary_ctx::release(self.0);
        }
    }
}

/// An error while a stream of the current context is being captured, as far as CUDA lets us ask without breaking the
/// capture: synchronising would invalidate it.
fn refuse_capture() -> Result<(), DriverError> {
    // SAFETY: the null stream exists in every context, and a context is current.
    let status = unsafe { result::stream::is_capturing(result::stream::null()) }?;
    if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
        Ok(())
    } else {
        Err(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED))
    }
}

fn told(call: &'static str, error: DriverError, device: Option<u32>) -> Error {
    use sys::CUresult as Code;

    let name = error.error_name().map_or_else(|_| "an unknown CUDA error".into(), |name| name.to_string_lossy());
    let fatal = matches!(
        error.0,
        Code::CUDA_ERROR_NO_DEVICE
            | Code::CUDA_ERROR_NOT_INITIALIZED
            | Code::CUDA_ERROR_STUB_LIBRARY
            | Code::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
            | Code::CUDA_ERROR_SYSTEM_NOT_READY
            | Code::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
            | Code::CUDA_ERROR_NOT_PERMITTED
            | Code::CUDA_ERROR_UNKNOWN
    );
    Kind::Call { library: LIBRARY, call, code: error.0 as u32, name: name.into_owned(), device, fatal }.into()
}

//! Loads `libcuda` and checks that it has all functions that are called here.

use cudarc::driver::sys;
use once_cell::sync::OnceCell;

use crate::{error::Error, sys::dl};

pub(in crate::sys) const LIBRARY: &str = "libcuda";
pub(super) const NAMES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };

/// Every function that is called in this folder. If one is missing, this library returns an error, whereas cudarc would panic.
const SYMBOLS: &[&str] = &[
    "cuInit",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
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

/// Loads the driver without initializing it. Returns an error if it lacks a function that is called here.
pub(in crate::sys) fn load() -> Result<(), Error> {
    static LOADED: OnceCell<Result<(), Error>> = OnceCell::new();
    LOADED.get_or_init(|| dl::load(LIBRARY, NAMES, SYMBOLS)).clone()
}

pub(super) type CtxGetIdFn = unsafe extern "C" fn(sys::CUcontext, *mut u64) -> u32;

pub(super) fn ctx_get_id() -> Option<CtxGetIdFn> {
    static FOUND: OnceCell<Option<CtxGetIdFn>> = OnceCell::new();
    // SAFETY: the symbol is a function of the driver (12.0 and later) with this signature.
    *FOUND.get_or_init(|| unsafe { dl::symbol(NAMES, c"cuCtxGetId") })
}

pub(super) type GetGraphMemAttributeFn = unsafe extern "C" fn(sys::CUdevice, u32, *mut u64) -> u32;

pub(super) fn get_graph_mem_attribute() -> Option<GetGraphMemAttributeFn> {
    static FOUND: OnceCell<Option<GetGraphMemAttributeFn>> = OnceCell::new();
    // SAFETY: the symbol is a function of the driver (11.4 and later) with this signature.
    *FOUND.get_or_init(|| unsafe { dl::symbol(NAMES, c"cuDeviceGetGraphMemAttribute") })
}

//! The devices and their properties.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicU8, Ordering::Relaxed},
};

use cudarc::driver::{
    result::{self, DriverError},
    sys,
};
use once_cell::sync::OnceCell;

use super::{
    card::{on_card, own},
    context::current_device,
    failure::call_failed,
    library::load,
};
use crate::error::Error;

/// A CUDA device. It also proves that the driver is loaded and initialized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CudaDevice {
    pub(super) device: sys::CUdevice,
    pub(crate) ordinal: u32,
    uuid: [u8; 16],
}

/// Returns the devices. The first call loads and initializes the driver; the list does not change after that.
#[doc(alias("cuInit", "cuDeviceGetCount", "cuDeviceGetUuid_v2"))]
pub(crate) fn devices() -> Result<&'static [CudaDevice], Error> {
    static DEVICES: OnceCell<Result<Vec<CudaDevice>, Error>> = OnceCell::new();
    let devices = DEVICES.get_or_init(|| {
        load()?;
        match result::init() {
            Ok(()) => {}
            Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => return Ok(Vec::new()),
            Err(error) => return Err(call_failed("cuInit", error, None)),
        }
        initialised_devices()
    });
    devices.as_deref().map_err(Clone::clone)
}

/// Returns the devices if the program has already initialized the driver, or else an error. The driver must be loaded.
pub(crate) fn initialised_devices() -> Result<Vec<CudaDevice>, Error> {
    own(|| {
        let count = result::device::get_count().map_err(|error| call_failed("cuDeviceGetCount", error, None))?;
        (0..count).map(device).collect()
    })
}

fn device(number: c_int) -> Result<CudaDevice, Error> {
    let ordinal = number.unsigned_abs();
    let device = result::device::get(number).map_err(|error| call_failed("cuDeviceGet", error, Some(ordinal)))?;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the driver is initialized, `device` came from it, and `uuid` is a live out-parameter of the bound type.
    // For a MIG slice, version 2 returns the UUID of the slice; version 1 returns the UUID of the whole GPU.
    unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) }
        .result()
        .map_err(|error| call_failed("cuDeviceGetUuid_v2", error, Some(ordinal)))?;
    let uuid = uuid.bytes.map(|byte| byte.to_ne_bytes()[0]);
    // The result is cached, so that hooks need not query the driver.
    is_integrated(ordinal);
    Ok(CudaDevice { device, ordinal, uuid })
}

/// Returns whether a device uses the machine's memory because it does not have its own. The driver is queried once for each device, which
/// it allows at any time, so hooks and callbacks may call this in programs into which gpumem is injected. Returns false if the driver
/// returns an error. The driver must be loaded.
#[doc(alias = "CU_DEVICE_ATTRIBUTE_INTEGRATED")]
pub(crate) fn is_integrated(ordinal: u32) -> bool {
    const MOST: usize = 64;
    /// 0 before the driver was queried, 1 if the device has its own memory, and 2 if it does not.
    static KNOWN: [AtomicU8; MOST] = [const { AtomicU8::new(0) }; MOST];
    let Some(known) = KNOWN.get(ordinal as usize) else { return false };
    if known.load(Relaxed) == 0 {
        let mut integrated = 0;
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED;
        // SAFETY: the out-parameter is live. The driver returns an error for a number that is not a device, and for every call before its
        // initialization.
        let answer = unsafe { sys::cuDeviceGetAttribute(&raw mut integrated, attribute, ordinal.cast_signed()) };
        if answer.result().is_err() {
            return false;
        }
        known.store(if integrated == 0 { 1 } else { 2 }, Relaxed);
    }
    known.load(Relaxed) == 2
}

/// Returns the ordinal of the calling thread's current device, or `None` if the thread has no context.
#[doc(alias = "cuCtxGetDevice")]
pub(crate) fn current() -> Result<Option<u32>, Error> {
    let devices = devices()?;
    let Some(device) = current_device()? else { return Ok(None) };
    Ok(devices.iter().find(|known| known.device == device).map(|known| known.ordinal))
}

impl CudaDevice {
    /// Returns the UUID without the prefix `GPU-` or `MIG-`: the driver does not tell whether the device is a slice.
    pub(crate) fn uuid(self) -> String {
        format_uuid(self.uuid)
    }

    #[doc(alias = "cuDeviceGetName")]
    pub(crate) fn name(self) -> Result<String, Error> {
        result::device::get_name(self.device).map_err(self.failed("cuDeviceGetName"))
    }

    /// Returns the free and total bytes, or `None` if the device has no context for the query.
    #[doc(alias = "cuMemGetInfo")]
    pub(crate) fn mem_get_info(self) -> Result<Option<(u64, u64)>, Error> {
        self.in_context(|| {
            let (free, total) = result::mem_get_info().map_err(self.failed("cuMemGetInfo_v2"))?;
            Ok((free as u64, total as u64))
        })
    }

    /// Waits for the device and releases the unused memory of its stream-ordered pools. Without a context there is no such memory. The wait
    /// comes first, because memory that was freed on a stream becomes unused only after a synchronization.
    #[doc(alias("cuCtxSynchronize", "cuMemPoolTrimTo"))]
    pub(crate) fn trim(self) -> Result<(), Error> {
        let trimmed = self.in_context(|| {
            reject_capture().map_err(self.failed("cuStreamIsCapturing"))?;
            result::ctx::synchronize().map_err(self.failed("cuCtxSynchronize"))?;
            // SAFETY: the device came from the driver, which is initialized.
            let pools = unsafe {
                [result::device::get_default_mem_pool(self.device), result::device::get_mem_pool(self.device)]
            };
            for pool in pools {
                let pool = match pool {
                    Ok(pool) => pool,
                    // A device without pools, such as some virtual GPUs, has nothing to release.
                    Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED)) => continue,
                    Err(error) => return Err(call_failed("cuDeviceGetMemPool", error, Some(self.ordinal))),
                };
                // SAFETY: the pool is the device's own: the default pool lives as long as the driver, and the current
                // one is kept alive by the device that it is current on.
                unsafe { result::mem_pool::trim_to(pool, 0) }.map_err(self.failed("cuMemPoolTrimTo"))?;
            }
            Ok(())
        });
        trimmed.map(|_| ())
    }

    /// Creates the device's primary context, if it does not exist, and keeps it for the rest of the process.
    #[doc(alias = "cuDevicePrimaryCtxRetain")]
    pub(crate) fn preload(self) -> Result<(), Error> {
        // SAFETY: the device came from the driver. The reference is intentionally never released.
        unsafe { result::primary_ctx::retain(self.device) }.map(|_| ()).map_err(self.failed("cuDevicePrimaryCtxRetain"))
    }

    /// Runs `action` in an existing context of this device: the calling thread's own context if it is on this device, or else the primary
    /// context if it is active. Returns `None` if there is neither.
    fn in_context<T>(self, action: impl FnOnce() -> Result<T, Error>) -> Result<Option<T>, Error> {
        own(|| {
            if current_device()? == Some(self.device) {
                return action().map(Some);
            }
            let (mut flags, mut active) = (0, 0);
            // SAFETY: the device came from the driver, and both out-parameters are live integers of the bound types.
            unsafe { sys::cuDevicePrimaryCtxGetState(self.device, &raw mut flags, &raw mut active) }
                .result()
                .map_err(self.failed("cuDevicePrimaryCtxGetState"))?;
            if active == 0 {
                return Ok(None);
            }
            let _pushed = PushedContext::new(self)?;
            on_card(self.ordinal, action).map(Some)
        })
    }

    pub(super) fn failed(self, call: &'static str) -> impl Fn(DriverError) -> Error {
        move |error| call_failed(call, error, Some(self.ordinal))
    }
}

/// The primary context of a device, which is retained and current until this guard is dropped.
struct PushedContext(sys::CUdevice);

impl PushedContext {
    fn new(of: CudaDevice) -> Result<Self, Error> {
        // SAFETY: the device came from the driver; the reference that this adds is released by `Drop`, or below.
        let context =
            unsafe { result::primary_ctx::retain(of.device) }.map_err(of.failed("cuDevicePrimaryCtxRetain"))?;
        // SAFETY: the context is alive, since it was just retained.
        if let Err(error) = unsafe { sys::cuCtxPushCurrent_v2(context) }.result() {
            // SAFETY: this releases the reference that was added above, and no other.
            let _ = unsafe { result::primary_ctx::release(of.device) };
            return Err(call_failed("cuCtxPushCurrent_v2", error, Some(of.ordinal)));
        }
        Ok(Self(of.device))
    }
}

impl Drop for PushedContext {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: the context on top of this thread's stack is the one that was pushed, because nothing in between changes the
        // stack. The out-parameter is live. The reference that is released is the one that `new` retained. Errors are those of
        // earlier work, which the user's own next call returns as well.
        unsafe {
            let _ = sys::cuCtxPopCurrent_v2(&raw mut popped).result();
            let _ = result::primary_ctx::release(self.0);
        }
    }
}

/// Returns an error if a stream of the current context is being captured, as far as CUDA can tell without breaking the capture. A
/// synchronization would invalidate the capture.
fn reject_capture() -> Result<(), DriverError> {
    // SAFETY: the null stream exists in every context, and a context is current.
    let status = unsafe { result::stream::is_capturing(result::stream::null()) }?;
    if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
        Ok(())
    } else {
        Err(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED))
    }
}

fn format_uuid(uuid: [u8; 16]) -> String {
    use std::fmt::Write;

    uuid.iter().enumerate().fold(String::with_capacity(36), |mut text, (at, byte)| {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_formatted_as_in_nvidia_smi() {
        let uuid = [0x0c, 0xf1, 0x2e, 0xad, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0xa, 0xff];
        assert_eq!(format_uuid(uuid), "0cf12ead-0001-0203-0405-060708090aff");
    }
}

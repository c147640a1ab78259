//! Captures of streams, and the memory of graphs.

use std::ffi::c_int;

use cudarc::driver::sys;

use super::library::{LIBRARY, get_graph_mem_attribute};
use crate::error::{Error, Kind};

/// Returns whether a stream is being captured, including a capture that became invalid and has not been ended. The driver allows this call
/// during a capture.
#[doc(alias = "cuStreamIsCapturing")]
pub(crate) fn is_capturing(stream: u64) -> Option<bool> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let stream = std::ptr::with_exposed_provenance_mut(usize::try_from(stream).ok()?);
    // SAFETY: the program has just used this stream in a call that succeeded; the out-parameter is live.
    unsafe { sys::cuStreamIsCapturing(stream, &raw mut status) }.result().ok()?;
    Some(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Returns the bytes that a device has mapped for memory nodes of graphs, or `None` if the driver does not support such nodes. The driver
/// allows this call in any context, without a context, and during a capture.
#[doc(alias("cuDeviceGetGraphMemAttribute", "CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT"))]
pub(crate) fn graph_memory(ordinal: u32) -> Result<Option<u64>, Error> {
    const CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT: u32 = 0;
    const CUDA_ERROR_NOT_SUPPORTED: u32 = 801;

    let (Some(get), Ok(device)) = (get_graph_mem_attribute(), c_int::try_from(ordinal)) else { return Ok(None) };
    let mut bytes = 0;
    // SAFETY: the driver accepts any number, and the attribute is a `cuuint64_t`, as the live out-parameter is.
    match unsafe { get(device, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &raw mut bytes) } {
        0 => Ok(Some(bytes)),
        CUDA_ERROR_NOT_SUPPORTED => Ok(None),
        code => {
            let (call, name) = ("cuDeviceGetGraphMemAttribute", "a CUDA error".to_owned());
            Err(Kind::Call { library: LIBRARY, call, code, name, device: Some(ordinal), fatal: false }.into())
        }
    }
}

/// Runs driver calls that would invalidate a capture in this or another thread, in the mode that permits them. None of the calls may use a
/// stream that is being captured.
#[doc(alias = "cuThreadExchangeStreamCaptureMode")]
pub(in crate::sys) fn relaxed<T>(calls: impl FnOnce() -> T) -> T {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the parameter is live. The call writes the thread's earlier mode to it.
    let exchange = |mode: &mut _| unsafe { sys::cuThreadExchangeStreamCaptureMode(mode) }.result().is_ok();
    let exchanged = exchange(&mut mode);
    let done = calls();
    if exchanged {
        exchange(&mut mode);
    }
    done
}

//! Errors of driver calls.

use cudarc::driver::{result::DriverError, sys};

use super::library::LIBRARY;
use crate::error::{Error, Kind};

/// Returns the error of a driver call that failed.
pub(super) fn call_failed(call: &'static str, error: DriverError, device: Option<u32>) -> Error {
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

//! Finds and loads `libcupti`, and holds the functions of it that gpumem uses.

use std::{
    ffi::{CStr, c_char},
    path::PathBuf,
    ptr,
};

use libloading::Library;
use once_cell::sync::OnceCell;

use super::abi::{
    CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED, CallbackFn, EnableCallbackFn, GetDeviceIdFn, GetResultStringFn,
    GetVersionFn, SubscribeFn, SubscribeV2Fn, Subscriber, SubscriberParams, UnsubscribeFn,
};
use crate::{
    error::{Error, Kind},
    settings::settings,
    sys::{calls::Context, dl},
};

const LIBRARY: &str = "libcupti";

pub(super) struct Cupti {
    /// The path at which the library was found.
    pub(super) path: String,
    subscribe: SubscribeFn,
    /// `None` before CUPTI 13.
    subscribe_v2: Option<SubscribeV2Fn>,
    pub(super) unsubscribe: UnsubscribeFn,
    pub(super) enable_callback: EnableCallbackFn,
    get_device_id: GetDeviceIdFn,
    get_result_string: GetResultStringFn,
    get_version: Option<GetVersionFn>,
}

/// Returns the library. The first call loads it.
pub(super) fn cupti() -> Result<&'static Cupti, Error> {
    static CUPTI: OnceCell<Result<Cupti, Error>> = OnceCell::new();
    let load = || {
        if settings().is_foreign {
            return Err(Kind::NoLibrary { library: LIBRARY, detail: dl::FOREIGN.to_owned() }.into());
        }
        dl::open(LIBRARY, dl::cupti_paths()).and_then(Cupti::new)
    };
    CUPTI.get_or_init(load).as_ref().map_err(Clone::clone)
}

/// Returns an error if the library is missing, or lacks a needed function.
pub(crate) fn check_available() -> Result<(), Error> {
    cupti().map(|_| ())
}

/// Returns the version of the library's interface, if the library can be used and reports it. For example, 130002 means CUDA 13.0.
#[doc(alias = "cuptiGetVersion")]
pub(crate) fn version() -> Option<u32> {
    let get_version = cupti().ok()?.get_version?;
    let mut version = 0;
    // SAFETY: the function is CUPTI's, with this signature, and the out-parameter is live.
    let code = unsafe { get_version(&raw mut version) };
    (code == 0).then_some(version)
}

/// Returns the CUDA ordinal of a context's device. This asks CUPTI instead of the driver, so callbacks may call it.
#[doc(alias = "cuptiGetDeviceId")]
pub(crate) fn device_of(context: Context) -> Option<u32> {
    let cupti = cupti().ok().filter(|_| context.handle != 0)?;
    let mut device = 0;
    // SAFETY: CUPTI itself has just named this context as the current one, so it is alive; the out-parameter is live.
    let code = unsafe { (cupti.get_device_id)(context.handle, &raw mut device) };
    (code == 0).then_some(device)
}

impl Cupti {
    fn new((library, path): (Library, PathBuf)) -> Result<Self, Error> {
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the symbol is a CUPTI function with the C signature of the field that it is assigned to.
                *unsafe { library.get($name) }.map_err(|_| {
                    let symbol = String::from_utf8_lossy($name).into_owned();
                    Error::from(Kind::NoSymbol { library: LIBRARY, symbol })
                })?
            };
        }
        let cupti = Self {
            path: path.display().to_string(),
            subscribe: symbol!(b"cuptiSubscribe"),
            // SAFETY: as above.
            subscribe_v2: unsafe { library.get(b"cuptiSubscribe_v2") }.ok().map(|symbol| *symbol),
            unsubscribe: symbol!(b"cuptiUnsubscribe"),
            enable_callback: symbol!(b"cuptiEnableCallback"),
            get_device_id: symbol!(b"cuptiGetDeviceId"),
            get_result_string: symbol!(b"cuptiGetResultString"),
            // SAFETY: as above.
            get_version: unsafe { library.get(b"cuptiGetVersion") }.ok().map(|symbol| *symbol),
        };
        // The functions above stay valid, because the library is never unloaded.
        std::mem::forget(library);
        Ok(cupti)
    }

    /// Starts a subscription. If CUPTI allows several subscribers, other tools keep theirs.
    pub(super) fn new_subscriber(&self, callback: CallbackFn) -> Result<Subscriber, Error> {
        let mut subscriber = ptr::null_mut();
        let mut old = [0 as c_char; 128];
        let mut code = None;
        if let Some(subscribe) = self.subscribe_v2 {
            let mut params = SubscriberParams {
                size: size_of::<SubscriberParams>(),
                name: c"gpumem".as_ptr(),
                old_name: old.as_mut_ptr(),
                old_name_size: old.len() - 1,
                allow_multiple: 1,
                padding: [0; 7],
            };
            // SAFETY: the callback keeps CUPTI's contract, no user data is passed, and the parameters and what they
            // point to are live for the call.
            let answer = unsafe { subscribe(&raw mut subscriber, callback, ptr::null_mut(), &raw mut params) };
            if answer == 0 {
                return Ok(subscriber);
            }
            if answer == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED {
                code = Some(answer);
            }
        }
        // If version 2 failed for another reason, version 1 may still succeed.
        // SAFETY: as above.
        let code = code.unwrap_or_else(|| unsafe { (self.subscribe)(&raw mut subscriber, callback, ptr::null_mut()) });
        if code == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED {
            // SAFETY: the array was zeroed and its last byte was not offered to CUPTI, so the string in it is terminated.
            let holder = unsafe { CStr::from_ptr(old.as_ptr()) }.to_string_lossy().into_owned();
            return Err(Kind::Busy { holder }.into());
        }
        self.check("cuptiSubscribe", code).map(|()| subscriber)
    }

    /// Returns an error unless `code` means success.
    pub(super) fn check(&self, call: &'static str, code: u32) -> Result<(), Error> {
        if code == 0 {
            return Ok(());
        }
        let mut name = ptr::null();
        // SAFETY: the out-parameter is live.
        let answer = unsafe { (self.get_result_string)(code, &raw mut name) };
        let name = if answer == 0 && !name.is_null() {
            // SAFETY: CUPTI returned a C string of its own, which it never frees.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        } else {
            "an unknown CUPTI error".to_owned()
        };
        Err(Kind::Call { library: LIBRARY, call, code, name, device: None, fatal: true }.into())
    }
}

//! The numbers, structs and function types that CUPTI's headers define.

use std::ffi::{c_char, c_void};

pub(super) const DOMAIN_DRIVER_API: u32 = 1;
pub(super) const DOMAIN_RESOURCE: u32 = 3;
pub(super) const RESOURCE_CONTEXT_DESTROY_STARTING: u32 = 2;
/// `CUPTI_API_ENTER`: the callback is called before the driver call.
pub(super) const API_ENTER: u32 = 0;
pub(super) const CUPTI_ERROR_INVALID_PARAMETER: u32 = 1;
pub(super) const CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED: u32 = 39;

/// `CUpti_CallbackData`
#[repr(C)]
pub(super) struct CallbackData {
    /// `callbackSite`
    pub(super) side: u32,
    pub(super) function_name: *const c_char,
    pub(super) function_params: *const u64,
    pub(super) function_return_value: *const u32,
    pub(super) symbol_name: *const c_char,
    pub(super) context: usize,
    pub(super) context_uid: u32,
    pub(super) correlation_data: *mut u64,
    pub(super) correlation_id: u32,
}

/// `CUpti_ResourceData`
#[repr(C)]
pub(super) struct ResourceData {
    pub(super) context: usize,
    pub(super) resource: *const c_void,
    pub(super) descriptor: *const c_void,
}

/// `CUpti_SubscriberParams` of CUPTI 13.2. In older versions the struct ends before `allow_multiple`.
#[repr(C)]
pub(super) struct SubscriberParams {
    pub(super) size: usize,
    pub(super) name: *const c_char,
    pub(super) old_name: *mut c_char,
    pub(super) old_name_size: usize,
    pub(super) allow_multiple: u8,
    pub(super) padding: [u8; 7],
}

#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<CallbackData>() == 72);
    assert!(std::mem::offset_of!(CallbackData, function_params) == 16);
    assert!(std::mem::offset_of!(CallbackData, context) == 40);
    assert!(std::mem::offset_of!(CallbackData, correlation_data) == 56);
    assert!(size_of::<SubscriberParams>() == 40);
};

pub(super) type Subscriber = *mut c_void;
pub(super) type CallbackFn = unsafe extern "C" fn(*mut c_void, u32, u32, *const c_void);
pub(super) type SubscribeFn = unsafe extern "C" fn(*mut Subscriber, CallbackFn, *mut c_void) -> u32;
pub(super) type SubscribeV2Fn =
    unsafe extern "C" fn(*mut Subscriber, CallbackFn, *mut c_void, *mut SubscriberParams) -> u32;
pub(super) type UnsubscribeFn = unsafe extern "C" fn(Subscriber) -> u32;
pub(super) type EnableCallbackFn = unsafe extern "C" fn(u32, Subscriber, u32, u32) -> u32;
pub(super) type GetDeviceIdFn = unsafe extern "C" fn(usize, *mut u32) -> u32;
pub(super) type GetVersionFn = unsafe extern "C" fn(*mut u32) -> u32;
pub(super) type GetResultStringFn = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;

//! `libcupti`: the subscribers, and their callbacks at both ends of the driver calls that they enabled.

use std::cell::Cell;
use std::collections::HashSet;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::cupti::sys::{CUpti_ApiCallbackSite, CUpti_CallbackData};

use crate::driver::{Call, driver, lock, root};
use crate::ffi::{Callback, Listener, Out, Text};

/// A `CUptiResult` other than success.
struct ErrorCode(c_int);

const INVALID_PARAMETER: ErrorCode = ErrorCode(1);
const INVALID_CONTEXT: ErrorCode = ErrorCode(3);
const MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED: ErrorCode = ErrorCode(39);

error_codes!(INVALID_PARAMETER);

// The layout in cupti_callbacks.h, which is the same in every version from 11.4 to 13.4.
const _: () = {
    assert!(size_of::<CUpti_CallbackData>() == 72);
    assert!(offset_of!(CUpti_CallbackData, functionName) == 8);
    assert!(offset_of!(CUpti_CallbackData, functionParams) == 16);
    assert!(offset_of!(CUpti_CallbackData, functionReturnValue) == 24);
    assert!(offset_of!(CUpti_CallbackData, context) == 40);
    assert!(offset_of!(CUpti_CallbackData, contextUid) == 48);
    assert!(offset_of!(CUpti_CallbackData, correlationData) == 56);
    assert!(offset_of!(CUpti_CallbackData, correlationId) == 64);
};

/// `CUPTI_CB_DOMAIN_DRIVER_API`, `CUPTI_CB_DOMAIN_RESOURCE` and `CUPTI_CB_DOMAIN_SIZE`.
const DRIVER_API: c_uint = 1;
const RESOURCE: c_uint = 3;
const DOMAINS: c_uint = 7;
/// `CUPTI_CBID_RESOURCE_CONTEXT_DESTROY_STARTING`, the only resource callback here.
const CONTEXT_DESTROY_STARTING: c_uint = 2;

/// `CUpti_ResourceData`.
#[repr(C)]
struct ResourceData {
    context: usize,
    resource: usize,
    descriptor: usize,
}

const _: () = assert!(size_of::<ResourceData>() == size_of::<cudarc::cupti::sys::CUpti_ResourceData>());

/// The current subscribers.
#[derive(Default)]
pub(crate) struct Subscriptions {
    created: usize,
    live: Vec<Subscriber>,
}

struct Subscriber {
    /// A `CUpti_SubscriberHandle`.
    handle: usize,
    listener: Listener,
    name: String,
    /// True if it allows other subscribers next to it.
    shares: bool,
    /// Domains and ids.
    enabled: HashSet<(c_uint, c_uint)>,
}

impl Subscriptions {
    fn get(&mut self, handle: usize) -> Result<&mut Subscriber, ErrorCode> {
        self.live.iter_mut().find(|subscriber| subscriber.handle == handle).ok_or(INVALID_PARAMETER)
    }
}

/// `CUpti_SubscriberParams` as of CUPTI 13.0, and the fields that 13.2 added.
#[derive(Clone, Copy)]
#[repr(C)]
struct SubscriberParams {
    size: usize,
    name: Text,
    old_name: Out<c_char>,
    old_length: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct SharingParams {
    params: SubscriberParams,
    allow_multiple: u8,
    padding: [u8; 7],
}

const _: () = assert!(size_of::<SubscriberParams>() == 32 && size_of::<SharingParams>() == 40);
const FIRST_SHARING: u32 = 130_200;

fn subscribe(
    call: &Call,
    created: Out<usize>,
    callback: Option<Callback>,
    userdata: Out<c_void>,
    params: Option<Out<SubscriberParams>>,
) -> Result<(), ErrorCode> {
    let callback = callback.ok_or(INVALID_PARAMETER)?;
    let cupti = &call.driver.config.cupti;
    let (mut name, mut shares, mut old) = ("another".to_owned(), false, None);
    if let Some(params) = params {
        let given = params.get()?;
        let sharing = cupti.version >= FIRST_SHARING;
        if given.size != if sharing { size_of::<SharingParams>() } else { size_of::<SubscriberParams>() } {
            return Err(INVALID_PARAMETER);
        }
        name = given.name.get().unwrap_or(name);
        shares = sharing && params.cast::<SharingParams>().get()?.allow_multiple != 0;
        old = Some((given.old_name, given.old_length));
    }
    let mut subscriptions = lock(&call.driver.cupti);
    let tool = cupti.subscriber.iter().map(|tool| (tool, cupti.shared));
    let mut others = tool.chain(subscriptions.live.iter().map(|other| (&other.name, other.shares)));
    if let Some((in_the_way, _)) = others.find(|(_, other_shares)| !(shares && *other_shares)) {
        if let Some((place, length)) = old.filter(|(place, _)| !place.is_null()) {
            place.put_text(in_the_way, length)?;
        }
        return Err(MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED);
    }
    subscriptions.created += 1;
    let handle = 0x5000_0000 + subscriptions.created * 16;
    created.put(handle)?;
    let listener = Listener::new(callback, userdata);
    subscriptions.live.push(Subscriber { handle, listener, name, shares, enabled: HashSet::new() });
    Ok(())
}

thread_local! {
    /// The number of callbacks that the calling thread is in.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

pub(crate) fn in_callback() -> bool {
    DEPTH.get() > 0
}

/// Returns the handles of the subscribers that enabled this id.
fn subscribers(domain: c_uint, id: c_uint) -> Vec<usize> {
    let enabled = |subscriber: &&Subscriber| subscriber.enabled.contains(&(domain, id));
    lock(&driver().cupti).live.iter().filter(enabled).map(|subscriber| subscriber.handle).collect()
}

/// Calls a subscriber, unless it has unsubscribed or disabled this id in the meantime. No lock is held while the callback runs.
///
/// This function is inlined, like the next function: gpumem records few frames of a stack, and without optimisation the stand-in driver has
/// many.
#[allow(clippy::inline_always)]
#[inline(always)]
fn call_back<T>(handle: usize, domain: c_uint, id: c_uint, data: &T) {
    let is_enabled =
        |subscriber: &&Subscriber| subscriber.handle == handle && subscriber.enabled.contains(&(domain, id));
    let listener = lock(&driver().cupti).live.iter().find(is_enabled).map(|subscriber| subscriber.listener);
    if let Some(listener) = listener {
        DEPTH.set(DEPTH.get() + 1);
        listener.call(domain, id, data);
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// Reports that a context is about to be destroyed, with everything in it.
pub(crate) fn announce_end(context: usize) {
    for handle in subscribers(RESOURCE, CONTEXT_DESTROY_STARTING) {
        call_back(handle, RESOURCE, CONTEXT_DESTROY_STARTING, &ResourceData { context, resource: 0, descriptor: 0 });
    }
}

/// Makes a call. All subscribers that enabled this function are called back before and after it.
pub(crate) fn announce<P>(
    id: Option<c_uint>,
    function: &'static str,
    params: &P,
    call: impl FnOnce() -> c_int,
) -> c_int {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let Some(id) = id else { return call() };
    let mut handles: Vec<(usize, u64)> = subscribers(DRIVER_API, id).into_iter().map(|handle| (handle, 0)).collect();
    if handles.is_empty() {
        return call();
    }
    let correlation = CALLS.fetch_add(1, Ordering::Relaxed) + 1;
    let mut announce = |site, result: Option<&mut c_int>| {
        let result: *mut c_int = result.map_or(std::ptr::null_mut(), std::ptr::from_mut);
        for (handle, correlation_data) in &mut handles {
            let context = (root().current)();
            let data = CUpti_CallbackData {
                callbackSite: site,
                functionName: function.as_ptr().cast(),
                functionParams: if size_of::<P>() == 0 { std::ptr::null() } else { std::ptr::from_ref(params).cast() },
                functionReturnValue: result.cast(),
                symbolName: std::ptr::null(),
                context: std::ptr::without_provenance_mut(context),
                contextUid: driver().context_uid(context),
                correlationData: correlation_data,
                correlationId: correlation,
            };
            call_back(*handle, DRIVER_API, id, &data);
        }
    };
    announce(CUpti_ApiCallbackSite::CUPTI_API_ENTER, None);
    let let_others_in = || {
        if driver().config.yields {
            std::thread::yield_now();
        }
    };
    let_others_in();
    let mut code = call();
    let_others_in();
    announce(CUpti_ApiCallbackSite::CUPTI_API_EXIT, Some(&mut code));
    code
}

exports! {
    fn cuptiSubscribe(created: Out<usize>, callback: Option<Callback>, userdata: Out<c_void>) |call| {
        call.driver.tear_down_at_exit();
        subscribe(call, created, callback, userdata, None)
    }

    fn cuptiSubscribe_v2(created: Out<usize>, callback: Option<Callback>, userdata: Out<c_void>, params: Out<SubscriberParams>) |call| {
        call.driver.tear_down_at_exit();
        subscribe(call, created, callback, userdata, Some(params))
    }

    fn cuptiUnsubscribe(subscriber: usize) |call| {
        let mut subscriptions = lock(&call.driver.cupti);
        subscriptions.get(subscriber)?;
        subscriptions.live.retain(|other| other.handle != subscriber);
        Ok(())
    }

    fn cuptiEnableCallback(enable: c_uint, subscriber: usize, domain: c_uint, id: c_uint) |call| {
        let mut subscriptions = lock(&call.driver.cupti);
        let subscriber = subscriptions.get(subscriber)?;
        if domain == 0 || domain >= DOMAINS || id == 0 {
            return Err(INVALID_PARAMETER);
        }
        if enable == 0 {
            subscriber.enabled.remove(&(domain, id));
        } else {
            subscriber.enabled.insert((domain, id));
        }
        Ok(())
    }

    fn cuptiGetDeviceId(context: usize, device: Out<c_uint>) |call| {
        let context = if context == 0 { (root().current)() } else { context };
        let card = call.driver.context_card(context).ok_or(INVALID_CONTEXT)?;
        call.on(card)?;
        let ordinal = call.driver.visible.iter().position(|visible| *visible == card).ok_or(INVALID_CONTEXT)?;
        Ok(device.put(c_uint::try_from(ordinal).unwrap_or(c_uint::MAX))?)
    }

    fn cuptiGetVersion(version: Out<c_uint>) |call| {
        Ok(version.put(call.driver.config.cupti.version)?)
    }
}

/// NVIDIA's `cuptiGetResultString`, for the codes that occur in the tests.
#[unsafe(no_mangle)]
extern "C" fn cuptiGetResultString(code: c_int, text: Out<*const c_char>) -> c_int {
    let words = match code {
        0 => c"CUPTI_SUCCESS",
        1 => c"CUPTI_ERROR_INVALID_PARAMETER",
        2 => c"CUPTI_ERROR_INVALID_DEVICE",
        3 => c"CUPTI_ERROR_INVALID_CONTEXT",
        7 => c"CUPTI_ERROR_INVALID_OPERATION",
        8 => c"CUPTI_ERROR_OUT_OF_MEMORY",
        9 => c"CUPTI_ERROR_HARDWARE",
        12 => c"CUPTI_ERROR_MAX_LIMIT_REACHED",
        15 => c"CUPTI_ERROR_NOT_INITIALIZED",
        27 => c"CUPTI_ERROR_NOT_SUPPORTED",
        33 => c"CUPTI_ERROR_VIRTUALIZED_DEVICE_NOT_SUPPORTED",
        35 => c"CUPTI_ERROR_INSUFFICIENT_PRIVILEGES",
        39 => c"CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED",
        999 => c"CUPTI_ERROR_UNKNOWN",
        _ => return INVALID_PARAMETER.into(),
    };
    crate::ffi::code_of(text.put(words.as_ptr()).map_err(ErrorCode::from))
}

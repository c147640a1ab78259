//! CUPTI's callback interface: reports the driver calls that allocate and free, on the thread that makes them.

use std::{
    ffi::{CStr, c_char, c_void},
    path::PathBuf,
    ptr,
    sync::{Mutex, PoisonError},
};

use libloading::Library;
use once_cell::sync::OnceCell;

use super::{
    calls::{Arguments, CALLS, Call, Caller, Context, Observe, STATE, Shape, State, Tell, Told, at_enter, at_exit},
    dl, process,
};
use crate::error::{Error, Kind};

const LIBRARY: &str = "libcupti";

const DOMAIN_DRIVER_API: u32 = 1;
const DOMAIN_RESOURCE: u32 = 3;
const RESOURCE_CONTEXT_DESTROY_STARTING: u32 = 2;
const SITE_ENTER: u32 = 0;
const CUPTI_ERROR_INVALID_PARAMETER: u32 = 1;
const CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED: u32 = 39;

/// The numbers that every CUPTI has which reports stream-ordered memory (11.2) end below this. A later function that an older
/// CUPTI does not know is not reported: programs that are built with the same toolkit do not call it.
const LATER_NUMBERS: u32 = 618;

/// A call by its number, for the callback; the numbers end below this.
const NUMBERS: usize = 768;
const SHAPES: [Option<Shape>; NUMBERS] = {
    let mut shapes = [None; NUMBERS];
    let mut at = 0;
    while at < CALLS.len() {
        let (number, _, shape) = CALLS[at];
        if number != 0 {
            shapes[number as usize] = Some(shape);
        }
        at += 1;
    }
    shapes
};

/// `CUpti_CallbackData`
#[repr(C)]
struct CallbackData {
    site: u32,
    function_name: *const c_char,
    function_params: *const u64,
    function_return_value: *const u32,
    symbol_name: *const c_char,
    context: usize,
    context_uid: u32,
    correlation_data: *mut u64,
    correlation_id: u32,
}

/// `CUpti_ResourceData`
#[repr(C)]
struct ResourceData {
    context: usize,
    resource: *const c_void,
    descriptor: *const c_void,
}

/// `CUpti_SubscriberParams` of CUPTI 13.2; older ones end before `allow_multiple`.
#[repr(C)]
struct SubscriberParams {
    size: usize,
    name: *const c_char,
    old_name: *mut c_char,
    old_name_size: usize,
    allow_multiple: u8,
    padding: [u8; 7],
}

#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<CallbackData>() == 72);
    assert!(std::mem::offset_of!(CallbackData, function_params) == 16);
    assert!(std::mem::offset_of!(CallbackData, context) == 40);
    assert!(std::mem::offset_of!(CallbackData, correlation_data) == 56);
    assert!(size_of::<SubscriberParams>() == 40);
};

type Subscriber = *mut c_void;
type Callback = unsafe extern "C" fn(*mut c_void, u32, u32, *const c_void);

/// The functions of the library that are used.
struct Cupti {
    path: String,
    subscribe: unsafe extern "C" fn(*mut Subscriber, Callback, *mut c_void) -> u32,
    /// From CUPTI 13 on.
    subscribe_v2: Option<unsafe extern "C" fn(*mut Subscriber, Callback, *mut c_void, *mut SubscriberParams) -> u32>,
    unsubscribe: unsafe extern "C" fn(Subscriber) -> u32,
    enable_callback: unsafe extern "C" fn(u32, Subscriber, u32, u32) -> u32,
    get_device_id: unsafe extern "C" fn(usize, *mut u32) -> u32,
    get_result_string: unsafe extern "C" fn(u32, *mut *const c_char) -> u32,
}

/// A subscription that is live.
struct Live(Subscriber);

// SAFETY: the handle is a token that CUPTI gave out; CUPTI's functions may be called with it from any thread.
unsafe impl Send for Live {}

static LIVE: Mutex<Option<Live>> = Mutex::new(None);

fn cupti() -> Result<&'static Cupti, Error> {
    static CUPTI: OnceCell<Result<Cupti, Error>> = OnceCell::new();
    CUPTI.get_or_init(|| dl::open(LIBRARY, dl::cupti_places()).and_then(Cupti::of)).as_ref().map_err(Clone::clone)
}

/// Whether the library is there and has what is needed.
pub(crate) fn is_there() -> Result<(), Error> {
    cupti().map(|_| ())
}

/// Has `O` told of each fact from now on, on the thread that makes the call. What it allocates or frees itself is
/// [`Call::Uncounted`], but for what is done [`outside`](super::calls::outside). Subscribing twice is subscribing once.
#[doc(alias("cuptiSubscribe", "cuptiEnableCallback"))]
pub(crate) fn subscribe<O: Observe>() -> Result<(), Error> {
    let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    if live.is_some() {
        return Ok(());
    }
    let cupti = cupti()?;
    let subscriber = cupti.subscriber(callback::<O>)?;
    let driver = CALLS.iter().filter(|(number, ..)| *number != 0).map(|(number, ..)| (DOMAIN_DRIVER_API, *number));
    for (domain, number) in driver.chain([(DOMAIN_RESOURCE, RESOURCE_CONTEXT_DESTROY_STARTING)]) {
        // SAFETY: the subscriber is live and the numbers are CUPTI's own.
        let enabled = unsafe { (cupti.enable_callback)(1, subscriber, domain, number) };
        if enabled == CUPTI_ERROR_INVALID_PARAMETER && number >= LATER_NUMBERS {
            continue;
        }
        if let Err(error) = cupti.check("cuptiEnableCallback", enabled) {
            // SAFETY: the subscriber is live and not used after this.
            unsafe { (cupti.unsubscribe)(subscriber) };
            return Err(error);
        }
    }
    *live = Some(Live(subscriber));
    Ok(())
}

/// Ends the subscription, so that another tool can have it. Without one, nothing happens.
#[doc(alias = "cuptiUnsubscribe")]
pub(crate) fn unsubscribe() {
    let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    // Without one, the library is not even loaded.
    let Some(Live(subscriber)) = live.take() else { return };
    if let Ok(cupti) = cupti() {
        // SAFETY: the subscriber was live until here and is not used again.
        unsafe { (cupti.unsubscribe)(subscriber) };
    }
}

/// Where the library in use was found; `None` if it is not in use.
pub(crate) fn subscribed() -> Option<&'static str> {
    let live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    live.as_ref().and_then(|_| cupti().ok()).map(|cupti| cupti.path.as_str())
}

/// The CUDA ordinal of a context's device. Asks CUPTI, not the driver, and may be called in a handler.
#[doc(alias = "cuptiGetDeviceId")]
pub(crate) fn device_of(context: Context) -> Option<u32> {
    let cupti = cupti().ok().filter(|_| context.handle != 0)?;
    let mut device = 0;
    // SAFETY: the context is one that CUPTI itself has just named as current, so it is alive; the out-parameter is live.
    let asked = unsafe { (cupti.get_device_id)(context.handle, &raw mut device) };
    (asked == 0).then_some(device)
}

impl Cupti {
    fn of((library, path): (Library, PathBuf)) -> Result<Self, Error> {
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the symbol is a function of CUPTI, whose C signature is that of the field it is put into.
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
        };
        // The functions above stay valid: the library is never unloaded.
        std::mem::forget(library);
        Ok(cupti)
    }

    /// Subscribes, beside other tools where CUPTI allows that.
    fn subscriber(&self, callback: Callback) -> Result<Subscriber, Error> {
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
        // SAFETY: as above. Also the way where version 2 is there and refuses for a reason of its own.
        let code = code.unwrap_or_else(|| unsafe { (self.subscribe)(&raw mut subscriber, callback, ptr::null_mut()) });
        if code == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED {
            // SAFETY: the array was zeroed and its last byte was not offered to CUPTI, so the text in it ends.
            let holder = unsafe { CStr::from_ptr(old.as_ptr()) }.to_string_lossy().into_owned();
            return Err(Kind::Busy { holder }.into());
        }
        self.check("cuptiSubscribe", code).map(|()| subscriber)
    }

    fn check(&self, call: &'static str, code: u32) -> Result<(), Error> {
        if code == 0 {
            return Ok(());
        }
        let mut name = ptr::null();
        // SAFETY: the out-parameter is live.
        let told = unsafe { (self.get_result_string)(code, &raw mut name) };
        let name = if told == 0 && !name.is_null() {
            // SAFETY: CUPTI gave a C string of its own, which it never frees.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        } else {
            "an unknown CUPTI error".to_owned()
        };
        Err(Kind::Call { library: LIBRARY, call, code, name, device: None, fatal: true }.into())
    }
}

/// What CUPTI calls. Copies what it needs, since the data is gone when it returns, and never unwinds into C.
unsafe extern "C" fn callback<O: Observe>(_: *mut c_void, domain: u32, number: u32, data: *const c_void) {
    // Locks that the observer takes may be held for ever in the child of a fork.
    if process::is_forked() {
        return;
    }
    if domain == DOMAIN_DRIVER_API {
        // SAFETY: in this domain CUPTI passes a `CUpti_CallbackData` of that call, valid until the callback returns.
        unsafe { report::<O>(number, &*data.cast::<CallbackData>()) };
    } else if domain == DOMAIN_RESOURCE && number == RESOURCE_CONTEXT_DESTROY_STARTING {
        // SAFETY: in this domain CUPTI passes a `CUpti_ResourceData` that is valid until the callback returns.
        let handle = unsafe { &*data.cast::<ResourceData>() }.context;
        Told::<O>::by(Caller::Cupti(Context { handle, uid: 0 })).tell(&Call::ContextGone { handle });
    }
}

/// Reads one side of a call. Most sides have nothing to say.
///
/// # Safety
/// `data` is that of a call of this number.
#[inline]
unsafe fn report<O: Observe>(number: u32, data: &CallbackData) {
    let Some(Some(shape)) = SHAPES.get(number as usize) else { return };
    // SAFETY: `function_params` points to a struct of the call's arguments, which stays until the callback returns.
    let arguments = unsafe { Arguments::new(data.function_params) };
    let to = Told::<O>::by(Caller::Cupti(Context { handle: data.context, uid: data.context_uid.into() }));
    // SAFETY: the shape is that of this number, whose data this is.
    unsafe {
        match STATE.get() {
            State::Own => {}
            State::Observer => read_side(*shape, data, arguments, &to.of_observer()),
            State::Program | State::Driver => read_side(*shape, data, arguments, &to),
        }
    }
}

/// Reads the side of a call that is reported.
///
/// # Safety
/// `data` and `arguments` are those of a call of this shape.
#[inline]
unsafe fn read_side(shape: Shape, data: &CallbackData, arguments: Arguments, to: &impl Tell) {
    if data.site == SITE_ENTER {
        // SAFETY: the arguments are those of a call of this shape.
        unsafe { at_enter(shape, arguments, to) };
    } else {
        // SAFETY: as above; at the exit CUPTI passes where the call's `CUresult` is.
        unsafe { at_exit(shape, data.function_return_value.read(), arguments, to) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_found_by_its_number() {
        for (number, name, shape) in CALLS.iter().filter(|(number, ..)| *number != 0) {
            assert_eq!(SHAPES[*number as usize], Some(*shape), "{name}");
        }
        assert_eq!(SHAPES.iter().flatten().count(), CALLS.iter().filter(|(number, ..)| *number != 0).count());
    }
}

//! CUPTI's callback interface: the driver calls that allocate and free, as they happen, on the thread that makes them.
//!
//! The parameters of a call are a C struct of its arguments. All that is read of them here are 64-bit arguments at the
//! front, so a call is described by a row of [`CALLS`] and read word by word; names and numbers are those of CUPTI's
//! `cupti_driver_cbid.h` and `generated_cuda_meta.h`, which do not change between versions.

use std::{
    cell::Cell,
    ffi::{CStr, c_char, c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    ptr,
    sync::{Mutex, PoisonError},
};

use libloading::Library;
use once_cell::sync::OnceCell;

use super::dl;
use crate::error::{Error, Kind};

const LIBRARY: &str = "libcupti";

const DOMAIN_DRIVER_API: u32 = 1;
const DOMAIN_RESOURCE: u32 = 3;
const RESOURCE_CONTEXT_DESTROY_STARTING: u32 = 2;
const SITE_ENTER: u32 = 0;
const CUDA_ERROR_OUT_OF_MEMORY: u32 = 2;
const CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED: u32 = 39;

/// What a driver call does to memory, and in which of its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// `(T *out, size_t bytes, …)`
    Alloc(Memory),
    /// `(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, …)`
    AllocPitch,
    /// `(CUdeviceptr *out, size_t bytes, CUstream stream)`
    AllocOnStream,
    /// `(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream)`
    AllocFromPool,
    /// `(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *)`
    Array,
    /// `(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *, [unsigned levels])`
    Array3D { levels: bool },
    /// `(void *host, size_t bytes, …)`
    Register,
    /// `(name, …)`
    Free(Named),
    /// `(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *)`
    Create,
    /// `(CUmemGenericAllocationHandle *out, …)`
    Retain,
    /// `(CUmemGenericAllocationHandle handle)`
    Release,
    /// `(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, …)`
    Map,
    /// `(CUdeviceptr at, size_t bytes)`
    Unmap,
    /// `(CUmemoryPool *out, const CUmemPoolProps *)`
    PoolCreate,
    /// `(CUmemoryPool *out, CUdevice device)`
    PoolOfDevice,
    /// `(CUstream *out, …)`
    StreamCreate,
    /// `(CUstream stream)`
    StreamDestroy,
}

/// The sort of memory that a call gives out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    Device,
    Managed,
    PinnedHost,
}

/// What a block is given back by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    Address,
    Array,
    Registered,
}

/// The calls that are listened to. What allocates without one of them is not heard: memory nodes of graphs
/// (`cuGraphAddMemAllocNode`), memory of another process or API that is opened here (`cuIpcOpenMemHandle`,
/// `cuImportExternalMemory`), and what the driver takes for itself (contexts, modules, stacks, printf buffers).
const CALLS: &[(u32, &str, Shape)] = &[
    (243, "cuMemAlloc_v2", Shape::Alloc(Memory::Device)),
    (244, "cuMemAllocPitch_v2", Shape::AllocPitch),
    (371, "cuMemAllocManaged", Shape::Alloc(Memory::Managed)),
    (598, "cuMemAllocAsync", Shape::AllocOnStream),
    (599, "cuMemAllocAsync_ptsz", Shape::AllocOnStream),
    (611, "cuMemAllocFromPoolAsync", Shape::AllocFromPool),
    (612, "cuMemAllocFromPoolAsync_ptsz", Shape::AllocFromPool),
    (245, "cuMemFree_v2", Shape::Free(Named::Address)),
    (600, "cuMemFreeAsync", Shape::Free(Named::Address)),
    (601, "cuMemFreeAsync_ptsz", Shape::Free(Named::Address)),
    (294, "cuMemAllocHost_v2", Shape::Alloc(Memory::PinnedHost)),
    (39, "cuMemHostAlloc", Shape::Alloc(Memory::PinnedHost)),
    (271, "cuMemHostAlloc_v2", Shape::Alloc(Memory::PinnedHost)),
    (38, "cuMemFreeHost", Shape::Free(Named::Address)),
    (301, "cuMemHostRegister", Shape::Register),
    (379, "cuMemHostRegister_v2", Shape::Register),
    (302, "cuMemHostUnregister", Shape::Free(Named::Registered)),
    (272, "cuArrayCreate_v2", Shape::Array),
    (274, "cuArray3DCreate_v2", Shape::Array3D { levels: false }),
    (347, "cuMipmappedArrayCreate", Shape::Array3D { levels: true }),
    (89, "cuArrayDestroy", Shape::Free(Named::Array)),
    (349, "cuMipmappedArrayDestroy", Shape::Free(Named::Array)),
    (549, "cuMemCreate", Shape::Create),
    (565, "cuMemRetainAllocationHandle", Shape::Retain),
    (550, "cuMemRelease", Shape::Release),
    (551, "cuMemMap", Shape::Map),
    (552, "cuMemUnmap", Shape::Unmap),
    (607, "cuMemPoolCreate", Shape::PoolCreate),
    (606, "cuDeviceGetDefaultMemPool", Shape::PoolOfDevice),
    (610, "cuDeviceGetMemPool", Shape::PoolOfDevice),
    (124, "cuStreamCreate", Shape::StreamCreate),
    (367, "cuStreamCreateWithPriority", Shape::StreamCreate),
    (326, "cuStreamDestroy_v2", Shape::StreamDestroy),
];

/// A call by its number, for the callback; the numbers end below this.
const NUMBERS: usize = 640;
const SHAPES: [Option<Shape>; NUMBERS] = {
    let mut shapes = [None; NUMBERS];
    let mut at = 0;
    while at < CALLS.len() {
        shapes[CALLS[at].0 as usize] = Some(CALLS[at].2);
        at += 1;
    }
    shapes
};

/// `CUcontext` and its unique number: the pointer may be given out again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Context {
    pub(crate) handle: usize,
    pub(crate) uid: u32,
}

/// A fact about memory, copied out of a callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// Memory of the context's device.
    Allocated {
        named: Named,
        name: u64,
        bytes: u64,
        memory: Memory,
    },
    /// Stream-ordered memory: of the pool's device, else of the stream's, else of the context's.
    Pooled {
        address: u64,
        bytes: u64,
        stream: u64,
        pool: Option<u64>,
    },
    /// There was not enough memory for so much: of the context's device where the sort is said, else stream-ordered.
    Refused {
        bytes: u64,
        memory: Option<Memory>,
        pool: Option<u64>,
        stream: u64,
    },
    /// There was not enough memory on the device for a handle.
    NotCreated {
        bytes: u64,
        device: u32,
    },
    /// Something that cannot be counted: an array whose format has no known size, or what was called while the handler was
    /// at work.
    Uncounted,
    /// About to be given back.
    Freeing {
        named: Named,
        name: u64,
    },
    /// The call that was about to give something back has ended. Not told of a plain free that worked.
    Freed {
        worked: bool,
    },
    /// Physical memory behind a handle; no device if it is on the host.
    Created {
        handle: u64,
        bytes: u64,
        device: Option<u32>,
    },
    Retained {
        handle: u64,
    },
    Releasing {
        handle: u64,
    },
    Mapped {
        at: u64,
        handle: u64,
    },
    /// About to be unmapped: everything in this range.
    Unmapping {
        at: u64,
        bytes: u64,
    },
    /// A pool and its device; no device if it is on the host.
    Pool {
        pool: u64,
        device: Option<u32>,
    },
    StreamCreated {
        stream: u64,
    },
    StreamDestroyed {
        stream: u64,
    },
    /// A context is about to go, with everything in it.
    ContextGone,
}

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

impl CallbackData {
    /// One of the call's arguments.
    ///
    /// # Safety
    /// The call has 64-bit arguments from the first to this one.
    #[inline]
    unsafe fn word(&self, at: usize) -> u64 {
        // SAFETY: `function_params` points to a struct of the arguments, which begins with these words.
        unsafe { self.function_params.add(at).read() }
    }

    /// What the call gave out.
    ///
    /// # Safety
    /// The call has succeeded, and its first argument is where it writes one word.
    #[inline]
    unsafe fn out(&self) -> u64 {
        // SAFETY: that has been written then.
        unsafe { (self.word(0) as *const u64).read() }
    }
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

/// `CUDA_ARRAY_DESCRIPTOR`
#[repr(C)]
struct ArrayDescriptor {
    width: usize,
    height: usize,
    format: u32,
    channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`
#[repr(C)]
struct Array3DDescriptor {
    width: usize,
    height: usize,
    depth: usize,
    format: u32,
    channels: u32,
    flags: u32,
}

/// The front of `CUmemAllocationProp` and of `CUmemPoolProps`.
#[repr(C)]
struct Located {
    kind: u32,
    handle_types: u32,
    location: u32,
    id: c_int,
}

#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<CallbackData>() == 72);
    assert!(std::mem::offset_of!(CallbackData, function_params) == 16);
    assert!(std::mem::offset_of!(CallbackData, context) == 40);
    assert!(std::mem::offset_of!(CallbackData, correlation_data) == 56);
    assert!(size_of::<SubscriberParams>() == 40);
    assert!(size_of::<ArrayDescriptor>() == 24);
    assert!(size_of::<Array3DDescriptor>() == 40);
    assert!(std::mem::offset_of!(Located, location) == 8);
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
static HANDLER: OnceCell<fn(Context, &Call)> = OnceCell::new();

fn cupti() -> Result<&'static Cupti, Error> {
    static CUPTI: OnceCell<Result<Cupti, Error>> = OnceCell::new();
    CUPTI.get_or_init(|| dl::open(LIBRARY, dl::cupti_places()).and_then(Cupti::of)).as_ref().map_err(Clone::clone)
}

/// Whether the library is there and has what is needed.
pub(crate) fn is_there() -> Result<(), Error> {
    cupti().map(|_| ())
}

/// Has `handler` called with each fact from now on, on the thread that makes the call. What it allocates or frees itself is
/// [`Call::Uncounted`], but for what is done [`outside`]. Subscribing twice is subscribing once.
#[doc(alias("cuptiSubscribe", "cuptiEnableCallback"))]
pub(crate) fn subscribe(handler: fn(Context, &Call)) -> Result<(), Error> {
    let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    if live.is_some() {
        return Ok(());
    }
    let cupti = cupti()?;
    // One handler for the process: it is the same at each call.
    let _ = HANDLER.set(handler);
    let subscriber = cupti.subscriber()?;
    let driver = CALLS.iter().map(|(number, ..)| (DOMAIN_DRIVER_API, *number));
    for (domain, number) in driver.chain([(DOMAIN_RESOURCE, RESOURCE_CONTEXT_DESTROY_STARTING)]) {
        // SAFETY: the subscriber is live and the numbers are CUPTI's own.
        let enabled = unsafe { (cupti.enable_callback)(1, subscriber, domain, number) };
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
    if let (Some(Live(subscriber)), Ok(cupti)) = (live.take(), cupti()) {
        // SAFETY: the subscriber was live until here and is not used again.
        unsafe { (cupti.unsubscribe)(subscriber) };
    }
}

/// Where the library in use was found; `None` if it is not in use.
pub(crate) fn subscribed() -> Option<&'static str> {
    let live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    live.as_ref().and(cupti().ok()).map(|cupti| cupti.path.as_str())
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
    fn subscriber(&self) -> Result<Subscriber, Error> {
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

thread_local! {
    /// The handler is at work on this thread, and may hold what it would wait for if it were called again.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// For the handler: runs what holds nothing of it, so that calls which that makes are told as any others.
pub(crate) fn outside(code: impl FnOnce()) {
    let inside = INSIDE.replace(false);
    code();
    INSIDE.set(inside);
}

/// What CUPTI calls. Copies what it needs, since the data is gone when it returns, and never unwinds into C.
unsafe extern "C" fn callback(_: *mut c_void, domain: u32, number: u32, data: *const c_void) {
    if domain == DOMAIN_DRIVER_API {
        // SAFETY: in this domain CUPTI passes a `CUpti_CallbackData` of that call, valid until the callback returns.
        unsafe { hear(number, &*data.cast::<CallbackData>(), tell) };
    } else if domain == DOMAIN_RESOURCE && number == RESOURCE_CONTEXT_DESTROY_STARTING {
        // SAFETY: in this domain CUPTI passes a `CUpti_ResourceData` that is valid until the callback returns.
        let handle = unsafe { &*data.cast::<ResourceData>() }.context;
        tell(Context { handle, uid: 0 }, &Call::ContextGone);
    }
}

#[inline(never)]
fn tell(context: Context, call: &Call) {
    let inside = INSIDE.replace(true);
    let call = if inside { &Call::Uncounted } else { call };
    if let Some(handler) = HANDLER.get() {
        let _ = catch_unwind(AssertUnwindSafe(|| handler(context, call)));
    }
    INSIDE.set(inside);
}

/// Reads one side of a call: a free before it is made, everything else afterwards. Most sides have nothing to say, and that is
/// found out first, with what programs call by the million. Each fact is told where it is made: one that is handed back is
/// copied, in other pieces than it was written in, and the processor waits for that.
///
/// # Safety
/// `data` is that of a call of this number.
#[inline]
unsafe fn hear(number: u32, data: &CallbackData, tell: impl Fn(Context, &Call)) {
    let Some(Some(shape)) = SHAPES.get(number as usize) else { return };
    // SAFETY: the shape is that of this number, and it reads no further words than its calls have.
    let word = |at: usize| unsafe { data.word(at) };
    let tell = |call: &Call| tell(Context { handle: data.context, uid: data.context_uid }, call);
    if data.site == SITE_ENTER {
        return match *shape {
            Shape::Free(named) => tell(&Call::Freeing { named, name: word(0) }),
            Shape::Release => tell(&Call::Releasing { handle: word(0) }),
            Shape::Unmap => tell(&Call::Unmapping { at: word(0), bytes: word(1) }),
            _ => {}
        };
    }
    // SAFETY: at the exit CUPTI passes where the call's `CUresult` is.
    match (*shape, unsafe { data.function_return_value.read() }) {
        (Shape::Free(_), 0) => {}
        (Shape::AllocOnStream, 0) => {
            // SAFETY: the call succeeded, and its first argument is where it writes the address.
            let address = unsafe { data.out() };
            tell(&Call::Pooled { address, bytes: word(1), stream: word(2), pool: None });
        }
        // SAFETY: the data is that of a call of this shape, which succeeded.
        (shape, 0) => unsafe { worked(shape, data, tell) },
        (shape, result) => {
            // SAFETY: the data is that of a call of this shape.
            if let Some(call) = unsafe { failed(shape, result, data) } {
                tell(&call);
            }
        }
    }
}

/// Reads a call that has succeeded.
///
/// # Safety
/// `data` is that of a call of this shape, which succeeded.
#[inline(never)]
unsafe fn worked(shape: Shape, data: &CallbackData, tell: impl Fn(&Call)) {
    // SAFETY: the words are those of this shape.
    let word = |at: usize| unsafe { data.word(at) };
    // SAFETY: the call succeeded, and only of shapes that begin with `*out` this is asked.
    let out = || unsafe { data.out() };
    tell(&match shape {
        Shape::Alloc(memory) => Call::Allocated { named: Named::Address, name: out(), bytes: word(1), memory },
        Shape::AllocPitch => {
            // SAFETY: as for `out`; the second argument's target is the pitch.
            let pitch = unsafe { (word(1) as *const u64).read() };
            let bytes = pitch.saturating_mul(word(3));
            Call::Allocated { named: Named::Address, name: out(), bytes, memory: Memory::Device }
        }
        Shape::AllocFromPool => Call::Pooled { address: out(), bytes: word(1), stream: word(3), pool: Some(word(2)) },
        Shape::Array => {
            // SAFETY: the second argument of a call that succeeded points to a descriptor.
            let ArrayDescriptor { width, height, format, channels } =
                unsafe { (word(1) as *const ArrayDescriptor).read() };
            array(out(), [width, height, 1], format, channels, 1)
        }
        Shape::Array3D { levels } => {
            // SAFETY: as above.
            let Array3DDescriptor { width, height, depth, format, channels, .. } =
                unsafe { (word(1) as *const Array3DDescriptor).read() };
            #[expect(clippy::cast_possible_truncation, reason = "an unsigned int lies in the word's lower half")]
            let levels = if levels { word(2) as u32 } else { 1 };
            array(out(), [width, height, depth], format, channels, levels)
        }
        Shape::Register => {
            let (name, bytes) = (word(0), word(1));
            Call::Allocated { named: Named::Registered, name, bytes, memory: Memory::PinnedHost }
        }
        Shape::Create => {
            // SAFETY: the third argument of a call that succeeded points to the properties.
            let device = unsafe { located(word(2)) };
            Call::Created { handle: out(), bytes: word(1), device }
        }
        Shape::Retain => Call::Retained { handle: out() },
        Shape::Map => Call::Mapped { at: word(0), handle: word(3) },
        Shape::PoolCreate => {
            // SAFETY: the second argument of a call that succeeded points to the properties.
            let device = unsafe { located(word(1)) };
            Call::Pool { pool: out(), device }
        }
        #[expect(clippy::cast_possible_truncation, reason = "an int lies in the word's lower half")]
        Shape::PoolOfDevice => Call::Pool { pool: out(), device: Some(word(1) as u32) },
        Shape::StreamCreate => Call::StreamCreated { stream: out() },
        Shape::StreamDestroy => Call::StreamDestroyed { stream: word(0) },
        Shape::Release | Shape::Unmap => Call::Freed { worked: true },
        // They were heard before this.
        Shape::AllocOnStream | Shape::Free(_) => return,
    });
}

/// What is to be told of a call that failed.
///
/// # Safety
/// `data` is that of a call of this shape.
#[cold]
unsafe fn failed(shape: Shape, result: u32, data: &CallbackData) -> Option<Call> {
    // SAFETY: the words are those of this shape.
    let word = |at: usize| unsafe { data.word(at) };
    if let Shape::Free(_) | Shape::Release | Shape::Unmap = shape {
        return Some(Call::Freed { worked: false });
    }
    if result != CUDA_ERROR_OUT_OF_MEMORY {
        return None;
    }
    let of_context = |bytes, memory| Call::Refused { bytes, memory: Some(memory), pool: None, stream: 0 };
    Some(match shape {
        Shape::Alloc(memory) => of_context(word(1), memory),
        Shape::AllocPitch => of_context(word(2).saturating_mul(word(3)), Memory::Device),
        Shape::AllocOnStream => Call::Refused { bytes: word(1), memory: None, pool: None, stream: word(2) },
        Shape::AllocFromPool => Call::Refused { bytes: word(1), memory: None, pool: Some(word(2)), stream: word(3) },
        Shape::Create => {
            // SAFETY: a call that ran out of memory has looked at its third argument, the properties.
            let device = unsafe { located(word(2)) }?;
            Call::NotCreated { bytes: word(1), device }
        }
        _ => return None,
    })
}

/// The device at which properties place memory; `None` for the host.
///
/// # Safety
/// `properties` is the address of a `CUmemAllocationProp` or a `CUmemPoolProps`.
unsafe fn located(properties: u64) -> Option<u32> {
    const CU_MEM_LOCATION_TYPE_DEVICE: u32 = 1;
    // SAFETY: both structs begin with these four.
    let Located { location, id, .. } = unsafe { (properties as *const Located).read() };
    (location == CU_MEM_LOCATION_TYPE_DEVICE).then(|| u32::try_from(id).ok()).flatten()
}

/// An array's size is what its elements add up to; the driver may pad it.
fn array(name: u64, [width, height, depth]: [usize; 3], format: u32, channels: u32, levels: u32) -> Call {
    let element = match format {
        // CU_AD_FORMAT_UNSIGNED_INT8, SIGNED_INT8
        0x01 | 0x08 => 1_u64,
        // UNSIGNED_INT16, SIGNED_INT16, HALF
        0x02 | 0x09 | 0x10 => 2,
        // UNSIGNED_INT32, SIGNED_INT32, FLOAT
        0x03 | 0x0a | 0x20 => 4,
        _ => return Call::Uncounted,
    };
    let level = |level: u32| {
        let side = |side: usize| (side as u64).checked_shr(level).unwrap_or(0).max(1);
        side(width).saturating_mul(side(height)).saturating_mul(side(depth))
    };
    let elements = (0..levels.min(64)).map(level).fold(0, u64::saturating_add);
    let bytes = elements.saturating_mul(element).saturating_mul(channels.into());
    Call::Allocated { named: Named::Array, name, bytes, memory: Memory::Device }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    fn data(site: u32, result: &u32, params: &[u64]) -> CallbackData {
        CallbackData {
            site,
            function_name: ptr::null(),
            function_params: params.as_ptr(),
            function_return_value: result,
            symbol_name: ptr::null(),
            context: 1,
            context_uid: 1,
            correlation_data: ptr::null_mut(),
            correlation_id: 1,
        }
    }

    /// What the callback tells.
    fn call(number: u32, site: u32, result: u32, params: &[u64]) -> Option<Call> {
        let told = Cell::new(None);
        let data = data(site, &result, params);
        // SAFETY: the tests pass the parameters that the call has.
        unsafe { hear(number, &data, |_, call| assert_eq!(told.replace(Some(*call)), None, "one fact for each side")) };
        told.get()
    }

    fn address<T>(of: &T) -> u64 {
        ptr::from_ref(of) as u64
    }

    #[test]
    fn an_allocation_is_read_when_it_has_succeeded() {
        let out = 0x7000_u64;
        let params = [address(&out), 512];
        assert_eq!(call(243, 0, 0, &params), None, "nothing is read before the call");
        assert_eq!(call(243, 1, 1, &params), None, "nothing is read of a call that failed");
        let expected = Call::Allocated { named: Named::Address, name: out, bytes: 512, memory: Memory::Device };
        assert_eq!(call(243, 1, 0, &params), Some(expected));
        // A call that failed may leave its out-parameter pointing nowhere.
        assert_eq!(call(243, 1, 1, &[8, 512]), None);
    }

    #[test]
    fn what_was_refused_is_read_without_out_parameters() {
        let of_context = |bytes, memory| Call::Refused { bytes, memory: Some(memory), pool: None, stream: 0 };
        assert_eq!(call(243, 1, 2, &[8, 512]), Some(of_context(512, Memory::Device)));
        assert_eq!(call(371, 1, 2, &[8, 512]), Some(of_context(512, Memory::Managed)));
        assert_eq!(call(244, 1, 2, &[8, 8, 1000, 10, 4]), Some(of_context(10_000, Memory::Device)));
        let pooled = |pool, stream| Call::Refused { bytes: 64, memory: None, pool, stream };
        assert_eq!(call(598, 1, 2, &[8, 64, 9]), Some(pooled(None, 9)));
        assert_eq!(call(611, 1, 2, &[8, 64, 5, 9]), Some(pooled(Some(5), 9)));
        let on_device = Located { kind: 1, handle_types: 0, location: 1, id: 3 };
        let created = Call::NotCreated { bytes: 64, device: 3 };
        assert_eq!(call(549, 1, 2, &[8, 64, address(&on_device), 0]), Some(created));
        assert_eq!(call(245, 1, 2, &[7]), Some(Call::Freed { worked: false }), "a free asks for nothing");
    }

    #[test]
    fn a_free_is_read_before_the_call_and_its_result_after() {
        for number in [245, 600, 601, 38] {
            let freeing = Call::Freeing { named: Named::Address, name: 7 };
            assert_eq!(call(number, 0, 0, &[7, 0]), Some(freeing));
            assert_eq!(call(number, 1, 0, &[7, 0]), None, "it was told before");
            assert_eq!(call(number, 1, 1, &[7, 0]), Some(Call::Freed { worked: false }));
        }
        assert_eq!(call(302, 0, 0, &[7]), Some(Call::Freeing { named: Named::Registered, name: 7 }));
        assert_eq!(call(550, 0, 0, &[7]), Some(Call::Releasing { handle: 7 }));
        assert_eq!(call(552, 0, 0, &[7, 8]), Some(Call::Unmapping { at: 7, bytes: 8 }));
    }

    #[test]
    fn arguments_are_read_from_their_places() {
        let (out, pitch) = (0x7000_u64, 1024_u64);
        let pitched = Call::Allocated { named: Named::Address, name: out, bytes: 10_240, memory: Memory::Device };
        assert_eq!(call(244, 1, 0, &[address(&out), address(&pitch), 1000, 10, 4]), Some(pitched));
        let pooled = Call::Pooled { address: out, bytes: 64, stream: 9, pool: None };
        assert_eq!(call(598, 1, 0, &[address(&out), 64, 9]), Some(pooled));
        let pooled = Call::Pooled { address: out, bytes: 64, stream: 9, pool: Some(5) };
        assert_eq!(call(611, 1, 0, &[address(&out), 64, 5, 9]), Some(pooled));
        assert_eq!(call(551, 1, 0, &[1, 2, 3, 4, 5]), Some(Call::Mapped { at: 1, handle: 4 }));
        assert_eq!(
            call(606, 1, 0, &[address(&out), 0xffff_ffff_0000_0001]),
            Some(Call::Pool { pool: out, device: Some(1) })
        );
        let on_device = Located { kind: 1, handle_types: 0, location: 1, id: 3 };
        let created = Call::Created { handle: out, bytes: 64, device: Some(3) };
        assert_eq!(call(549, 1, 0, &[address(&out), 64, address(&on_device), 0]), Some(created));
        let on_host = Located { kind: 1, handle_types: 0, location: 2, id: 0 };
        assert_eq!(call(607, 1, 0, &[address(&out), address(&on_host)]), Some(Call::Pool { pool: out, device: None }));
    }

    #[test]
    fn arrays_are_as_large_as_their_elements() {
        let out = 0x7000_u64;
        let flat = ArrayDescriptor { width: 10, height: 0, format: 0x20, channels: 2 };
        let expected = |bytes| Call::Allocated { named: Named::Array, name: out, bytes, memory: Memory::Device };
        assert_eq!(call(272, 1, 0, &[address(&out), address(&flat)]), Some(expected(80)));
        let cube = Array3DDescriptor { width: 8, height: 4, depth: 2, format: 0x01, channels: 4, flags: 0 };
        assert_eq!(call(274, 1, 0, &[address(&out), address(&cube)]), Some(expected(256)));
        // 8·4·2 + 4·2·1 + 2·1·1 + 1 = 75 elements
        assert_eq!(call(347, 1, 0, &[address(&out), address(&cube), 4]), Some(expected(300)));
        let strange = ArrayDescriptor { width: 10, height: 1, format: 0xb0, channels: 1 };
        assert_eq!(call(272, 1, 0, &[address(&out), address(&strange)]), Some(Call::Uncounted));
    }

    #[test]
    fn what_the_handler_calls_is_uncounted_unless_it_is_outside() {
        thread_local! {
            static TOLD: RefCell<Vec<Call>> = const { RefCell::new(Vec::new()) };
        }

        fn free(name: u64) {
            let params = [name];
            let data = data(SITE_ENTER, &0, &params);
            // SAFETY: the data is that of a call of `cuMemFree_v2`, which is about to begin.
            unsafe { callback(ptr::null_mut(), DOMAIN_DRIVER_API, 245, (&raw const data).cast()) };
        }

        fn handler(_: Context, call: &Call) {
            TOLD.with_borrow_mut(|told| told.push(*call));
            if let Call::Freeing { name: 1, .. } = call {
                free(2);
                outside(|| free(3));
                free(4);
            }
        }

        HANDLER.set(handler).expect("nobody subscribes in these tests");
        free(1);
        free(5);
        let freeing = |name| Call::Freeing { named: Named::Address, name };
        let expected = [freeing(1), Call::Uncounted, freeing(3), Call::Uncounted, freeing(5)];
        assert_eq!(TOLD.take(), expected);
    }

    #[test]
    fn no_call_is_listed_twice() {
        let listed = SHAPES.iter().flatten().count();
        assert_eq!(listed, CALLS.len());
    }
}

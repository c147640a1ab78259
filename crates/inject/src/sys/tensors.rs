//! PyTorch's tensors as parts of a pool. The Python package calls these functions once, after PyTorch has initialised CUDA.
//!
//! PyTorch passes each event of its allocator to a function of C++ that is attached to it, and has no function of Python or C for that.
//! Therefore gpumem calls the method of the allocator by its name in the library, which says the types of its parameters, with a
//! `std::function` in libstdc++'s layout. Such a function stays attached, so this library is never unloaded.

#![expect(unsafe_code, reason = "Python hands over pointers, and PyTorch's allocator is an object of C++")]

use std::{
    ffi::{c_char, c_void},
    panic::catch_unwind,
    ptr, slice,
    sync::OnceLock,
};

use gpumem::{
    pool::Pool,
    scope::{Threads, adopt},
};
use gpumem_driver::address_of;
use gpumem_recording::{AllocatorSettings, AllocatorTracker, Held, TrackedEvent};

use super::traces::guarded;

const LIBRARY: &str = "libc10_cuda.so";
/// The variable that points to PyTorch's allocator.
const ALLOCATOR: &str = "_ZN3c104cuda20CUDACachingAllocator9allocatorE";
/// The table of virtual functions of PyTorch's own allocator.
const TABLE: &str = "_ZTVN3c104cuda20CUDACachingAllocator6Native22NativeCachingAllocatorE";
/// `NativeCachingAllocator::attachAllocatorTraceTracker(std::function<void(TraceEntry const&)>)` in PyTorch 2.11 and later, and in 2.2 to 2.10.
const ATTACH: [&str; 2] = [
    "_ZN3c104cuda20CUDACachingAllocator6Native22NativeCachingAllocator27attachAllocatorTraceTrackerESt8functionIFvRKNS_22CachingDeviceAllocator10TraceEntryEEE",
    "_ZN3c104cuda20CUDACachingAllocator6Native22NativeCachingAllocator27attachAllocatorTraceTrackerESt8functionIFvRKNS1_10TraceEntryEEE",
];

/// The name of the pools.
const NAME: &str = "PyTorch";

/// One for each device.
static TRACKERS: OnceLock<Vec<AllocatorTracker<Pool>>> = OnceLock::new();

/// The start of `TraceEntry`, which is the same in PyTorch 2.2 to 2.15.
#[repr(C)]
struct TraceEntry {
    action: i32,
    /// The first byte is the device. Before PyTorch 2.3, it was an int.
    device: [i8; 4],
    address: u64,
    /// A shared pointer to the stack of the event, and the stream.
    _stack_and_stream: [usize; 3],
    bytes: u64,
}

/// libstdc++'s `std::function<void(TraceEntry const&)>`.
#[repr(C)]
struct Function {
    functor: [usize; 2],
    manager: unsafe extern "C" fn(*mut [usize; 2], *const [usize; 2], i32) -> bool,
    invoker: unsafe extern "C" fn(*const [usize; 2], *const TraceEntry),
}

/// Copies and destroys the functor, which has no content, and answers what it is.
unsafe extern "C" fn manage(to: *mut [usize; 2], _: *const [usize; 2], operation: i32) -> bool {
    const DESTROY: i32 = 3;

    if operation != DESTROY {
        // SAFETY: the caller passes a place for a functor, or for a pointer to its type or to it. Nobody asks for these two.
        unsafe { *to = [0; 2] };
    }
    false
}

/// Receives an event. PyTorch holds the lock of the device, so this must not call PyTorch.
unsafe extern "C" fn receive(_: *const [usize; 2], entry: *const TraceEntry) {
    // SAFETY: PyTorch passes an event, which lives during the call.
    let TraceEntry { action, device: [device, ..], address, bytes, .. } = unsafe { &*entry };
    let event = match action {
        0 => TrackedEvent::Alloc,
        1 => TrackedEvent::FreeRequested,
        2 => TrackedEvent::FreeCompleted,
        3 => TrackedEvent::SegmentAlloc,
        4 => TrackedEvent::SegmentFree,
        5 => TrackedEvent::SegmentMap,
        6 => TrackedEvent::SegmentUnmap,
        _ => return,
    };
    let trackers = TRACKERS.get().map(Vec::as_slice).unwrap_or_default();
    if let Some(tracker) = usize::try_from(*device).ok().and_then(|device| trackers.get(device)) {
        // The panic hook has already printed the panic.
        _ = catch_unwind(|| tracker.event(event, *address, *bytes));
    }
}

fn attach() -> Result<(), &'static str> {
    const STRIPPED: &str = "its libc10_cuda.so has no symbol of the allocator, or is not from PyTorch 2.2 or later";

    let addresses = (address_of(LIBRARY, &[ALLOCATOR]), address_of(LIBRARY, &[TABLE]), address_of(LIBRARY, &ATTACH));
    let (Some(variable), Some(table), Some(attach)) = addresses else { return Err(STRIPPED) };
    // SAFETY: the library is loaded, because PyTorch has initialised CUDA, and is never unloaded. The variable is a pointer to an object with
    // virtual functions, which was set before that. The first word of such an object points behind two words of the table of its class.
    let (allocator, class) = unsafe {
        let allocator = (variable as *const *mut usize).read_volatile();
        (allocator, if allocator.is_null() { 0 } else { *allocator })
    };
    if class != table + 2 * size_of::<usize>() {
        return Err("PYTORCH_CUDA_ALLOC_CONF or the program has replaced its allocator");
    }
    // SAFETY: the name of the method says its parameters. An object of C++ that is passed by value and is not trivial is passed by its
    // address, and stays the caller's. The method copies the function for each device with `manage`.
    unsafe {
        let attach: unsafe extern "C" fn(*mut c_void, *mut Function) =
            std::mem::transmute::<*const (), _>(ptr::with_exposed_provenance(attach));
        let mut function = Function { functor: [0; 2], manager: manage, invoker: receive };
        attach(allocator.cast(), &raw mut function);
    }
    Ok(())
}

fn tracker(device: u32) -> Option<&'static AllocatorTracker<Pool>> {
    TRACKERS.get()?.get(device as usize)
}

fn stop() {
    TRACKERS.get().into_iter().flatten().for_each(AllocatorTracker::stop);
}

/// Attaches to PyTorch's allocator, which has these settings. Python calls it once, after PyTorch has initialised CUDA. Returns an error, or
/// null.
///
/// # Safety
/// `divisions` must point to `count` numbers.
// SAFETY: the names of all functions here start with the prefix of this project, so they cannot clash with others of the program.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gpumem_tensors_attach(
    devices: u32,
    max_split: u64,
    divisions: *const u64,
    count: usize,
) -> *const c_char {
    guarded(|| {
        // SAFETY: required by this function's contract.
        let divisions = unsafe { slice::from_raw_parts(divisions, count) }.to_vec();
        let settings = AllocatorSettings { max_split, divisions, ..AllocatorSettings::default() };
        let new = || (0..devices).map(|_| AllocatorTracker::new(settings.clone())).collect();
        TRACKERS.get_or_init(new).iter().for_each(AllocatorTracker::start);
        attach().inspect_err(|_| stop()).map_err(str::to_owned)?;
        // The backward pass.
        adopt(Threads::named("pt_autograd_"));
        Ok(())
    })
}

/// Returns the number of segment events on a device, which Python returns with the allocator's memory that it reads next. -1 if nothing more
/// is needed.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gpumem_tensors_events(device: u32) -> i64 {
    let events = catch_unwind(|| tracker(device)?.segment_events());
    events.ok().flatten().map_or(-1, |events| events.try_into().unwrap_or(i64::MAX))
}

/// Takes the allocator's memory on a device: an address, a size and a kind for each segment (0, or 1 for an expandable one) and for each
/// block (2 for a tensor, 3 for what another stream may still use). Returns an error, or null.
///
/// # Safety
/// `held` must point to `count` rows.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gpumem_tensors_settle(
    device: u32,
    events: i64,
    held: *const [u64; 3],
    count: usize,
) -> *const c_char {
    const TOO_LATE: &str = "it had expandable segments before gpumem saw them: start a trace or call preload_pytorch() before the first \
                            tensor";

    guarded(|| {
        let kinds = [Held::Segment, Held::Expandable, Held::Block, Held::Awaiting];
        // SAFETY: required by this function's contract.
        let rows = unsafe { slice::from_raw_parts(held, count) }.iter();
        let kind = |kind: u64| usize::try_from(kind).ok().and_then(|kind| kinds.get(kind).copied());
        let held: Vec<_> = rows.filter_map(|[address, bytes, sort]| Some((kind(*sort)?, *address, *bytes))).collect();
        let Some(tracker) = tracker(device) else { return Ok(()) };
        let register = || {
            // It is not known who requested the memory of expandable segments.
            if held.iter().any(|(held, ..)| *held == Held::Expandable) {
                return Err(TOO_LATE.to_owned());
            }
            Pool::register(NAME, device).map_err(|why| why.to_string())
        };
        tracker.settle(&held, events.unsigned_abs(), register).inspect_err(|_| stop())
    })
}

//! The functions of `observe.cpp`.

#![expect(unsafe_code, reason = "these are functions of C++")]

use std::{
    ffi::{CStr, c_char, c_void},
    panic::catch_unwind,
};

use gpumem_recording::{AllocatorSettings, Held, TrackedEvent};

use crate::{Error, Result, observer};

unsafe extern "C" {
    fn gpumem_tch_init(devices: *mut i32, is_native: *mut bool) -> *mut c_char;
    fn gpumem_tch_attach(event: extern "C" fn(i32, i32, u64, u64)) -> *mut c_char;
    fn gpumem_tch_snapshot(to: *mut c_void, line: extern "C" fn(*mut c_void, i32, i32, u64, u64)) -> *mut c_char;
    fn gpumem_tch_empty_cache() -> *mut c_char;
    fn free(text: *mut c_void);
}

/// The settings, segments and blocks of the allocator at one moment, on all devices.
pub(crate) struct Snapshot {
    pub(crate) settings: AllocatorSettings,
    held: Vec<(u32, (Held, u64, u64))>,
}

impl Snapshot {
    pub(crate) fn of_device(&self, ordinal: u32) -> Vec<(Held, u64, u64)> {
        self.held.iter().filter(|(of, _)| *of == ordinal).map(|(_, held)| *held).collect()
    }
}

/// Initialises CUDA. Returns the number of devices, and whether PyTorch uses its own allocator.
pub(crate) fn init() -> Result<(u32, bool)> {
    let (mut devices, mut is_native) = (0, false);
    // SAFETY: the function writes to these variables, which live longer than the call.
    check(unsafe { gpumem_tch_init(&raw mut devices, &raw mut is_native) })?;
    Ok((u32::try_from(devices).unwrap_or(0), is_native))
}

/// Makes PyTorch pass its events to [`observer::event`].
pub(crate) fn attach() -> Result<()> {
    // SAFETY: the function may be called at any time, on any thread, and does not unwind.
    check(unsafe { gpumem_tch_attach(event) })
}

extern "C" fn event(action: i32, device: i32, address: u64, bytes: u64) {
    let event = match action {
        1 => TrackedEvent::Alloc,
        2 => TrackedEvent::FreeRequested,
        3 => TrackedEvent::FreeCompleted,
        4 => TrackedEvent::SegmentAlloc,
        5 => TrackedEvent::SegmentFree,
        6 => TrackedEvent::SegmentMap,
        7 => TrackedEvent::SegmentUnmap,
        _ => return,
    };
    let Ok(device) = usize::try_from(device) else { return };
    // The panic hook has already printed the panic.
    _ = catch_unwind(|| observer::event(device, event, address, bytes));
}

pub(crate) fn snapshot() -> Result<Snapshot> {
    let mut snapshot = Snapshot { settings: AllocatorSettings::default(), held: Vec::new() };
    // SAFETY: only `line` gets the pointer, only during this call, and it treats the pointer as one to a `Snapshot`, which it is.
    check(unsafe { gpumem_tch_snapshot((&raw mut snapshot).cast(), line) })?;
    Ok(snapshot)
}

extern "C" fn line(to: *mut c_void, kind: i32, device: i32, address: u64, bytes: u64) {
    // SAFETY: `to` is the pointer from `snapshot`. That function waits for this call, so nothing else uses the variable.
    let to = unsafe { &mut *to.cast::<Snapshot>() };
    let held = match kind {
        1 => return to.settings.max_split = bytes,
        2 => return to.settings.divisions.push(bytes),
        3 => Held::Segment,
        4 => Held::Expandable,
        5 => Held::Block,
        6 => Held::Awaiting,
        _ => return,
    };
    if let Ok(device) = u32::try_from(device) {
        to.held.push((device, (held, address, bytes)));
    }
}

pub(crate) fn empty_cache() -> Result<()> {
    // SAFETY: the function may be called at any time, on any thread.
    check(unsafe { gpumem_tch_empty_cache() })
}

/// Converts the result of a function of `observe.cpp`. Null means success. The text of an exception becomes an error, and is freed.
fn check(text: *mut c_char) -> Result<()> {
    if text.is_null() {
        return Ok(());
    }
    // SAFETY: the functions return null, or a string that ends with a zero byte and that no other code refers to.
    let message = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    // SAFETY: the string was allocated by `strdup`, and is not used after this.
    unsafe { free(text.cast()) };
    Err(Error::PyTorch(message))
}

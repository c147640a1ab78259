//! The hooks, which are our functions in the slots. A hook calls the driver and records the call.
//!
//! A thread may be cancelled inside the driver (`pthread_cancel`). The C library then unwinds the thread's stack through the hook.
//! Therefore hooks and the driver's functions have the ABI `C-unwind`, no lock is held during a call, and destructors restore what the hook
//! has changed. (A program that is built with `panic = "abort"` runs no destructors: calls that its thread makes while it unwinds are not
//! recorded.) Nothing else unwinds out of a hook: panics are caught, and a thread cannot be cancelled in the hook's own code.

use std::{
    mem,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, fence},
};

use crate::sys::{
    calls::{
        Arguments, CALLS, Call, CallRecorder, CallShape, Caller, DefaultStream, DriverShape, DriverWork, IdKind,
        MemoryKind, Observe, STATE, ThreadState, Uncounted, in_state, is_new_launch, record_entry, record_exit,
        was_launched, with_calls,
    },
    cuda,
    process::without_cancellation,
};

/// All data that hooks read. It starts at a cache line, so that `active` and the first rows of `drivers` share that line. These rows belong
/// to the two calls that programs make most often.
#[repr(C, align(64))]
pub(super) struct Hooks {
    /// Hooks record calls only while this is true. A hook may be called while it is false: by a thread that was already on its way into the
    /// hook, or by another tool that replaced our pointer and still calls it. It is false in the child process of a fork, because locks of
    /// the observer may be held there by threads that do not exist.
    pub(super) active: AtomicBool,
    /// The driver's own implementations, by row of [`CALLS`]. Each is set before its slot is replaced.
    pub(super) drivers: [AtomicUsize; CALLS.len()],
}

pub(super) static HOOKS: Hooks =
    Hooks { active: AtomicBool::new(false), drivers: [const { AtomicUsize::new(0) }; CALLS.len()] };

macro_rules! hooks {
    ($($number:literal $name:ident($($argument:ident),*): $shape:expr;)*) => {
        /// The rows of [`CALLS`] by name.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy)]
        pub(super) enum CallRow { $($name),* }

        /// One hook for each function. Each integer and each pointer is passed in its own register, whatever its width, so a hook receives
        /// and passes on each of them as a whole word.
        #[allow(non_snake_case)]
        pub(super) mod hook {
            use super::*;

            $(
                pub(in super::super) unsafe extern "C-unwind" fn $name<O: Observe>($($argument: u64),*) -> u32 {
                    type Implementation = unsafe extern "C-unwind" fn($(hooks!(@word $argument)),*) -> u32;
                    let row = CallRow::$name as usize;
                    let words = [$($argument),*];
                    // SAFETY: the words are the arguments of this call, which has this shape.
                    unsafe {
                        intercept::<O, _>(row, $shape, &words, |driver| {
                            // SAFETY: it is the address of the driver's implementation, which has these arguments and
                            // returns a `CUresult`.
                            let driver = mem::transmute::<usize, Implementation>(driver);
                            driver($($argument),*)
                        })
                    }
                }
            )*
        }

        /// Returns the hooks that send calls to `O`, by row.
        pub(super) fn hooks<O: Observe>() -> [usize; CALLS.len()] {
            [$(hook::$name::<O> as *const () as usize),*]
        }
    };
    (@word $argument:ident) => { u64 };
}
with_calls!(hooks);

/// Returns the current context.
fn context() -> u64 {
    cuda::current_context().map_or(0, |context| context as u64)
}

/// Calls the driver and records the call.
///
/// # Safety
/// `words` must be the arguments of a call of this shape, and `call` must make that call through the implementation at the address that it
/// receives.
#[allow(clippy::inline_always, reason = "the shape is a constant in each hook, so the compiler removes most of this")]
#[inline(always)]
unsafe fn intercept<O: Observe, const N: usize>(
    row: usize,
    shape: CallShape,
    words: &[u64; N],
    call: impl FnOnce(usize) -> u32,
) -> u32 {
    let driver = || HOOKS.drivers[row].load(Relaxed);
    let driver = match driver() {
        // The address is written before the slot, but an Arm processor may read it before it reads the slot. The fence prevents that.
        0 if cfg!(target_arch = "aarch64") => {
            fence(Acquire);
            driver()
        }
        driver => driver,
    };
    if let CallShape::Driver(DriverShape::Launch { function }) = shape
        && was_launched(words[function], context)
    {
        return call(driver);
    }
    let state = STATE.get();
    // Calls that an implementation makes are part of the call that is already being recorded.
    if matches!(state, ThreadState::Driver | ThreadState::Library) || !HOOKS.active.load(Relaxed) {
        return call(driver);
    }
    // SAFETY: the words are not moved or dropped before this returns.
    let arguments = unsafe { Arguments::new(words.as_ptr()) };
    let first = words[0];
    if let CallShape::Driver(shape) = shape
        // The memory that the observer's own calls take is part of the call that it observes.
        && (state == ThreadState::Observer
            || matches!(shape, DriverShape::Launch { function } if !is_new_launch(words[function], context)))
    {
        return call(driver);
    }
    if state == ThreadState::Observer {
        // SAFETY: the arguments belong to a call of this shape, and this is the first.
        return unsafe {
            around(shape, first, arguments, || call(driver), &CallRecorder::<Uncounted<O>>::new(Caller::Dispatch))
        };
    }
    // SAFETY: as above.
    unsafe { around(shape, first, arguments, || call(driver), &CallRecorder::<O>::new(Caller::Dispatch)) }
}

/// Makes a call, and records it before and after.
///
/// # Safety
/// `arguments` must belong to the call, which must have this shape, and `first` the first of them.
#[allow(clippy::inline_always, reason = "as above")]
#[inline(always)]
unsafe fn around(
    shape: CallShape,
    first: u64,
    arguments: Arguments,
    call: impl FnOnce() -> u32,
    to: &CallRecorder<impl Observe>,
) -> u32 {
    if let CallShape::PrimaryRelease | CallShape::PrimaryReset = shape {
        return change_primary_context(shape, first, call, to);
    }
    // SAFETY: the arguments belong to a call of this shape.
    unsafe { record_entry(shape, arguments, to) };
    let result = in_state(ThreadState::Driver, call);
    // SAFETY: as above; the call has returned.
    unsafe { record_exit(shape, result, arguments, to) };
    result
}

/// Releases a reference to a primary context, or resets the context. Queries the driver for the context, and whether the reference was the
/// last one.
#[cold]
fn change_primary_context(
    shape: CallShape,
    device: u64,
    call: impl FnOnce() -> u32,
    to: &CallRecorder<impl Observe>,
) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
    let device = device as i32;
    let context = without_cancellation(|| in_state(ThreadState::Driver, || cuda::primary_context(device)));
    let record_end = || {
        if let Some(handle) = context {
            to.record(&Call::ContextGone { handle });
        }
    };
    if shape == CallShape::PrimaryReset {
        record_end();
    }
    let result = in_state(ThreadState::Driver, call);
    let exists = || in_state(ThreadState::Driver, || cuda::has_primary_context(device));
    if shape == CallShape::PrimaryRelease && !without_cancellation(exists) {
        record_end();
    }
    to.record(&Call::DriverDone { device: u32::try_from(device).ok(), work: DriverWork::ContextEnded });
    result
}

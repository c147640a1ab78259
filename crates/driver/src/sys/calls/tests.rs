//! Tests calls inside the observer, and what the stand-in driver does not have. The other calls are tested in `tests/standin/calls.rs`,
//! `graphs.rs` and `rejections.rs`.

use std::{cell::Cell, ptr};

use super::{arguments::allocated_array, *};

#[test]
fn an_array_of_an_unknown_format_is_uncounted() {
    assert_eq!(allocated_array(7, [10, 1, 0], 0xb0, 1, 1), Call::Uncounted);
}

#[test]
fn stream_0_is_the_thread_s_own_in_calls_with_that_suffix() {
    for (_, name, shape) in CALLS {
        let (CallShape::AllocOnStream(default)
        | CallShape::AllocFromPool(default)
        | CallShape::CaptureStart(default)
        | CallShape::CaptureEnd(default)) = shape
        else {
            continue;
        };
        let own = if name.ends_with("_ptsz") { 2 } else { 0 };
        assert_eq!([0, 9].map(|stream| default.resolve(stream)), [own, 9], "{name}");
    }
}

/// The capture may have ended all the same.
#[test]
fn the_end_of_a_capture_is_recorded_if_it_fails() {
    thread_local! {
        static LAST: Cell<Option<Call>> = const { Cell::new(None) };
    }
    struct Last;

    impl Observe for Last {
        fn other(_: &Caller, call: &Call) {
            LAST.set(Some(*call));
        }
    }

    let (words, last) = ([9, 0], CallRecorder::<Last>::new(Caller::Dispatch));
    // SAFETY: the call has two arguments, and nothing is read at the second one of a call that failed.
    unsafe {
        record_exit(CallShape::CaptureEnd(DefaultStream::Legacy), 901, Arguments::new(words.as_ptr()), &last);
    }
    assert_eq!(LAST.get(), Some(Call::CaptureEnded { stream: 9, succeeded: false }));
}

#[test]
fn calls_of_the_observer_are_uncounted_except_in_as_program() {
    thread_local! {
        static RECORDED: std::cell::RefCell<Vec<Call>> = const { std::cell::RefCell::new(Vec::new()) };
    }
    struct Reentrant;

    fn free(name: u64) {
        let caller = Caller::Cupti(Context::default());
        if STATE.get() == ThreadState::Observer {
            CallRecorder::<Uncounted<Reentrant>>::new(caller).freeing(name);
        } else {
            CallRecorder::<Reentrant>::new(caller).freeing(name);
        }
    }

    impl Observe for Reentrant {
        fn freeing(_: &Caller, name: u64) {
            RECORDED.with_borrow_mut(|calls| calls.push(Call::Freeing { id_kind: IdKind::Address, id: name }));
            if name == 1 {
                as_observer(|| {
                    free(2);
                    as_program(|| free(3));
                    free(4);
                });
            }
        }

        fn other(_: &Caller, call: &Call) {
            RECORDED.with_borrow_mut(|calls| calls.push(*call));
        }
    }

    free(1);
    free(5);
    let freeing = |name| Call::Freeing { id_kind: IdKind::Address, id: name };
    let expected = [freeing(1), Call::Uncounted, freeing(3), Call::Uncounted, freeing(5)];
    assert_eq!(RECORDED.take(), expected);
}

/// The observer contains cancellation points, such as a write to stderr. The thread is cancelled only after the observer.
#[cfg(target_os = "linux")]
#[test]
fn a_thread_is_not_cancelled_in_the_observer() {
    use std::{
        ffi::{c_int, c_ulong, c_void},
        sync::atomic::{AtomicU32, Ordering::SeqCst},
    };

    unsafe extern "C-unwind" {
        fn pthread_create(
            thread: *mut c_ulong,
            attributes: *const c_void,
            start: extern "C-unwind" fn(*mut c_void) -> *mut c_void,
            argument: *mut c_void,
        ) -> c_int;
        fn pthread_self() -> c_ulong;
        fn pthread_cancel(thread: c_ulong) -> c_int;
        fn pthread_testcancel();
        fn pthread_join(thread: c_ulong, result: *mut *mut c_void) -> c_int;
    }

    static STEPS: AtomicU32 = AtomicU32::new(0);

    extern "C-unwind" fn start(_: *mut c_void) -> *mut c_void {
        // SAFETY: the functions concern this thread alone.
        unsafe {
            pthread_cancel(pthread_self());
            as_observer_cold(|| {
                pthread_testcancel();
                STEPS.fetch_add(1, SeqCst);
            });
            pthread_testcancel();
        }
        STEPS.fetch_add(10, SeqCst);
        ptr::null_mut()
    }

    let (mut thread, mut result) = (0, ptr::null_mut());
    // SAFETY: the thread is joined once, and has no arguments.
    unsafe {
        assert_eq!(pthread_create(&raw mut thread, ptr::null(), start, ptr::null_mut()), 0);
        assert_eq!(pthread_join(thread, &raw mut result), 0);
    }
    // `PTHREAD_CANCELED`
    assert_eq!((STEPS.load(SeqCst), result.addr()), (1, usize::MAX));
}

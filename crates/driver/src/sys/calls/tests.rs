//! Tests decoding with made-up calls. The other calls are tested in `tests/standin/calls.rs` and `refusals.rs`.

use std::{cell::Cell, ptr};

use super::{
    arguments::{Array3DDescriptor, ArrayDescriptor},
    *,
};

#[derive(Clone, Copy)]
enum Side {
    Enter,
    Exit(u32),
}
use Side::{Enter, Exit};

/// The call that is recorded for one side of a call.
fn call(name: &str, side: Side, words: &[u64]) -> Option<Call> {
    struct Once(Cell<Option<Call>>);

    impl RecordCall for Once {
        fn record(&self, call: &Call) {
            assert_eq!(self.0.replace(Some(*call)), None, "one fact for each side");
        }
    }

    let (.., shape) = *CALLS.iter().find(|(_, of, _)| *of == name).expect("it is in the table");
    let recorded = Once(Cell::new(None));
    // SAFETY: the tests pass the arguments that the call has.
    unsafe {
        let arguments = Arguments::new(words.as_ptr());
        match side {
            Enter => record_entry(shape, arguments, &recorded),
            Exit(result) => record_exit(shape, result, arguments, &recorded),
        }
    }
    recorded.0.get()
}

fn address<T>(of: &T) -> u64 {
    ptr::from_ref(of) as u64
}

#[test]
fn the_size_of_an_array_is_that_of_its_elements() {
    let out = 0x7000_u64;
    let flat = ArrayDescriptor { width: 10, height: 0, format: 0x20, channels: 2 };
    let expected = |bytes| Call::Allocated { id_kind: IdKind::Array, id: out, bytes, memory: Memory::Device };
    assert_eq!(call("cuArrayCreate_v2", Exit(0), &[address(&out), address(&flat)]), Some(expected(80)));
    let cube = Array3DDescriptor { width: 8, height: 4, depth: 2, format: 0x01, channels: 4, flags: 0 };
    assert_eq!(call("cuArray3DCreate_v2", Exit(0), &[address(&out), address(&cube)]), Some(expected(256)));
    // The array has 8·4·2 + 4·2·1 + 2·1·1 + 1 = 75 elements.
    assert_eq!(call("cuMipmappedArrayCreate", Exit(0), &[address(&out), address(&cube), 4]), Some(expected(300)));
    let strange = ArrayDescriptor { width: 10, height: 1, format: 0xb0, channels: 1 };
    assert_eq!(call("cuArrayCreate_v2", Exit(0), &[address(&out), address(&strange)]), Some(Call::Uncounted));
}

#[test]
fn calls_of_the_observer_are_uncounted_except_in_as_program() {
    thread_local! {
        static RECORDED: std::cell::RefCell<Vec<Call>> = const { std::cell::RefCell::new(Vec::new()) };
    }
    struct Reentrant;

    fn free(name: u64) {
        let caller = Caller::Cupti(Context::default());
        let recorder = CallRecorder::<Reentrant>::new(caller);
        if STATE.get() == ThreadState::Observer {
            recorder.as_uncounted().freeing(name);
        } else {
            recorder.freeing(name);
        }
    }

    impl Observe for Reentrant {
        fn pooled(_: &Caller, _: u64, _: u64, _: u64) {}

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

#[test]
fn captures_graphs_and_imports_are_decoded() {
    let out = 0x7000_u64;
    let at = address(&out);
    for (name, stream) in [("cuStreamBeginCapture_v2", 0), ("cuStreamBeginCapture_v2_ptsz", 2)] {
        assert_eq!(call(name, Enter, &[0, 1]), None, "it may fail");
        assert_eq!(call(name, Exit(0), &[0, 1]), Some(Call::CaptureBegun { stream }));
        assert_eq!(call(name, Exit(0), &[9, 1]), Some(Call::CaptureBegun { stream: 9 }));
        assert_eq!(call(name, Exit(900), &[9, 1]), None);
    }
    for (name, stream) in [("cuStreamEndCapture", 0), ("cuStreamEndCapture_ptsz", 2)] {
        for (result, succeeded) in [(0, true), (901, false)] {
            assert_eq!(call(name, Exit(result), &[0, at]), Some(Call::CaptureEnded { stream, succeeded }));
        }
    }
    // Stream 0 means the calling thread's own stream here.
    let pooled = |stream| Some(Call::Pooled { address: out, bytes: 64, stream, pool: None });
    assert_eq!(call("cuMemAllocAsync", Exit(0), &[at, 64, 0]), pooled(0));
    assert_eq!(call("cuMemAllocAsync_ptsz", Exit(0), &[at, 64, 0]), pooled(2));
    assert_eq!(call("cuMemAllocAsync_ptsz", Exit(0), &[at, 64, 9]), pooled(9));
    // Launches are recorded from the time at which a graph is known to allocate.
    assert_eq!([call("cuGraphLaunch", Enter, &[7, 9]), call("cuGraphLaunch", Exit(0), &[7, 9])], [None, None]);
    assert!(take_unrecorded_launches() && !record_graph_launches() && !take_unrecorded_launches());
    for name in ["cuGraphLaunch", "cuGraphUpload_ptsz", "cuDeviceGraphMemTrim"] {
        assert_eq!(call(name, Enter, &[7, 9]), Some(Call::Graphs { done: false }));
        for result in [0, 700] {
            assert_eq!(call(name, Exit(result), &[7, 9]), Some(Call::Graphs { done: true }));
        }
    }
    assert_eq!(
        call("cuMemImportFromShareableHandle", Exit(0), &[at, 77, 1]),
        Some(Call::ForeignHandle { handle: out })
    );
    let foreign = |id_kind| Some(Call::Foreign { id_kind, id: out });
    assert_eq!(call("cuMemPoolImportPointer", Exit(0), &[at, 5, 8]), foreign(IdKind::Address));
    assert_eq!(call("cuExternalMemoryGetMappedMipmappedArray", Exit(0), &[at, 5, 8]), foreign(IdKind::Array));
    assert_eq!(call("cuMemPoolImportPointer", Exit(1), &[8, 5, 8]), None, "nothing is read of a call that failed");
}

#[test]
fn no_call_is_listed_twice() {
    for (at, (number, name, _)) in CALLS.iter().enumerate() {
        let others = || CALLS[at + 1..].iter();
        assert!(others().all(|(_, other, _)| other != name), "{name}");
        assert!(*number == 0 || others().all(|(other, ..)| other != number), "{number}");
    }
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

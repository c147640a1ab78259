//! Calls of the driver by name.

use std::{ffi::CString, ptr, sync::OnceLock};

use cudarc::driver::sys;

/// `CUstreamCaptureMode`
#[derive(Clone, Copy, Debug)]
pub(crate) enum Capture {
    Global,
    ThreadLocal,
    Relaxed,
}

type Function = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> i32;

/// The result of a call. The tests name only functions of at most six integers and pointers, which x86-64 and arm64 pass in
/// registers, and pass pointers to what is alive and as large as the function reads or writes.
pub(crate) fn call(function: &str, arguments: &[u64]) -> i32 {
    let name = CString::new(function).expect("names have no zeros");
    // SAFETY: loading the driver has no preconditions.
    let library = unsafe { sys::culib() };
    // SAFETY: each function that the tests name has this type, seen from its caller.
    let call = unsafe { library.get::<Function>(name.as_bytes_with_nul()) }.expect(function);
    let mut words = [0; 6];
    words[..arguments.len()].copy_from_slice(arguments);
    let [first, second, third, fourth, fifth, sixth] = words;
    // SAFETY: the arguments are those of the function, as said above.
    unsafe { call(first, second, third, fourth, fifth, sixth) }
}

#[track_caller]
pub(crate) fn done(function: &str, arguments: &[u64]) {
    let code = call(function, arguments);
    assert_eq!(code, 0, "{function} {arguments:x?}");
}

/// What a call puts where its out-parameter is; the rest of the word is 0 where that is narrower.
#[track_caller]
pub(crate) fn put(function: &str, arguments: impl FnOnce(u64) -> Vec<u64>) -> u64 {
    let mut out = Box::new(0_u64);
    let at = ptr::from_mut(&mut *out).expose_provenance();
    done(function, &arguments(at as u64));
    *std::hint::black_box(out)
}

/// The primary context of device 0, retained for ever.
pub(crate) fn retained() -> u64 {
    static CONTEXT: OnceLock<u64> = OnceLock::new();
    *CONTEXT.get_or_init(|| put("cuDevicePrimaryCtxRetain", |out| vec![out, 0]))
}

/// Closes a file descriptor that the driver gave out.
pub(crate) fn close(descriptor: u64) {
    // SAFETY: it is the caller's own; the stand-in driver's are none, which is refused.
    unsafe { libc::close(i32::try_from(descriptor).expect("it is an int")) };
}

/// The same file for processes that this one starts.
pub(crate) fn inherited(descriptor: u64) -> u64 {
    // SAFETY: duplicating a descriptor has no preconditions.
    let copy = unsafe { libc::dup(i32::try_from(descriptor).expect("it is an int")) };
    u64::try_from(copy).expect("it was duplicated")
}

/// Opens a block of another process, whose handle travels as a struct.
pub(crate) fn ipc_open(handle: [u64; 8]) -> u64 {
    #[repr(C)]
    struct Handle([u64; 8]);
    type Open = unsafe extern "C" fn(*mut u64, Handle, u32) -> i32;
    const CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: u32 = 1;
    // SAFETY: as above.
    let library = unsafe { sys::culib() };
    // SAFETY: the function has this type.
    let open = unsafe { library.get::<Open>(b"cuIpcOpenMemHandle_v2\0") }.expect("each driver has it");
    let mut at = 0;
    // SAFETY: the out-parameter is live.
    let code = unsafe { open(&raw mut at, Handle(handle), CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) };
    assert_eq!(code, 0, "cuIpcOpenMemHandle_v2");
    at
}

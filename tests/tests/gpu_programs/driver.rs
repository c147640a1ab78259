//! Calls of the driver, and helpers for them.

use std::sync::OnceLock;

use cudarc::driver::sys;
pub(crate) use gpumem_tests::driver::{call, done, put};

/// `CUstreamCaptureMode`
#[derive(Clone, Copy, Debug)]
pub(crate) enum Capture {
    Global,
    ThreadLocal,
    Relaxed,
}

/// Returns the primary context of device 0, retained for ever.
pub(crate) fn retained() -> u64 {
    static CONTEXT: OnceLock<u64> = OnceLock::new();
    *CONTEXT.get_or_init(|| put("cuDevicePrimaryCtxRetain", |out| vec![out, 0]))
}

/// Closes a file descriptor that the driver gave out.
pub(crate) fn close(descriptor: u64) {
    // SAFETY: it is the caller's own; the stand-in driver's are none, which is refused.
    unsafe { libc::close(i32::try_from(descriptor).expect("it is an int")) };
}

/// Returns the same file for processes that this one starts.
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
    // SAFETY: loading the driver has no preconditions.
    let library = unsafe { sys::culib() };
    // SAFETY: the function has this type.
    let open = unsafe { library.get::<Open>(b"cuIpcOpenMemHandle_v2\0") }.expect("each driver has it");
    let mut at = 0;
    // SAFETY: the out-parameter is live.
    let code = unsafe { open(&raw mut at, Handle(handle), CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) };
    assert_eq!(code, 0, "cuIpcOpenMemHandle_v2");
    at
}

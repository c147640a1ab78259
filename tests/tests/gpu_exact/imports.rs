//! Tests memory that one process exports and another one imports.

use cudarc::driver::sys;
use gpumem_tests::{OwnProcess, part};

use super::{
    graphs::{MIB, synchronize},
    *,
};

/// Duplicates a descriptor, so that the processes that this one starts inherit it.
fn inherited(descriptor: u64) -> u64 {
    // SAFETY: duplicating a descriptor has no preconditions.
    let copy = unsafe { libc::dup(i32::try_from(descriptor).expect("it is an int")) };
    u64::try_from(copy).expect("it was duplicated")
}

/// Opens a block of another process, whose handle is passed as a struct.
fn ipc_open(handle: [u64; 8]) -> u64 {
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

/// The parent exports a handle, a pool with a block, and an IPC block. The child imports and releases all three.
#[test]
fn imports_in_two_processes() {
    let Some(_guard) = device() else { return };
    let (trace, stream) = (exact(), cu::stream());
    let check = |what: &str, used: u64| {
        let data = trace.data();
        let found = (data.used.get(), data.lost, data.untracked);
        println!("the exporting process, {what}: (used, lost, untracked) {found:?}");
        assert_eq!(found, (used.cast_signed(), 0, 0), "{what}");
    };
    let plain = call_for_output("cuMemAlloc_v2", |out| vec![out, 4 * MIB]);
    let mut ipc = [0_u64; 8];
    call_ok("cuIpcGetMemHandle", &[ipc.as_mut_ptr() as u64, plain]);
    let properties = [1 | 1 << 32, 1_u64, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let handle = call_for_output("cuMemCreate", |out| vec![out, 2 * MIB, properties.as_ptr() as u64, 0]);
    let pool = call_for_output("cuMemPoolCreate", |out| vec![out, properties.as_ptr() as u64]);
    let pooled = call_for_output("cuMemAllocFromPoolAsync", |out| vec![out, 3 * MIB, pool, stream]);
    synchronize();
    let descriptors = [("cuMemExportToShareableHandle", handle), ("cuMemPoolExportToShareableHandle", pool)]
        .map(|(export, what)| inherited(call_for_output(export, |out| vec![out, what, 1, 0]) & 0xffff_ffff));
    // The driver exports pointers only of a pool that was exported.
    let mut pointer = [0_u64; 8];
    call_ok("cuMemPoolExportPointer", &[pointer.as_mut_ptr() as u64, pooled]);
    check("exported", 9 * MIB);
    let words = [ipc.as_slice(), &pointer, &descriptors].concat();
    let words: Vec<_> = std::hint::black_box(words).iter().map(u64::to_string).collect();
    println!("{}", OwnProcess::new("imports::importing").part(&words.join(",")).passes().stdout);
    check("after the importing process", 9 * MIB);
    call_ok("cuMemFree_v2", &[plain]);
    call_ok("cuMemRelease", &[handle]);
    call_ok("cuMemFreeAsync", &[pooled, stream]);
    synchronize();
    call_ok("cuMemPoolDestroy", &[pool]);
    check("freed", 0);
    call_ok("cuStreamDestroy_v2", &[stream]);
}

/// This test is the importing process of `imports_in_two_processes`.
#[test]
fn importing() {
    let Some(words) = part() else { return };
    let words: Vec<u64> = words.split(',').map(|word| word.parse().expect("a number")).collect();
    let (ipc, pointer, handle, pool) = (&words[..8], &words[8..16], words[16], words[17]);
    let _guard = device();
    let (trace, stream) = (exact(), cu::stream());
    let check = |what: &str| {
        let data = trace.data();
        let found = (data.used.get(), data.peaked.get(), data.lost, data.untracked);
        println!("the importing process, {what}: (used, peaked, lost, untracked) {found:?}");
        assert_eq!(found, (0, 0, 0, 0), "{what}");
    };
    let imported = call_for_output("cuMemImportFromShareableHandle", |out| vec![out, handle, 1]);
    let at = call_for_output("cuMemAddressReserve", |out| vec![out, 2 * MIB, 0, 0, 0]);
    call_ok("cuMemMap", &[at, 2 * MIB, 0, imported, 0]);
    check("a handle imported and mapped");
    call_ok("cuMemRelease", &[imported]);
    check("the handle released");
    call_ok("cuMemUnmap", &[at, 2 * MIB]);
    call_ok("cuMemAddressFree", &[at, 2 * MIB]);
    check("unmapped");
    let pool = call_for_output("cuMemPoolImportFromShareableHandle", |out| vec![out, pool, 1, 0]);
    for free in ["cuMemFreeAsync", "cuMemFree_v2"] {
        let at = call_for_output("cuMemPoolImportPointer", |out| vec![out, pool, pointer.as_ptr() as u64]);
        check("a block of a pool imported");
        call_ok(free, &[at, stream]);
        synchronize();
        check(free);
    }
    call_ok("cuMemPoolDestroy", &[pool]);
    check("the pool destroyed");
    let at = ipc_open(ipc.try_into().expect("64 bytes"));
    check("an IPC block opened");
    call_ok("cuIpcCloseMemHandle", &[at]);
    check("and closed");
}

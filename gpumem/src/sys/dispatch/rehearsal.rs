//! For benchmarks: the hooks of the stream-ordered calls, around two functions that stand for the driver's.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};

use super::hooks::{CallRow, HOOKS, hook};
use crate::sys::calls::Observe;

/// `cuMemAllocAsync` and `cuMemFreeAsync` on a stream, through the hooks.
pub(crate) fn pair<O: Observe>(stream: u64, bytes: u64) {
    let mut address = 0_u64;
    // SAFETY: the hooks call the two functions below, with the arguments that these expect.
    unsafe {
        hook::cuMemAllocAsync::<O>((&raw mut address) as u64, bytes, stream);
        hook::cuMemFreeAsync::<O>(std::hint::black_box(address), stream);
    }
}

/// The same without hooks.
pub(crate) fn bare_pair(stream: u64, bytes: u64) {
    let mut address = 0_u64;
    // SAFETY: the out-parameter is live.
    unsafe {
        std::hint::black_box(alloc as unsafe extern "C" fn(u64, u64, u64) -> u32)(
            (&raw mut address) as u64,
            bytes,
            stream,
        );
    }
    std::hint::black_box(free as extern "C" fn(u64, u64) -> u32)(std::hint::black_box(address), stream);
}

pub(crate) fn begin() {
    HOOKS.drivers[CallRow::cuMemAllocAsync as usize].store(alloc as *const () as usize, Relaxed);
    HOOKS.drivers[CallRow::cuMemFreeAsync as usize].store(free as *const () as usize, Relaxed);
    HOOKS.active.store(true, SeqCst);
}

unsafe extern "C" fn alloc(out: u64, _: u64, _: u64) -> u32 {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let next = NEXT.load(Relaxed);
    NEXT.store(next.wrapping_add(1), Relaxed);
    // SAFETY: the caller passes a live out-parameter.
    unsafe { (out as *mut u64).write(0x7f00_0000_0000 + (next as u64 % 64) * 4096) };
    0
}

extern "C" fn free(_: u64, _: u64) -> u32 {
    0
}

//! Helpers for the functions that replace NCCL's.

use std::{ffi::c_void, path::PathBuf, ptr::NonNull};

use cudarc::driver::sys;
use libloading::Library;
use once_cell::sync::OnceCell;

use super::state::{inside, is_dry};
use crate::sys::dl;

/// Copies on the device, instead of NCCL. Copies from or to dry memory are skipped. Errors of the driver are ignored, because the values of
/// a rank are not known in a dry run anyway.
///
/// # Safety
/// The program must have requested this copy, on this stream.
pub unsafe fn copy_on_device(from: u64, to: u64, bytes: usize, stream: u64) {
    if !is_dry(from) && !is_dry(to) {
        // SAFETY: the program requested this copy on this stream, by the contract of this function, and both buffers have memory.
        _ = inside(|| unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream as *mut _) });
    }
}

/// Returns NCCL's own function of this name. The program has loaded NCCL, because it calls it.
pub fn function(name: &str) -> Option<NonNull<c_void>> {
    static NCCL: OnceCell<Option<Library>> = OnceCell::new();

    let open = || dl::open("NCCL", [PathBuf::from("libnccl.so.2")]).ok().map(|(library, _)| library);
    let library = NCCL.get_or_init(open).as_ref()?;
    // SAFETY: the symbol is a function, of which only the address is taken.
    unsafe { library.get(name.as_bytes()) }.ok().map(|function| *function)
}

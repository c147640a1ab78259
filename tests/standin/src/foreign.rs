//! Makes a slot point out of the library from the start, as if another tool had been there first (`foreign_slot=cuMemAlloc_v2`).
//!
//! gpumem may look at the slots before it calls the driver, so this happens while the library is loaded.

use std::env;
use std::ffi::c_int;
use std::process;
use std::sync::atomic::Ordering;

use crate::stubs::Slot;
use crate::{cuda, graphs, imports, memory, modules, physical, work};

/// A function that the loader calls when it loads the library.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    let settings = env::var("GPUMEM_STANDIN").unwrap_or_default();
    let named = settings.split(',').filter_map(|entry| entry.trim().strip_prefix("foreign_slot="));
    for function in named {
        let slots =
            [cuda::SLOTS, memory::SLOTS, physical::SLOTS, graphs::SLOTS, imports::SLOTS, modules::SLOTS, work::SLOTS]
                .concat();
        let Some((_, slot)) = slots.iter().find(|(name, _)| *name == function) else {
            eprintln!("gpumem-standin: GPUMEM_STANDIN: `foreign_slot={function}`: no such function");
            process::abort();
        };
        point_elsewhere(slot);
    }
}

/// Writes a jump to the slot's function into new memory, and points the slot at the jump.
fn point_elsewhere(slot: &Slot) {
    const READ_WRITE: c_int = libc::PROT_READ | libc::PROT_WRITE;
    const READ_EXECUTE: c_int = libc::PROT_READ | libc::PROT_EXEC;
    const PRIVATE_ANONYMOUS: c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    const PAGE: usize = 4096;
    // This is `jmp qword ptr [rip]`, and the address after it.
    let mut jump = [0; 14];
    jump[..2].copy_from_slice(&[0xff, 0x25]);
    jump[6..].copy_from_slice(&(slot.load(Ordering::Relaxed) as u64).to_le_bytes());
    // SAFETY: both functions belong to the C library. The new page is used only here, is large enough for the jump, and is never unmapped;
    // it is written before it is made executable.
    let page = unsafe {
        let page = libc::mmap(std::ptr::null_mut(), PAGE, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0);
        if page == libc::MAP_FAILED {
            process::abort();
        }
        page.cast::<[u8; 14]>().write(jump);
        if libc::mprotect(page, PAGE, READ_EXECUTE) != 0 {
            process::abort();
        }
        page
    };
    slot.store(page.cast(), Ordering::Release);
}

#![deny(warnings)]
#![allow(clippy::all, clippy::pedantic, clippy::undocumented_unsafe_blocks, reason = "`unsafe` is for the test alone")]
//! Traced functions that are `unsafe`.

use gpumem::gpu_mem_trace;

#[gpu_mem_trace]
unsafe fn read(at: *const u32) -> u32 {
    unsafe { *at }
}

#[gpu_mem_trace]
unsafe extern "C" fn read_for_c(at: *const u32) -> u32 {
    unsafe { *at }
}

/// C could call this function.
#[gpu_mem_trace]
#[unsafe(no_mangle)]
pub extern "C" fn gpumem_test_exported(n: u32) -> u32 {
    n
}

unsafe trait Layer {
    unsafe fn forward(&self) -> u32;
}

#[gpu_mem_trace]
unsafe impl Layer for u32 {
    unsafe fn forward(&self) -> u32 {
        *self
    }
}

struct Model;

#[gpu_mem_trace]
impl Model {
    #[unsafe(naked)]
    extern "C" fn left_alone() {
        std::arch::naked_asm!("ret")
    }
}

fn main() {
    let n = 7;
    assert_eq!(unsafe { read(&n) }, 7);
    assert_eq!(unsafe { read_for_c(&n) }, 7);
    assert_eq!(unsafe { n.forward() }, 7);
    assert_eq!(gpumem_test_exported(7), 7);
    Model::left_alone();
}

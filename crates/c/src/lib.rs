//! The functions of `gpumem.h`, which let C and C++ programs measure their memory pools with gpumem. See [`gpumem::pool`].
//!
//! A C program links with `libgpumem_c.so`, which `cargo build --release -p gpumem-c` builds. A Rust program that has its pool in C++
//! depends on this crate and names it once, so that the linker keeps the functions: `use gpumem_c as _;`.

#![deny(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr, clippy::dbg_macro)]

mod sys;

pub use sys::{gpumem_pool_allocated, gpumem_pool_freed, gpumem_pool_register, gpumem_pool_set_reserved};

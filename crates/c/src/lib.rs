//! The functions of `gpumem.h`: memory pools in C and C++ that gpumem measures. [`gpumem::pool`] says what they do.
//!
//! A program in C links with `libgpumem_c.so`, which `cargo build --release -p gpumem-c` builds. A program in Rust with a pool in C++
//! depends on this crate and names it once, so that the functions are linked: `use gpumem_c as _;`.

#![deny(unsafe_code)]

mod sys;

pub use sys::{gpumem_pool_allocated, gpumem_pool_freed, gpumem_pool_register, gpumem_pool_set_reserved};

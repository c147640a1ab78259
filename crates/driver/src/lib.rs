//! The part of gpumem that calls NVIDIA's driver, the C library and Python. It finds and reads devices, intercepts the calls that allocate
//! memory and walks stacks. It also contains locks, descriptors and shared memory for code that runs inside another program.
//!
//! Programs use the crate `gpumem`. This crate is for tools that are built together with it, such as the command and the library that the
//! command loads into programs. Everything here works without a GPU: a function that needs a missing library returns an error that names
//! the library.
//!
//! All `unsafe` code of gpumem's libraries is in the folder `sys` of this crate. Its modules are re-exported here.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr, clippy::dbg_macro)]

#[cfg(feature = "baseline")]
pub mod baseline_file;
pub mod settings;
pub mod source;
#[allow(unsafe_code, reason = "the one folder that talks to C")]
mod sys;

#[cfg(any(feature = "sim", feature = "dry"))]
pub(crate) use gpumem_core::device_model;
#[cfg(feature = "baseline")]
pub(crate) use gpumem_core::regular_file;
pub(crate) use gpumem_core::{error, export, inbox, model};

#[cfg(all(feature = "dry", target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
pub use self::sys::dispatch::dry;
#[cfg(target_os = "linux")]
pub use self::sys::own_file;
#[cfg(all(feature = "cuda", target_os = "linux"))]
pub use self::sys::{injection, nvtx};
/// The Python interpreter of this process, if it runs one.
#[cfg(feature = "backtrace")]
pub mod python {
    pub use crate::{
        source::python::python_lines as lines,
        sys::python::{line_at, run_in_python as run},
    };
}

#[cfg(feature = "backtrace")]
pub use self::sys::stack::address_of;
pub use self::sys::{cgroup, clock, descriptor, lock_file, own_threads, print, process, recorded_pools};
#[cfg(feature = "capture")]
pub use self::sys::{recording_file, ring_memory};

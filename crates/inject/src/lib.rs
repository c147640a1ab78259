//! The library that the command `gpumem` loads into the programs that it records. Programs do not link it: the command builds it as a
//! shared object, and NVIDIA's driver loads it because `CUDA_INJECTION64_PATH` names it.
//!
//! The driver calls `InitializeInjection` when the program calls `cuInit`. From then on, gpumem intercepts and records all allocations on
//! all threads. The command passes the [`Options`](options::Options) and the file of the recording in environment variables, see
//! [`variable`]. NVTX loads the library as well, because `NVTX_INJECTION64_PATH` names it; the ranges that the program marks become scopes.
//!
//! The program behaves as it does without the library: nothing is printed to stdout, no panic leaves the library, and an error is one line
//! on stderr.

#![deny(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr, clippy::dbg_macro)]

#[cfg(feature = "library")]
mod cards;
#[cfg(feature = "library")]
mod control;
pub mod options;
#[cfg(feature = "library")]
mod recordings;
#[cfg(feature = "library")]
mod request;
#[cfg(feature = "library")]
mod sys;
#[cfg(feature = "library")]
mod torch;
pub mod variable;

#[cfg(feature = "library")]
pub use self::sys::{
    InitializeInjection, InitializeInjectionNvtx2, InitializeInjectionNvtxExtension, gpumem_attach, gpumem_pass,
    pools::gpumem_pools,
};

/// The folder of this crate's manifest, for the build script of the command.
pub const MANIFEST_DIR: &str = env!("CARGO_MANIFEST_DIR");

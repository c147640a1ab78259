//! The library that the command `gpumem` puts into the programs that it records. It is no library for programs: the command builds it
//! as a shared object, and NVIDIA's driver loads it, because `CUDA_INJECTION64_PATH` names it.
//!
//! The driver calls `InitializeInjection` when the program calls `cuInit`. From then on gpumem intercepts every allocation on all
//! threads and records it. The command sets the variables in [`variable`]: the options of the recording, and its file. NVTX loads the
//! library as well, because `NVTX_INJECTION64_PATH` names it: the ranges that the program marks are scopes.
//!
//! The program runs as without the library: nothing is printed on stdout, no panic leaves the library, and an error is one line on
//! stderr.

#![deny(unsafe_code)]

#[cfg(feature = "library")]
mod cards;
#[cfg(feature = "library")]
mod control;
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

/// The folder with the manifest of this crate, for the build script of the command.
pub const MANIFEST_DIR: &str = env!("CARGO_MANIFEST_DIR");

//! The only unsafe code. This folder finds and loads NVIDIA's libraries at run time, and offers safe functions that return numbers. The
//! names in this folder are NVIDIA's own.

#[cfg(feature = "cuda")]
pub(crate) mod calls;
pub mod cgroup;
pub mod clock;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "cuda")]
pub(crate) mod cupti;
pub mod descriptor;
#[cfg(feature = "cuda")]
pub(crate) mod dispatch;
#[cfg(feature = "cuda")]
mod dl;
#[cfg(all(feature = "cuda", target_os = "linux"))]
pub mod injection;
#[cfg_attr(
    not(all(feature = "cuda", feature = "backtrace")),
    allow(dead_code, unused_imports, reason = "each feature needs only a part of it")
)]
pub(crate) mod loader;
pub mod lock_file;
#[cfg(feature = "cuda")]
pub(crate) mod nvml;
#[cfg(all(feature = "cuda", target_os = "linux"))]
pub mod nvtx;
#[cfg(target_os = "linux")]
pub mod own_file;
pub mod own_threads;
pub mod print;
pub mod process;
#[cfg(feature = "backtrace")]
pub(crate) mod python;
pub mod recorded_pools;
#[cfg(feature = "capture")]
pub mod recording_file;
#[cfg(feature = "capture")]
pub mod ring_memory;
#[cfg(feature = "backtrace")]
pub(crate) mod stack;
// Only on these targets are stacks walked by the tables of the loaded files. The manifest has the same condition.
#[cfg(all(
    feature = "backtrace",
    target_os = "linux",
    target_pointer_width = "64",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod walker;

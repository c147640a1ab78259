//! The only unsafe code: NVIDIA's libraries, found and loaded at run time, behind safe functions that return numbers. The names in
//! this folder are NVIDIA's own.

#[cfg(any(feature = "cupti", feature = "dispatch"))]
pub(crate) mod calls;
#[cfg(feature = "capture")]
pub(crate) mod cgroup;
#[cfg(feature = "capture")]
pub(crate) mod clock;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "cupti")]
pub(crate) mod cupti;
#[cfg(any(feature = "baseline", feature = "capture"))]
pub(crate) mod descriptor;
#[cfg(feature = "dispatch")]
pub(crate) mod dispatch;
#[cfg(feature = "cuda")]
mod dl;
#[cfg(any(feature = "backtrace", all(feature = "dispatch", target_os = "linux")))]
mod loader;
#[cfg(any(feature = "baseline", feature = "capture"))]
pub(crate) mod lock_file;
#[cfg(feature = "nvml")]
pub(crate) mod nvml;
#[cfg(all(feature = "capture", feature = "dispatch", target_os = "linux"))]
pub(crate) mod own_file;
pub(crate) mod process;
#[cfg(feature = "backtrace")]
pub(crate) mod python;
#[cfg(feature = "capture")]
pub(crate) mod ring_memory;
#[cfg(feature = "backtrace")]
pub(crate) mod stack;
// Stacks are walked by the tables of the loaded files on these targets only; the manifest has the same condition.
#[cfg(all(
    feature = "backtrace",
    target_os = "linux",
    target_pointer_width = "64",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod walker;

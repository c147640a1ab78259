//! The only unsafe code: NVIDIA's libraries, found and loaded at run time, behind safe functions that return numbers.
//! Below this line names are NVIDIA's own.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "cuda")]
mod dl;
pub(crate) mod exit;
#[cfg(feature = "nvml")]
pub(crate) mod nvml;

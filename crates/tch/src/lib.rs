//! The GPU memory of [tch]: after one call, gpumem sees each tensor.
//!
//! tch is PyTorch for Rust. PyTorch's caching allocator allocates segments from the driver and divides them among tensors. Without this
//! crate, gpumem only sees the segments.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! gpumem_tch::observe()?; // before the first tensor
//! let trace = gpumem::GpuMemTrace::with_ctx("load"); // counts tensors
//! # Ok(())
//! # }
//! ```
//!
//! A tensor counts as many bytes as in `torch.cuda.memory_allocated()`. PyTorch rounds the requested size up to a multiple of 512 bytes. If
//! less than 1 MiB of a segment is left next to a tensor of more than 1 MiB, the rest counts for the tensor as well.
//!
//! [tch]: https://docs.rs/tch

#![deny(unsafe_code)]

#[cfg(has_cuda)]
mod observer;
#[cfg(has_cuda)]
mod sys;

use std::{error, fmt};

/// The reason why tensors cannot be observed.
///
/// ```
/// match gpumem_tch::observe() {
///     Ok(()) => {}
///     Err(gpumem_tch::Error::NoCuda) => println!("on the CPU"),
///     Err(error) => panic!("{error}"),
/// }
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub enum Error {
    /// There is no device, or libtorch was built without CUDA.
    NoCuda,
    /// PyTorch uses another allocator instead of its own.
    OtherAllocator,
    /// There are expandable segments that were allocated before gpumem intercepted allocations.
    TooLate,
    /// An error from PyTorch.
    PyTorch(String),
    /// An error from gpumem.
    Gpumem(gpumem::Error),
}

/// `Result` with the crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCuda => f.write_str(
                "gpumem_tch: libtorch has no CUDA device; look at tch::Cuda::is_available(), CUDA_VISIBLE_DEVICES and nvidia-smi",
            ),
            Self::OtherAllocator => f.write_str(
                "gpumem_tch: PYTORCH_CUDA_ALLOC_CONF names an allocator that cannot be observed; with backend:cudaMallocAsync gpumem \
                 sees each tensor without observe(), so leave the call out",
            ),
            Self::TooLate => f.write_str(
                "gpumem_tch: PyTorch has expandable segments that gpumem did not see it take; call observe() before the first tensor",
            ),
            Self::PyTorch(message) => write!(f, "gpumem_tch: PyTorch: {message}"),
            Self::Gpumem(error) => write!(f, "gpumem_tch: {error}"),
        }
    }
}

/// Prints the same text as `Display`, because `main` prints errors with `Debug`.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl error::Error for Error {}

impl From<gpumem::Error> for Error {
    fn from(error: gpumem::Error) -> Self {
        Self::Gpumem(error)
    }
}

/// Makes gpumem see each tensor, on all devices, until the process ends. A second call does nothing.
///
/// Call this before the first tensor. Older tensors count for the scope in which this is called.
///
/// The threads of a backward pass belong to the scope that waits for them: every scope that is opened after this call adopts the threads
/// whose names start with `pt_autograd_`.
///
/// # Errors
/// Returns an error if there is no CUDA device, if PyTorch does not use its own allocator, if the call comes too late, or if allocations
/// cannot be intercepted.
pub fn observe() -> Result<()> {
    #[cfg(has_cuda)]
    return observer::observe();
    #[cfg(not(has_cuda))]
    Err(Error::NoCuda)
}

/// Releases the unused segments of PyTorch's cache to the driver, on all devices, like `torch.cuda.empty_cache()`.
///
/// ```no_run
/// gpumem_tch::empty_cache()?;
/// # Ok::<(), gpumem_tch::Error>(())
/// ```
///
/// # Errors
/// Returns an error if libtorch was built without CUDA, or if PyTorch reports an error.
pub fn empty_cache() -> Result<()> {
    #[cfg(has_cuda)]
    return sys::empty_cache();
    #[cfg(not(has_cuda))]
    Err(Error::NoCuda)
}

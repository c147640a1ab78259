//! GPU memory of [tch]: after one call, gpumem sees each tensor.
//!
//! tch is PyTorch, whose caching allocator takes segments from the driver and divides them. gpumem alone sees the segments.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! gpumem_tch::observe()?; // before the first tensor
//! let trace = gpumem::GpuMemTrace::with_ctx("load"); // counts tensors
//! # Ok(())
//! # }
//! ```
//!
//! A tensor counts as much as in `torch.cuda.memory_allocated()`. PyTorch rounds what was asked for up to a multiple of 512 bytes. If
//! less than 1 MiB of a segment is left beside a tensor of more than 1 MiB, that counts for the tensor as well.
//!
//! [tch]: https://docs.rs/tch

#![deny(unsafe_code)]

#[cfg(has_cuda)]
mod observer;
#[cfg(has_cuda)]
mod sys;
#[cfg(has_cuda)]
mod tracker;

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
    /// Another allocator is in the place of PyTorch's own.
    OtherAllocator,
    /// There were tensors before gpumem saw the allocation of their memory.
    TooLate,
    /// PyTorch's own error.
    PyTorch(String),
    /// gpumem's own error.
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
                "gpumem_tch: PyTorch has memory that gpumem did not see it take; call observe() before the first tensor",
            ),
            Self::PyTorch(message) => write!(f, "gpumem_tch: PyTorch: {message}"),
            Self::Gpumem(error) => write!(f, "gpumem_tch: {error}"),
        }
    }
}

/// The same text, because `main` prints this one.
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

/// Makes gpumem see each tensor on all devices, until the process ends. A second call does nothing.
///
/// Call it before the first tensor. Older tensors count for the scope of the call, if gpumem saw the allocation of their memory, such
/// as after [`gpumem::preload()`].
///
/// The threads of the backward pass belong to the scope that waits for them: each scope that is opened from now on adopts the threads whose
/// names begin with `pt_autograd_`.
///
/// # Errors
/// Returns an error if there is no CUDA device, if PyTorch uses another allocator than its own, if it is too late, or if
/// allocations cannot be intercepted.
pub fn observe() -> Result<()> {
    #[cfg(has_cuda)]
    return observer::observe();
    #[cfg(not(has_cuda))]
    Err(Error::NoCuda)
}

/// Gives unused segments of PyTorch's cache back to the driver, on all devices, as `torch.cuda.empty_cache()` does.
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

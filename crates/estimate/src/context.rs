//! The memory of a process on a GPU outside its allocator.

use crate::Bytes;

/// The memory that the driver counts for a process outside the allocator: the CUDA context, loaded kernels, and the
/// blocks of NVIDIA's libraries. This is a range, because kernels are loaded when they are first needed.
///
/// No [`Estimate`](crate::Estimate) includes it: `torch.cuda.max_memory_allocated()` does not count it. `nvidia-smi` shows it together with
/// [`Estimate::reserved`](crate::Estimate::reserved).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ContextSize {
    /// The memory of a context without any kernels.
    pub low: Bytes,
    /// The memory after training steps with cuBLAS and cuDNN.
    pub high: Bytes,
}

impl ContextSize {
    /// Returns the range that was measured on GPUs of a compute capability, such as `(9, 0)` for H100 and H200. `None`
    /// if there is no measurement. The values are those of PyTorch 2.11 with CUDA 13.0 (`measure/context.py`). Other
    /// builds have other kernels.
    pub const fn measured(capability: (u32, u32)) -> Option<Self> {
        match capability {
            (9, 0) => Some(Self { low: Bytes::new(552_402_944), high: Bytes::new(806_158_336) }),
            _ => None,
        }
    }
}

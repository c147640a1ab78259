//! Simulated devices: GPU memory without a GPU. Every allocation is recorded.
//!
//! A process gets simulated devices from [`SimGpu::install`] or `GPUMEM_SIM=16GiB` (several: `GPUMEM_SIM=16GiB,8GiB`). From then
//! on, device ordinals refer to the simulated devices; CUDA's devices are not used. A notice on stderr reports this.
//!
//! ```
//! use gpumem::{Bytes, GpuMemTrace, sim::SimGpu};
//!
//! let gpu = SimGpu::install(Bytes::gib(16))?;
//! let trace = GpuMemTrace::new();
//! let block = gpu.alloc(Bytes::mib(256))?;
//! drop(gpu.alloc_async(Bytes::mib(64))?);
//! assert_eq!(trace.data().used.mb(), 256);
//! assert_eq!(trace.data().peaked.mb(), 64);
//! # drop(block);
//! # Ok::<(), gpumem::Error>(())
//! ```

pub use gpumem_driver::source::sim::{SimBlock, SimGpu};

//! A program that uses cudarc's safe API. Without a GPU, the same steps run on a simulated one.
//!
//! `cargo run --example cudarc_alloc`

use cudarc::driver::CudaContext;
use gpumem::{Bytes, GpuMemTrace, gpu_mem_get_free, gpu_mem_get_free_no_cache, sim::SimGpu};
use gpumem_examples::{Gpu, Result};

fn main() -> Result<()> {
    match Gpu::open()? {
        Gpu::Cuda(context) => on_cuda(&context),
        Gpu::Simulated(gpu) => on_simulated(&gpu),
    }
}

fn on_cuda(context: &std::sync::Arc<CudaContext>) -> Result<()> {
    let stream = context.default_stream();
    let table = GpuMemTrace::scope("table", |_| stream.alloc_zeros::<f32>(64 << 20))?;
    {
        let _trace = GpuMemTrace::with_ctx("copy");
        let _copy = stream.clone_dtoh(&table)?;
    }
    drop(table);

    // cudarc allocates from the device's stream-ordered pool. Freed memory stays in the pool until the next synchronisation, and
    // other processes cannot use it until then.
    println!("free:                 {}", gpu_mem_get_free());
    println!("free without caches:  {}", gpu_mem_get_free_no_cache());
    Ok(())
}

fn on_simulated(gpu: &SimGpu) -> Result<()> {
    let table = GpuMemTrace::scope("table", |_| gpu.alloc_async(Bytes::mib(256)))?;
    {
        let _trace = GpuMemTrace::with_ctx("copy");
    }
    drop(table);

    println!("free:                 {}", gpu_mem_get_free());
    println!("free without caches:  {}", gpu_mem_get_free_no_cache());
    Ok(())
}

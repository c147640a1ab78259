//! The first report: a guard in a block, a guard in a loop, an attribute on a function.
//!
//! `cargo run --example quickstart`

use gpumem::{Bytes, GpuMemTrace, device, gpu_mem_get, gpu_mem_trace};
use gpumem_examples::{Block, Gpu, Result};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    gpumem::preload(); // creates the CUDA context now, not inside the first trace
    println!("{}: {}", device::name(None)?, gpu_mem_get(None));

    // The closure returns the block, so its memory counts as used.
    let weights = GpuMemTrace::scope("load", |_| gpu.alloc(Bytes::mib(256)))?;

    let mut trace = GpuMemTrace::with_ctx("train");
    for step in 0..3 {
        drop(forward(&gpu)?);
        trace.report_n_reset_with(format!("step {step}"));
    }

    drop(weights);
    trace.report_with("weights freed");
    Ok(()) // the trace is dropped here, and reports
}

#[gpu_mem_trace]
fn forward(gpu: &Gpu) -> Result<Block> {
    let _activations = gpu.alloc(Bytes::mib(512))?;
    let loss = gpu.alloc(Bytes::mib(10));
    std::thread::sleep(std::time::Duration::from_millis(20)); // the work
    loss
}

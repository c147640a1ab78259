//! Shows where the memory of the device went: other processes, this one by scope, and the driver. The parts add up to the
//! used memory that `nvidia-smi` shows.
//!
//! `cargo run --features full --example where_is_my_vram`

use gpumem::{Bytes, GpuMemTrace};
use gpumem_examples::{Gpu, Result};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    gpumem::preload(); // allocations are intercepted from here on

    let _weights = GpuMemTrace::scope("load", |_| gpu.alloc(Bytes::mib(256)))?;
    let train = GpuMemTrace::with_ctx("train");
    let _optimizer = gpu.alloc(Bytes::mib(512))?;
    let _activations = GpuMemTrace::scope("forward", |_| {
        drop(gpu.alloc_async(Bytes::mib(96))?); // the pool keeps it
        gpu.alloc(Bytes::mib(80))
    })?;
    drop(train);
    let _library = gpu.alloc(Bytes::mib(32))?;

    let breakdown = gpumem::breakdown(None)?;
    println!("{breakdown}");
    let sum: Bytes = breakdown.parts.iter().map(|part| part.bytes).sum();
    println!("{sum} in {} parts; the driver says {}", breakdown.parts.len(), breakdown.memory.used);
    Ok(())
}

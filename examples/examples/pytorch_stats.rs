//! PyTorch's statistics: allocated and reserved memory, and their peaks in each step of a loop.
//!
//! `cargo run --example pytorch_stats`

use gpumem::{
    Bytes, gpu_mem_get_used,
    torch::{
        empty_cache, max_memory_allocated, memory_allocated, memory_reserved, memory_stats, memory_summary,
        reset_peak_memory_stats,
    },
};
use gpumem_examples::{Gpu, Result};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    // Counting starts here. Blocks that were allocated earlier are not counted.
    println!("allocated: {}", memory_allocated(None)?);

    let mut layers = Vec::new();
    for step in 0..3 {
        reset_peak_memory_stats(None)?;
        layers.push(gpu.alloc(Bytes::mib(40))?);
        drop(gpu.alloc(Bytes::mib(300 - 100 * step))?); // activations
        println!("step {step}: {} now, {} at most", memory_allocated(None)?, max_memory_allocated(None)?);
    }

    // The bytes that the program requested, those that the driver reserved for them, and those that all processes use.
    drop(layers.pop());
    println!("{} allocated, {} reserved", memory_allocated(None)?, memory_reserved(None)?);
    empty_cache()?;
    println!("{} used on the GPU, by all processes", gpu_mem_get_used());

    println!("\n{}\n", memory_summary(None)?);
    let freed = memory_stats(None)?.kinds.device.bytes.freed;
    println!("freed, of the memory from cuMemAlloc: {freed}");
    Ok(())
}

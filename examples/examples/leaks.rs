//! What a piece of code left behind, and where it was asked for. For a whole program, without changing it:
//! `GPUMEM_LEAKS=1 program` says at its end what was not freed; `GPUMEM_BACKTRACE=1` knows the lines of small and of
//! stream-ordered blocks as well.
//!
//! `GPUMEM_LEAKS=1 cargo run --example leaks`

use gpumem::{Bytes, GpuMemTrace};
use gpumem_examples::{Block, Gpu, Result};

/// Keeps what it should only have looked at.
fn step(gpu: &Gpu, history: &mut Vec<Block>) -> Result<()> {
    let _activations = gpu.alloc(Bytes::mib(64))?;
    let loss = gpu.alloc(Bytes::mib(1))?;
    history.push(loss);
    Ok(())
}

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    gpumem::preload();
    let mut history = Vec::new();

    let trace = GpuMemTrace::with_ctx("train");
    for _ in 0..3 {
        step(&gpu, &mut history)?;
    }
    println!("still there:");
    for block in trace.live() {
        println!("  {block}");
        // Who called the function of that line, and so on.
        let by = block.backtrace.iter().filter(|function| function.starts_with("leaks::"));
        by.for_each(|function| println!("    from {function}"));
    }
    drop(trace);

    std::mem::forget(history); // as what a static holds is never dropped
    Ok(())
}

//! Finds the blocks that a piece of code did not free, and the lines that allocated them. For a whole program, without
//! changing it: `GPUMEM_LEAKS=1 program` prints the blocks that are not freed at the end. Add `GPUMEM_BACKTRACE=1` for the
//! lines of blocks below 1 MiB.
//!
//! `GPUMEM_LEAKS=1 cargo run --features full --example leaks`

use gpumem::{Bytes, GpuMemTrace, report::Leaks};
use gpumem_examples::{Block, Gpu, Result};

/// The mistake: it keeps the loss of each step.
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
    let live = trace.live();
    println!("{}", Leaks::of(&live));
    // The functions that led to the allocation.
    for function in live[0].backtrace.iter().filter(|function| function.starts_with("leaks::")) {
        println!("the largest: in {function}");
    }
    drop(trace);

    std::mem::forget(history); // stands for a static, which is never dropped
    Ok(())
}

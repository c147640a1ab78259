//! Shows which part of a program holds the memory. Scopes nest, also across threads, and `summary()` has a row for each.
//!
//! `cargo run --example scopes`

use std::thread;

use gpumem::{Bytes, GpuMemTrace, gpu_mem_trace};
use gpumem_examples::{Block, Gpu, Result};

#[gpu_mem_trace(silent)]
fn load(gpu: &Gpu) -> Result<Vec<Block>> {
    let trace = GpuMemTrace::builder().ctx("shards").silent(true).start()?;
    // A new thread is in no scope. The handle carries this scope to it.
    let handle = trace.handle();
    thread::scope(|threads| {
        let shard = |mib| {
            let handle = handle.clone();
            threads.spawn(move || handle.in_scope(|| gpu.alloc(Bytes::mib(mib))))
        };
        let shards = [shard(128), shard(96), shard(32)];
        shards.into_iter().map(|shard| shard.join().expect("it does not panic")).collect()
    })
}

#[gpu_mem_trace(silent)]
fn forward(gpu: &Gpu) -> Result<Block> {
    let _activations = gpu.alloc(Bytes::mib(512))?;
    gpu.alloc(Bytes::mib(10))
}

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    gpumem::preload();
    let _weights = load(&gpu)?;

    let train = GpuMemTrace::builder().ctx("train").silent(true).start()?;
    let mut losses = Vec::new();
    for _ in 0..3 {
        losses.push(forward(&gpu)?);
    }
    drop(train);

    println!("{}", gpumem::summary());
    Ok(())
}

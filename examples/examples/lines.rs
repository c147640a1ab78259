//! Shows which statement of a function needs the memory, with `#[gpu_mem_trace(lines)]`.
//!
//! `cargo run --example lines`

use gpumem::{Bytes, gpu_mem_trace};
use gpumem_examples::{Block, Gpu, Result};

const LAYERS: usize = 4;

#[gpu_mem_trace(lines)]
fn forward(gpu: &Gpu, input: &Block) -> Result<Block> {
    let embedded = gpu.alloc(Bytes::mib(48))?;
    let mut hidden = gpu.alloc(Bytes::mib(96))?;
    for _ in 0..LAYERS {
        let _attention = gpu.alloc(Bytes::mib(256))?;
        hidden = gpu.alloc(Bytes::mib(96))?;
    }
    drop(embedded);
    let logits = project(
        gpu, //
        &hidden, input,
    )?;
    Ok(logits)
}

/// The statements of a called function are not listed: the call is one statement.
fn project(gpu: &Gpu, _hidden: &Block, _input: &Block) -> Result<Block> {
    let _scratch = gpu.alloc(Bytes::kib(1536))?;
    gpu.alloc(Bytes::mib(10))
}

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let input = gpu.alloc(Bytes::mib(4))?;
    let _logits = forward(&gpu, &input)?;
    Ok(())
}

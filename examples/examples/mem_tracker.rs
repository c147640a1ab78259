//! Shows which blocks came and went between two lines: the weights of VGG16 with labels, and activations without.
//!
//! `cargo run --example mem_tracker`

use gpumem::{Bytes, gpu_mem_trace, track, tracker::MemTracker};
use gpumem_examples::{Block, Gpu, Result};

/// The convolutions of VGG16: channels in and out.
const CONVOLUTIONS: [(usize, usize); 13] = [
    (3, 64),
    (64, 64),
    (64, 128),
    (128, 128),
    (128, 256),
    (256, 256),
    (256, 256),
    (256, 512),
    (512, 512),
    (512, 512),
    (512, 512),
    (512, 512),
    (512, 512),
];

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    gpumem::preload(); // allocations are intercepted from here on
    let mut tracker = MemTracker::new();
    track!(tracker);

    let weights = load(&gpu)?;
    track!(tracker);

    let activations = forward(&gpu, 8)?;
    track!(tracker);

    // One more block of a shape that several blocks have: the difference is one.
    let _adapter = tensor(&gpu, "adapter.weight", &[512, 512, 3, 3])?;
    drop(activations);
    track!(tracker);

    drop(weights);
    track!(tracker);
    Ok(())
}

#[gpu_mem_trace(silent)]
fn load(gpu: &Gpu) -> Result<Vec<Block>> {
    let mut weights = Vec::new();
    for (number, (from, to)) in CONVOLUTIONS.into_iter().enumerate() {
        weights.push(tensor(gpu, &format!("conv{number}.weight"), &[to, from, 3, 3])?);
        weights.push(tensor(gpu, &format!("conv{number}.bias"), &[to])?);
    }
    Ok(weights)
}

/// Blocks without a label are listed by their size, line and scope.
#[gpu_mem_trace(silent)]
fn forward(gpu: &Gpu, batch: u64) -> Result<Vec<Block>> {
    [64_u64, 64, 128, 128].iter().map(|channels| gpu.alloc(Bytes::new(batch * channels * 112 * 112 * 4))).collect()
}

/// Allocates a block of `f32`, with a label if allocations are intercepted.
fn tensor(gpu: &Gpu, name: &str, shape: &[usize]) -> Result<Block> {
    let block = gpu.alloc(Bytes::from(shape.iter().product::<usize>() * size_of::<f32>()))?;
    if let Err(error) = block.label(name, shape, "f32")
        && !error.is_unavailable()
    {
        return Err(error.into());
    }
    Ok(block)
}

//! `#[gpu_mem_trace]` on functions, methods and whole `impl` blocks.
//!
//! `cargo run --example attribute`

use gpumem::{Bytes, gpu_mem_trace};
use gpumem_examples::{Block, Gpu, Result};

struct Model {
    layers: Vec<Block>,
}

#[gpu_mem_trace] // every method
impl Model {
    fn load(gpu: &Gpu, layers: usize) -> Result<Self> {
        let layers = (0..layers).map(|_| gpu.alloc(Bytes::mib(40))).collect::<Result<_>>()?;
        Ok(Self { layers })
    }

    fn forward(&self, gpu: &Gpu) -> Result<Block> {
        for _ in &self.layers {
            let _activation = gpu.alloc(Bytes::mib(100))?;
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        gpu.alloc(Bytes::mib(2))
    }
}

#[gpu_mem_trace(ctx = "a step of training")]
fn step(model: &Model, gpu: &Gpu) -> Result<()> {
    let _out = model.forward(gpu)?;
    Ok(())
}

#[gpu_mem_trace(device = 0, gauge = "sampled")]
fn polled(gpu: &Gpu) -> Result<Block> {
    gpu.alloc(Bytes::mib(30))
}

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    let model = Model::load(&gpu, 3)?;
    step(&model, &gpu)?;
    drop(model);
    let _kept = polled(&gpu)?;
    Ok(())
}

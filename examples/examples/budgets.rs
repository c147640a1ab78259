//! Code with a memory budget: an assertion, a function, and tests.
//!
//! `cargo run --features full --example budgets`, and `cargo test --features full --example budgets` for the tests, which need no GPU.

use std::panic;

use gpumem::{Bytes, assert_gpu_mem, gpu_mem_trace};
use gpumem_examples::{Block, Gpu, Result};

#[gpu_mem_trace(max_peak = "512 MB")]
fn forward(gpu: &Gpu, batch: u64) -> Result<Block> {
    let _activations = gpu.alloc(Bytes::mib(16 * batch))?;
    gpu.alloc(Bytes::mib(10))
}

fn main() -> Result<()> {
    let gpu = Gpu::open()?;

    let logits = assert_gpu_mem!(peak < "2 GiB", used == Bytes::mib(10), { forward(&gpu, 16)? });
    drop(logits);

    // A larger batch needs more than the budget: the function panics with a report.
    panic::set_hook(Box::new(|_| {}));
    let failed = panic::catch_unwind(panic::AssertUnwindSafe(|| forward(&gpu, 40)));
    println!("{}", failed.err().and_then(|text| text.downcast::<String>().ok()).ok_or("it was to fail")?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use gpumem::{gpu_mem_test, sim::SimGpu};
    use gpumem_examples::{Gpu, Result};

    #[gpu_mem_test(max_peak = "300 MB", max_used = 0)]
    fn forward_is_frugal(gpu: &SimGpu) -> Result<()> {
        let gpu = Gpu::Simulated(gpu.clone());
        super::forward(&gpu, 16).map(drop)
    }
}

//! Out of memory: a report of who holds the memory, a function that is called, and a second try after trimming the pools.
//!
//! `cargo run --features full --example out_of_memory`

use gpumem::{
    Bytes, GpuMemTrace,
    oom::{on_oom, retry_after_trim},
};
use gpumem_examples::{Gpu, Result};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    gpumem::preload(); // allocations are intercepted from here on
    let (free, _) = gpumem::torch::mem_get_info(None)?;
    let part = |sixteenths: u64| Bytes::new(free.get() / 16 * sixteenths);

    // Optional: a function for your own log. The report goes to stderr in any case.
    on_oom(|oom| println!("on_oom: {} requested in {:?}", oom.requested, oom.path));

    let _weights = GpuMemTrace::scope("load", |_| gpu.alloc(part(5)))?;
    drop(gpu.alloc_async(part(6))?); // the pool keeps it

    let train = GpuMemTrace::with_ctx("train");
    assert!(gpu.alloc(part(15)).is_err());

    // The first try fails. Then the pool's unused memory is released, and the second try succeeds.
    let activations = retry_after_trim(|| gpu.alloc(part(8)))?;
    println!("after a trim: {}", train.data().used);
    drop(activations);
    Ok(())
}

//! Out of memory: a report that says who holds it, a function that is told, and a second try after the pools gave back.
//!
//! `cargo run --example out_of_memory`

use gpumem::{Bytes, GpuMemTrace, on_oom, retry_after_trim};
use gpumem_examples::{Gpu, Result};

fn main() -> Result<()> {
    let gpu = Gpu::open()?;
    gpumem::preload(); // from here on refusals are heard
    let (free, _) = gpumem::mem_get_info(None)?;
    let part = |sixteenths: u64| Bytes::new(free.get() / 16 * sixteenths);

    // One hook for the process, for your own log; the report goes to stderr by itself.
    on_oom(|oom| println!("on_oom: {} asked for in {:?}", oom.asked, oom.path));

    let _weights = GpuMemTrace::scope("load", |_| gpu.alloc(part(5)))?;
    drop(gpu.alloc_async(part(6))?); // the pool keeps it

    let train = GpuMemTrace::with_ctx("train");
    assert!(gpu.alloc(part(15)).is_err());

    // The pool's unused memory is given back, and there is room.
    let activations = retry_after_trim(|| gpu.alloc(part(8)))?;
    println!("after a trim: {}", train.data().used);
    drop(activations);
    Ok(())
}

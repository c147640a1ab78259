//! Chooses the device with the most free memory before any work starts. It creates no context on the other devices.
//!
//! `cargo run --example choose_gpu`

use gpumem::{Bytes, gpu_mem_get_all, gpu_with_max_free_mem};
use gpumem_examples::{Gpu, Result};

fn main() -> Result<()> {
    if !gpumem::is_available() {
        Gpu::nth(1)?; // two simulated devices
    }
    let _held = Gpu::nth(0)?.alloc(Bytes::gib(2))?; // stands for the memory of another process

    for (id, memory) in gpu_mem_get_all().iter().enumerate() {
        println!("{id}: {memory}");
    }
    match gpu_with_max_free_mem() {
        (Some(id), free) => println!("use device {id}: {free} are free ({} MB)", free.mb()),
        (None, _) => println!("no device can be read"),
    }
    Ok(())
}

//! One trace for each device. Device numbers are CUDA ordinals, whatever `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER`
//! say: try `CUDA_VISIBLE_DEVICES=1,0`.
//!
//! `cargo run --example multi_gpu`

use gpumem::{Bytes, GpuMemTrace, device, gpu_mem_get};
use gpumem_examples::{Gpu, Result};

fn main() -> Result<()> {
    if !gpumem::is_available() {
        Gpu::nth(1)?; // two simulated devices
    }
    let gpus = (0..device::count()?).map(Gpu::nth).collect::<Result<Vec<_>>>()?;

    let mut traces = Vec::new();
    for id in 0..device::count()? {
        println!("{id}: {}: {}", device::name(id)?, gpu_mem_get(id));
        traces.push(GpuMemTrace::builder().device(id).ctx(format!("device {id}")).start()?);
    }

    let mut blocks = Vec::new();
    for (gpu, size) in gpus.iter().zip(1_u64..) {
        blocks.push(gpu.alloc(Bytes::mib(100 * size))?);
    }
    traces.iter().for_each(GpuMemTrace::report);

    // Without `device`, a trace measures the thread's current device. It does not change later.
    let last = gpus.last().expect("there is a device");
    last.make_current()?;
    println!("current device: {}", device::current()?);
    let trace = GpuMemTrace::with_ctx("current");
    blocks.push(last.alloc(Bytes::mib(50))?);
    drop(trace);
    Ok(())
}

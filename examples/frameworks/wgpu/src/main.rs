//! Used and peak memory of functions that allocate through wgpu, on any GPU: `cargo run`.

use gpumem::{Gauge, GpuMemTrace, gauge::set_gauge, gpu_mem_trace};
use wgpu::{Buffer, BufferDescriptor, BufferUsages, Device, DeviceDescriptor, Instance, RequestAdapterOptions};

const MIB: u64 = 1 << 20;

fn buffer(device: &Device, label: &str, mib: u64) -> Buffer {
    let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST;
    device.create_buffer(&BufferDescriptor { label: Some(label), size: mib * MIB, usage, mapped_at_creation: false })
}

#[gpu_mem_trace]
fn load(device: &Device) -> Buffer {
    let staging = buffer(device, "staging", 96);
    // This is long enough for a reading. gpumem reads the gauge every millisecond.
    std::thread::sleep(std::time::Duration::from_millis(20));
    staging.destroy();
    drop(staging);
    buffer(device, "weights", 64)
}

#[gpu_mem_trace(lines, max_peak = "100 MiB")]
fn step(device: &Device) {
    let hidden = buffer(device, "hidden", 16);
    let logits = buffer(device, "logits", 8);
    drop(hidden);
    drop(logits);
}

async fn device() -> Result<Device, Box<dyn std::error::Error>> {
    let adapter = Instance::default().request_adapter(&RequestAdapterOptions::default()).await?;
    println!("{}", adapter.get_info().name);
    // Buffers of 64 MiB need no other limits than the default ones.
    let (device, _queue) = adapter.request_device(&DeviceDescriptor::default()).await?;
    Ok(device)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = pollster::block_on(device())?;
    let of_gauge = device.clone();
    // The report is `None` on Metal and OpenGL.
    set_gauge(Gauge::custom("wgpu", move || Some(of_gauge.generate_allocator_report()?.total_allocated_bytes)));

    let train = GpuMemTrace::with_ctx("train");
    let weights = load(&device);
    step(&device);
    drop(weights);
    drop(train);
    Ok(())
}

//! Guards and lines on any GPU that burn supports, through the program's own gauge: `cargo run --release --features wgpu --bin gauge`.

use burn::{prelude::*, tensor::Distribution};
use gpumem::{Gauge, GpuMemTrace, gauge::set_gauge};

fn main() {
    let device = Device::default();
    let of_gauge = device.clone();
    set_gauge(Gauge::custom("burn", move || Some(of_gauge.memory_pool_usage()?.bytes_in_use)));

    let load = GpuMemTrace::with_ctx("load");
    let weights = Tensor::<2>::random([2048, 2048], Distribution::Default, &device);
    device.sync().expect("the device computes");
    drop(load);

    let step = GpuMemTrace::with_ctx("step");
    let output = weights.clone().matmul(weights).exp().sum();
    println!("{}", output.into_scalar::<f32>() > 0.0);
    drop(step);
}

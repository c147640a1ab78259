//! What gpumem costs, each beside its baseline in the same run. On a machine with a GPU the first group is on it; where
//! there is none it is left out.
//!
//! `cargo bench -p gpumem-tests`

use std::{ffi::OsStr, hint::black_box, time::Duration};

use criterion::{Criterion, criterion_group, criterion_main};
use gpumem::{Bytes, Gauge, GpuHandle, GpuMemTrace, gpu_mem_get, gpu_mem_get_used_fast, sim::SimGpu};
use nvml_wrapper::Nvml;

fn trace(gauge: Gauge) -> GpuMemTrace {
    GpuMemTrace::builder().gauge(gauge).on_exit_report(false).start().expect("the device can be read")
}

fn create_and_stop(gauge: Gauge) {
    let mut trace = trace(gauge);
    trace.stop();
    black_box(trace.data());
}

/// The queries against the bare call, and a sampled trace, which takes two readings.
fn device(criterion: &mut Criterion) {
    if !gpumem::is_available() {
        println!("skipped: no device");
        return;
    }
    let nvml = Nvml::builder().lib_path(OsStr::new("libnvidia-ml.so.1")).init().expect("NVML is there");
    let bare = nvml.device_by_index(0).expect("device 0 is there");
    let handle = GpuHandle::new(0).expect("device 0 is there");
    let mut group = criterion.benchmark_group("device");
    // The card's and the processor's clocks settle in the warm-up; the baseline is measured three times to show the rest.
    group.sample_size(200).warm_up_time(Duration::from_secs(5));
    group.bench_function("baseline: nvmlDeviceGetMemoryInfo_v2, cached handle", |bench| {
        bench.iter(|| bare.memory_info());
    });
    group.bench_function("gpu_mem_get(0)", |bench| bench.iter(|| gpu_mem_get(0)));
    group.bench_function("baseline, second time", |bench| bench.iter(|| bare.memory_info()));
    group.bench_function("gpu_mem_get(None)", |bench| bench.iter(|| gpu_mem_get(None)));
    group.bench_function("gpu_mem_get_used_fast", |bench| bench.iter(|| gpu_mem_get_used_fast(&handle)));
    group.bench_function("baseline, third time", |bench| bench.iter(|| bare.memory_info()));
    group.bench_function("sampled trace: create, stop, read", |bench| bench.iter(|| create_and_stop(Gauge::Sampled)));
    let live: Vec<_> = (0..1000).map(|_| trace(Gauge::Sampled)).collect();
    group.bench_function("sampled trace beside 1,000 live ones", |bench| {
        bench.iter(|| create_and_stop(Gauge::Sampled));
    });
    drop(live);
    group.finish();
}

/// What the door and the fold cost by themselves.
fn simulated(criterion: &mut Criterion) {
    let gpu = SimGpu::install(Bytes::gib(64)).expect("GPUMEM_SIM is sound");
    let mut group = criterion.benchmark_group("simulated");
    let pair = || drop(gpu.alloc(Bytes::kib(4)));
    group.bench_function("alloc+free, no trace yet", |bench| bench.iter(pair));
    let one = trace(Gauge::Exact);
    group.bench_function("alloc+free, 1 trace", |bench| bench.iter(pair));
    let many: Vec<_> = (0..10_000).map(|_| trace(Gauge::Exact)).collect();
    group.bench_function("alloc+free, 10,000 traces", |bench| bench.iter(pair));
    group.bench_function("exact trace: create, stop, read", |bench| bench.iter(|| create_and_stop(Gauge::Exact)));
    drop((one, many));
    group.finish();
}

criterion_group!(benches, device, simulated);
criterion_main!(benches);

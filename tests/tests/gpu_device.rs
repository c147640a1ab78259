//! Tests that need a real GPU. `GPUMEM_DEVICE=1` switches them on; `docs/VERIFIED.md` has the results.
//!
//! `GPUMEM_DEVICE=1 cargo test --release -p gpumem-tests --test gpu_device -- --nocapture --test-threads=1`

use std::{env, process::Command, sync::Arc, thread, time::Duration};

use cudarc::driver::{CudaContext, result, sys};
use gpumem::{
    Bytes, Gauge, GpuMemTrace, device, gpu_mem_get, gpu_mem_get_all, try_gpu_mem_get, try_gpu_mem_get_free,
    try_gpu_mem_get_free_no_cache,
};
use gpumem_examples::{Block, Gpu};
use gpumem_tests::{OwnProcess, device, on_the_standin, part};

/// Waits until the sampler has read the device several times.
fn hold() {
    thread::sleep(Duration::from_millis(50));
}

fn gpu() -> Gpu {
    let gpu = Gpu::open().expect("GPUMEM_DEVICE says that there is a device");
    assert!(matches!(gpu, Gpu::Cuda(_)), "GPUMEM_DEVICE says that there is a real device");
    gpumem::preload();
    gpu
}

fn mib(gpu: &Gpu, mib: u64) -> Block {
    gpu.alloc(Bytes::mib(mib)).expect("the device has room")
}

const GAUGES: [Gauge; 2] = [Gauge::Exact, Gauge::Sampled];

fn start(gauge: Gauge) -> GpuMemTrace {
    GpuMemTrace::builder().gauge(gauge).on_exit_report(false).start().expect("the device can be read and intercepted")
}

/// Checks a trace. An exact trace is right to the byte. The driver hands out pages of 2 MiB, so a sampled trace sees 15 MiB as
/// 16 MiB; fastai's tests allowed the same difference of 2 MB.
fn check(trace: &GpuMemTrace, what: &str, used: i64, peaked: u64) {
    hold();
    let data = trace.data();
    println!("{trace} <- expected {used} {peaked}, {}: {what}", data.gauge);
    if data.gauge == Gauge::Exact {
        assert_eq!((data.used.get(), data.peaked.get()), (used << 20, peaked << 20), "{what}");
    }
    assert!((data.used.mb() - used).abs() <= 2, "{what}");
    assert!(data.peaked.mb().abs_diff(peaked) <= 2, "{what}");
}

/// Leaves out one test, because the stand-in machine has no nvidia-smi.
#[test]
fn on_the_stand_in_driver() {
    on_the_standin(&["queries_agree_with_nvidia_smi"]);
}

#[test]
fn fastai_deleted_test_sequence() {
    let Some(_guard) = device() else { return };
    let gpu = gpu();
    for gauge in GAUGES {
        let mut trace = start(gauge);
        let a = mib(&gpu, 10);
        let b = mib(&gpu, 15);
        hold();
        drop(b);
        check(&trace, "allocate 10, allocate 15, free 15", 10, 15);
        drop(a);
        check(&trace, "free 10", 0, 25);
        let a = mib(&gpu, 10);
        trace.reset();
        drop(a);
        check(&trace, "reset, free 10", -10, 0);
    }
}

#[test]
fn ipyexperiments_examples() {
    let Some(_guard) = device() else { return };
    let gpu = gpu();
    for gauge in GAUGES {
        let mut trace = start(gauge);
        let kept = mib(&gpu, 256);
        check(&trace, "256 kept", 256, 0);
        drop(kept);
        trace.reset();
        let kept = mib(&gpu, 256);
        let freed = mib(&gpu, 256);
        hold();
        drop(freed);
        check(&trace, "256 + 256, one freed", 256, 256);
        drop(kept);
    }
}

#[test]
fn queries_agree_with_nvidia_smi_and_with_the_driver() {
    let Some(_guard) = device() else { return };
    let gpu = gpu();
    let _held = mib(&gpu, 1000);
    let columns = "--query-gpu=index,name,uuid,memory.total,memory.free,memory.used,memory.reserved";
    let smi = Command::new("nvidia-smi").args([columns, "--format=csv"]).output().expect("nvidia-smi is there");
    println!("{}", String::from_utf8_lossy(&smi.stdout));
    for (id, memory) in gpu_mem_get_all().iter().enumerate() {
        println!("{id}: {memory} reserved={:?}", memory.reserved.map(Bytes::mb));
        let total = memory.free + memory.used + memory.reserved.unwrap_or_default();
        assert_eq!(total, memory.total);
    }
    let (free, total) = result::mem_get_info().expect("a context is current");
    println!("cuMemGetInfo: free={} total={}", free >> 20, total >> 20);
    let nvml = try_gpu_mem_get(0).expect("the device can be read");
    assert_eq!(nvml.free, free as u64, "what is free is the figure that both agree on");
    let smi = Command::new("nvidia-smi")
        .args(["--query-gpu=memory.used,memory.free,memory.total", "--format=csv,noheader,nounits", "--id=0"])
        .output()
        .expect("nvidia-smi is there");
    let smi = String::from_utf8_lossy(&smi.stdout).trim().to_owned();
    let ours = [nvml.used, nvml.free, nvml.total].map(Bytes::mb);
    println!("nvidia-smi used, free, total: {smi}\ngpu_mem_get used, free, total: {ours:?}");
    if env::var_os("CUDA_VISIBLE_DEVICES").is_none() && device::count() == Ok(1) {
        for (smi, ours) in smi.split(", ").map(|value| value.parse::<u64>().expect("whole MiB")).zip(ours) {
            assert!(smi.abs_diff(ours) <= 1, "nvidia-smi rounds up, fastai's MB down");
        }
    }
}

#[test]
fn no_cache_gives_the_pool_back() {
    let Some(_guard) = device() else { return };
    let Gpu::Cuda(context) = gpu() else { return };
    let before = try_gpu_mem_get_free_no_cache().expect("the device can be read");
    let stream = context.default_stream();
    drop(stream.alloc_zeros::<u8>(256 << 20).expect("the device has room"));
    let kept = try_gpu_mem_get_free().expect("the device can be read");
    let after = try_gpu_mem_get_free_no_cache().expect("the device can be read");
    println!("free before {before}, with the pool's cache {kept}, without it {after}");
    assert_eq!(before.checked_sub(kept), Some(Bytes::mib(256)));
    assert_eq!(after, before);
}

#[test]
fn a_capture_is_left_whole_by_traces_and_queries_and_rejects_no_cache() {
    let Some(_guard) = device() else { return };
    let Gpu::Cuda(_context) = gpu() else { return };
    let stream = result::stream::create(result::stream::StreamKind::Default).expect("a stream");
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: the stream is alive until the end of this test, and its context is current.
    unsafe { result::stream::begin_capture(stream, mode) }.expect("a capture begins");
    let rejected = try_gpu_mem_get_free_no_cache().expect_err("a stream is being captured");
    println!("no_cache while a stream is captured: {rejected}");
    assert!(try_gpu_mem_get_free().is_ok(), "plain queries are fine");
    let trace = GpuMemTrace::builder().silent(true).start().expect("traces are fine");
    trace.report();
    drop(trace);
    // SAFETY: the stream is alive, and the capture was started on this stream.
    let captured = unsafe { result::stream::end_capture(stream) };
    println!("the capture ended {}", if captured.is_ok() { "whole" } else { "broken" });
    assert!(captured.is_ok());
}

/// The tests below run this test in a separate process.
#[test]
fn child() {
    match part().as_deref() {
        Some("contexts") => {
            let used = |id| try_gpu_mem_get(id).expect("the device can be read").used;
            let before: Vec<_> = (0..device::count().expect("there is a driver")).map(used).collect();
            let _ = (gpu_mem_get(None), gpu_mem_get_all(), gpumem::gpu_with_max_free_mem(), device::current());
            let _ = (gpumem::gpu_mem_get_free_no_cache(), gpumem::gpu_mem_get_used_no_cache(), device::name(None));
            drop(GpuMemTrace::builder().silent(true).start());
            let _ = gpumem::torch::memory_stats(0);
            let after: Vec<_> = (0..device::count().expect("there is a driver")).map(used).collect();
            println!("used before {before:?} and after {after:?} all queries and traces");
            assert_eq!(before, after, "no query creates a context");
            gpumem::preload();
            println!("used after preload: {}", used(0));
            assert!(used(0) > before[0] + Bytes::mib(100), "preload creates one");
        }
        Some("cards") => {
            let visible = env::var("CUDA_VISIBLE_DEVICES").unwrap_or_else(|_| "(not set)".to_owned());
            for id in 0..device::count().expect("there is a driver") {
                let Ok(Gpu::Cuda(context)) = Gpu::nth(id) else { panic!("a real device") };
                let uuid = context.uuid().expect("a device has one").bytes;
                let uuid = u32::from_be_bytes([0, 1, 2, 3].map(|at| uuid[at].to_ne_bytes()[0]));
                let trace = GpuMemTrace::builder().device(id).on_exit_report(false).start().expect("it can be read");
                let others: Vec<_> = (0..device::count().expect("there is a driver"))
                    .filter(|other| *other != id)
                    .map(|other| {
                        GpuMemTrace::builder().device(other).on_exit_report(false).start().expect("it can be read")
                    })
                    .collect();
                let gpu = Gpu::Cuda(Arc::clone(&context));
                gpu.make_current().expect("the device is there");
                let (before, current) = (gpu_mem_get(id), GpuMemTrace::builder().on_exit_report(false).start());
                let _block = mib(&gpu, 300 + 100 * u64::from(id));
                let after = gpu_mem_get(id);
                println!(
                    "CUDA_VISIBLE_DEVICES={visible}: ordinal {id} GPU-{uuid:08x}…: current {:?}, query +{} MiB, {trace}, \
                     trace of the current {}, others {:?}",
                    device::current(),
                    after.used.mb() - before.used.mb(),
                    current.expect("it can be read"),
                    others.iter().map(|trace| trace.data().used.mb()).collect::<Vec<_>>(),
                );
                assert_eq!(trace.data().used.mb(), 300 + 100 * i64::from(id));
                assert!(others.iter().all(|trace| trace.data().used == 0));
                assert_eq!(device::current().ok(), Some(id));
                drop(CudaContext::new(id as usize));
            }
        }
        _ => {}
    }
}

fn run_child(part: &str, visible: Option<&str>) {
    let visible = visible.map(|visible| ("CUDA_VISIBLE_DEVICES", visible));
    let ended = OwnProcess::new("child").part(part).envs(visible.as_slice()).passes();
    for line in ended.stdout.lines().filter(|line| ["used", "CUDA_"].iter().any(|word| line.contains(word))) {
        println!("{line}");
    }
}

#[test]
fn no_query_creates_a_context() {
    let Some(_guard) = device() else { return };
    run_child("contexts", None);
}

#[test]
fn each_number_is_the_right_card() {
    let Some(_guard) = device() else { return };
    for visible in [None, Some("0"), Some("1"), Some("1,0")] {
        if device::count().is_ok_and(|count| count > 1) || visible.is_none_or(|visible| visible == "0") {
            run_child("cards", visible);
        }
    }
}

//! Tests guards while traces are off. Each test runs in a separate process, with a simulated device or without a device.

use allocation_counter::measure;
use gpumem::{Bytes, Gauge, GpuMemTrace, gpu_mem_trace, sim::SimGpu};
use gpumem_tests::{OwnProcess, part};

#[gpu_mem_trace]
fn traced() {}

fn guards() {
    drop(GpuMemTrace::new());
    drop(GpuMemTrace::with_ctx("a name that a guard would have to copy"));
    GpuMemTrace::scope("scope", |trace| trace.report());
    traced();
}

/// The first guard finds out that traces are off. After that, guards allocate no memory, so they copy no name.
fn guards_cost_nothing() {
    guards();
    let allocated = measure(guards);
    assert_eq!(allocated.count_total, 0, "{allocated:?}");
}

#[test]
fn by_the_environment() {
    if part().is_none() {
        let outcome = OwnProcess::new("traces_off::by_the_environment").part("off").env("GPUMEM_GAUGE", "off").passes();
        assert_eq!(outcome.stderr, "");
        return;
    }
    guards_cost_nothing();
    // A gauge that the program requests is used, although the environment turns traces off.
    let gpu = SimGpu::install(Bytes::gib(16)).unwrap();
    let trace = GpuMemTrace::builder().gauge(Gauge::Exact).ctx_unless_off(|| "exact").silent(true).start_or_off();
    let block = gpu.alloc(Bytes::mib(1)).unwrap();
    assert_eq!((trace.data().gauge, trace.data().used.mb()), (Gauge::Exact, 1));
    assert!(trace.to_string().ends_with("(exact)"), "{trace}");
    drop(block);
    assert_eq!(GpuMemTrace::new().data().gauge, Gauge::Off);
}

#[test]
fn a_simulated_device_is_summed_up_with_any_gauge() {
    if part().is_none() {
        let own = OwnProcess::new("traces_off::a_simulated_device_is_summed_up_with_any_gauge").part("sampled");
        own.env("GPUMEM_GAUGE", "sampled").passes();
        return;
    }
    let gpu = SimGpu::install(Bytes::gib(16)).unwrap();
    let trace = GpuMemTrace::builder().ctx("load").silent(true).start_or_off();
    let _block = gpu.alloc(Bytes::mib(3)).unwrap();
    assert_eq!(trace.data().gauge, Gauge::Sampled);
    let summary = gpumem::summary();
    let load = summary.scopes.iter().find(|scope| scope.path == ["load"]).map(|load| (load.used, load.peak));
    assert_eq!((summary.not_intercepted.as_deref(), load), (None, Some((Bytes::mib(3), Bytes::mib(3)))), "{summary}");
}

#[test]
fn without_a_device() {
    if part().is_none() {
        let outcome =
            OwnProcess::new("traces_off::without_a_device").part("none").env("CUDA_VISIBLE_DEVICES", "").passes();
        assert_eq!(outcome.stderr.matches("gpumem: traces are off: ").count(), 1, "{}", outcome.stderr);
        return;
    }
    guards_cost_nothing();
    assert!(GpuMemTrace::builder().start().is_err_and(|error| error.is_unavailable()));
    // The program can install a simulated device at any time.
    let _gpu = SimGpu::install(Bytes::gib(16)).unwrap();
    let trace = GpuMemTrace::builder().ctx_unless_off(|| "later").silent(true).start_or_off();
    assert_eq!(trace.data().gauge, Gauge::Exact);
    assert!(trace.to_string().ends_with("(later)"), "{trace}");
}

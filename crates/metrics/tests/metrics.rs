//! Tests the facade `metrics` with a recorder in memory.

use std::collections::BTreeMap;

use gpumem::{Bytes, GpuMemTrace, sim::SimGpu};
use gpumem_metrics::Reporter;
use metrics_util::debugging::{DebugValue, DebuggingRecorder};

const MIB: f64 = 1_048_576.0;

#[test]
fn numbers_of_each_report() {
    let gpu = SimGpu::install(Bytes::gib(16)).expect("nothing else is installed");
    let mut reporter = Reporter::new().expect("allocations are intercepted").largest(1);
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    // Returns each value by its name and labels, in order.
    let mut report = || -> BTreeMap<String, f64> {
        metrics::with_local_recorder(&recorder, || reporter.report());
        let values = snapshotter.snapshot().into_vec().into_iter().map(|(key, _, _, value)| {
            let labels: Vec<_> = key.key().labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
            let value = match value {
                DebugValue::Gauge(value) => value.into_inner(),
                DebugValue::Counter(value) => u32::try_from(value).expect("it is small").into(),
                DebugValue::Histogram(_) => unreachable!("there is none"),
            };
            (format!("{} {}", key.key().name(), labels.join(",")), value)
        });
        values.collect()
    };
    let load = GpuMemTrace::builder().ctx("load").silent(true).start_or_off();
    let weights = gpu.alloc(Bytes::mib(30)).expect("there is room");
    drop(load);
    let step = GpuMemTrace::builder().ctx("step").silent(true).start_or_off();
    let small = gpu.alloc_async(Bytes::mib(2)).expect("there is room");
    drop(gpu.alloc(Bytes::mib(500)).expect("there is room"));
    drop(step);
    gpu.alloc(Bytes::gib(20)).expect_err("the device is smaller");
    let first = report();
    let value_of = |values: &BTreeMap<String, f64>, name: &str| {
        *values.get(name).unwrap_or_else(|| panic!("{name} is not in {values:#?}"))
    };
    for (name, value) in [
        ("gpumem_process_live_bytes kind=device,cuda_ordinal=0", 30.0 * MIB),
        ("gpumem_process_live_bytes kind=pool,cuda_ordinal=0", 2.0 * MIB),
        ("gpumem_process_live_scope_bytes scope=load,cuda_ordinal=0", 30.0 * MIB),
        ("gpumem_process_live_scope_bytes scope=other,cuda_ordinal=0", 2.0 * MIB),
        ("gpumem_process_live_library_bytes library=program,cuda_ordinal=0", 32.0 * MIB),
        ("gpumem_process_peak_bytes cuda_ordinal=0", 532.0 * MIB),
        ("gpumem_process_interval_peak_bytes cuda_ordinal=0", 532.0 * MIB),
        ("gpumem_process_refused_total ", 1.0),
        ("gpumem_process_lost_total ", 0.0),
    ] {
        assert_eq!(value_of(&first, name).to_bits(), value.to_bits(), "{name}");
    }
    // The peak of the next interval is lower, and series that are gone are 0.
    drop(weights);
    drop(gpu.alloc(Bytes::mib(7)).expect("there is room"));
    let second = report();
    for (name, value) in [
        ("gpumem_process_live_bytes kind=device,cuda_ordinal=0", 0.0),
        ("gpumem_process_live_scope_bytes scope=load,cuda_ordinal=0", 0.0),
        ("gpumem_process_live_scope_bytes scope=step,cuda_ordinal=0", 2.0 * MIB),
        ("gpumem_process_live_scope_bytes scope=other,cuda_ordinal=0", 0.0),
        ("gpumem_process_peak_bytes cuda_ordinal=0", 532.0 * MIB),
        ("gpumem_process_interval_peak_bytes cuda_ordinal=0", 32.0 * MIB),
    ] {
        assert_eq!(value_of(&second, name).to_bits(), value.to_bits(), "{name}");
    }
    drop(small);
    // However many names the program uses over time, the number of series is limited, and the sums stay right.
    let mut sum = 0.0;
    let mut values = BTreeMap::new();
    for number in 0..40 {
        let request = GpuMemTrace::builder().ctx(format!("request {number}")).silent(true).start_or_off();
        let kept = gpu.alloc(Bytes::mib(3)).expect("there is room");
        values = report();
        let of_scopes = values.iter().filter(|(name, _)| name.starts_with("gpumem_process_live_scope_bytes"));
        sum += of_scopes.map(|(_, bytes)| bytes).sum::<f64>();
        drop((kept, request));
    }
    assert_eq!(sum.to_bits(), (40.0 * 3.0 * MIB).to_bits(), "{values:#?}");
    for metric in ["gpumem_process_live_scope_bytes", "gpumem_process_live_place_bytes"] {
        let series = values.keys().filter(|name| name.starts_with(metric)).count();
        assert!((10..=11).contains(&series), "{metric}: {values:#?}");
    }
    assert_eq!(
        value_of(&values, "gpumem_process_live_scope_bytes scope=other,cuda_ordinal=0").to_bits(),
        (3.0 * MIB).to_bits()
    );
}

//! Tests OpenTelemetry's meters with an exporter in memory.

use gpumem::{Bytes, GpuMemTrace, sim::SimGpu};
use opentelemetry::metrics::MeterProvider;
use opentelemetry_sdk::metrics::{
    InMemoryMetricExporter, PeriodicReader, SdkMeterProvider,
    data::{AggregatedMetrics, MetricData, ResourceMetrics, ScopeMetrics},
};

#[test]
fn numbers_of_each_collection() {
    let gpu = SimGpu::install(Bytes::gib(16)).expect("nothing else is installed");
    let exporter = InMemoryMetricExporter::default();
    let provider = SdkMeterProvider::builder().with_reader(PeriodicReader::builder(exporter.clone()).build()).build();
    gpumem_metrics::observe(&provider.meter("gpumem")).expect("allocations are intercepted");
    // Returns the name, the unit, the attributes in order, and the value.
    let collect = || -> Vec<String> {
        exporter.reset();
        provider.force_flush().expect("it is exported");
        let all = exporter.get_finished_metrics().expect("there are some");
        let metrics = all.iter().flat_map(ResourceMetrics::scope_metrics).flat_map(ScopeMetrics::metrics);
        let mut lines: Vec<_> = metrics
            .flat_map(|metric| {
                let points: Vec<_> = match metric.data() {
                    AggregatedMetrics::U64(MetricData::Gauge(gauge)) => gauge
                        .data_points()
                        .map(|point| (point.attributes().cloned().collect(), point.value()))
                        .collect(),
                    AggregatedMetrics::U64(MetricData::Sum(sum)) => {
                        sum.data_points().map(|point| (point.attributes().cloned().collect(), point.value())).collect()
                    }
                    other => panic!("{other:?}"),
                };
                points.into_iter().map(|(attributes, value): (Vec<opentelemetry::KeyValue>, u64)| {
                    let mut all: Vec<_> = attributes.iter().map(|one| format!("{}={}", one.key, one.value)).collect();
                    all.sort();
                    format!("{} {} {} {value}", metric.name(), metric.unit(), all.join(","))
                })
            })
            .collect();
        lines.sort();
        lines
    };
    let kept = gpu.alloc(Bytes::new(1_000)).expect("there is room");
    drop(gpu.alloc(Bytes::new(500)).expect("there is room"));
    let first = collect();
    for line in [
        "gpumem.process.interval.peak By cuda.ordinal=0 1500",
        "gpumem.process.live By cuda.ordinal=0,kind=device 1000",
        "gpumem.process.live.library By cuda.ordinal=0,library=program 1000",
        "gpumem.process.live.scope By cuda.ordinal=0,scope= 1000",
        "gpumem.process.lost {event}  0",
        "gpumem.process.peak By cuda.ordinal=0 1500",
        "gpumem.process.refused {event}  0",
    ] {
        assert!(first.contains(&line.to_owned()), "{line}\n{first:#?}");
    }
    drop(gpu.alloc(Bytes::new(200)).expect("there is room"));
    gpu.alloc(Bytes::gib(20)).expect_err("the device is smaller");
    let second = collect();
    for line in [
        "gpumem.process.interval.peak By cuda.ordinal=0 1200",
        "gpumem.process.peak By cuda.ordinal=0 1500",
        "gpumem.process.refused {event}  1",
    ] {
        assert!(second.contains(&line.to_owned()), "{line}\n{second:#?}");
    }
    drop(kept);
    // A name without memory is no longer reported.
    for number in 0..30 {
        let request = GpuMemTrace::builder().ctx(format!("request {number}")).silent(true).start_or_off();
        let kept = gpu.alloc(Bytes::new(700)).expect("there is room");
        let lines = collect();
        let of_scopes: Vec<_> = lines.iter().filter(|line| line.starts_with("gpumem.process.live.scope ")).collect();
        assert_eq!(of_scopes, [&format!("gpumem.process.live.scope By cuda.ordinal=0,scope=request {number} 700")]);
        drop((kept, request));
    }
}

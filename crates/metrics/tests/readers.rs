//! Tests OpenTelemetry's meters with two readers.

use gpumem::{Bytes, sim::SimGpu};
use opentelemetry::metrics::MeterProvider;
use opentelemetry_sdk::metrics::{
    InMemoryMetricExporter, PeriodicReader, SdkMeterProvider,
    data::{AggregatedMetrics, GaugeDataPoint, MetricData, ResourceMetrics, ScopeMetrics},
};

/// Returns the peaks of all collections.
fn peaks(exporter: &InMemoryMetricExporter) -> Vec<u64> {
    let all = exporter.get_finished_metrics().expect("there are some");
    let metrics = all.iter().flat_map(ResourceMetrics::scope_metrics).flat_map(ScopeMetrics::metrics);
    let of_intervals = metrics.filter(|metric| metric.name() == "gpumem.process.interval.peak");
    let values = of_intervals.flat_map(|metric| match metric.data() {
        AggregatedMetrics::U64(MetricData::Gauge(gauge)) => {
            gauge.data_points().map(GaugeDataPoint::value).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    });
    values.collect()
}

#[test]
fn each_of_two_readers_gets_each_peak() {
    let gpu = SimGpu::install(Bytes::gib(16)).expect("nothing else is installed");
    let exporters = [(); 2].map(|()| InMemoryMetricExporter::default());
    // Both collect when this test calls `force_flush`. Without a call, they collect only once a minute.
    let [first, second] = exporters.each_ref().map(|exporter| PeriodicReader::builder(exporter.clone()).build());
    let provider = SdkMeterProvider::builder().with_reader(first).with_reader(second).build();
    gpumem_metrics::observe(&provider.meter("gpumem")).expect("allocations are intercepted");
    for mib in 1..=100 {
        let peak = Bytes::mib(mib);
        drop(gpu.alloc(peak).expect("there is room"));
        provider.force_flush().expect("it is exported");
        let missed: Vec<_> = exporters.iter().filter(|exporter| !peaks(exporter).contains(&peak.get())).collect();
        assert!(missed.is_empty(), "{mib} MiB: {:?}", exporters.each_ref().map(peaks));
        exporters.iter().for_each(InMemoryMetricExporter::reset);
    }
}

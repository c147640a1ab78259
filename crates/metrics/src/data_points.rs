//! The values of one collection.

use std::collections::HashMap;

use gpumem::{
    Result,
    intercept::{Collected, Collector},
    report::Group,
};

use crate::schema::{INTERVAL_PEAK, LIBRARY, LIVE, LOST, Metric, OTHER, PEAK, PLACE, REJECTED, SCOPE, largest};

/// One value of a metric.
#[derive(Debug)]
pub(crate) struct DataPoint {
    pub(crate) metric: Metric,
    pub(crate) labels: Vec<(&'static str, String)>,
    pub(crate) value: u64,
}

/// The maximum number of characters in a label.
const LONGEST: usize = 128;

/// Creates a collector for each device.
pub(crate) fn collectors() -> Result<Vec<Collector>> {
    (0..gpumem::device::count()?).map(Collector::new).collect()
}

/// Collects the values of all devices. After a fork, the child process gets no values.
pub(crate) fn collect(collectors: &mut [Collector], most: usize) -> Vec<DataPoint> {
    let mut points = Vec::new();
    for (at, collector) in collectors.iter_mut().enumerate() {
        let device = match collector.uuid() {
            Some(uuid) => ("gpu.uuid", uuid),
            None => ("cuda.ordinal", collector.device().to_string()),
        };
        let Ok(collected) = collector.collect() else { return Vec::new() };
        // These two counts cover all devices, so they are reported only once.
        if at == 0 {
            for (metric, value) in [(REJECTED, collected.rejected), (LOST, collected.lost)] {
                points.push(DataPoint { metric, labels: Vec::new(), value });
            }
        }
        points.extend(of_device(&collected, most).into_iter().map(|mut point| {
            point.labels.push(device.clone());
            point
        }));
    }
    points
}

fn of_device(collected: &Collected, most: usize) -> Vec<DataPoint> {
    let peaks = [(PEAK, collected.peak), (INTERVAL_PEAK, collected.interval_peak)];
    let peaks = peaks.map(|(metric, bytes)| DataPoint { metric, labels: Vec::new(), value: bytes.get() });
    let kinds = collected.kinds.iter().map(|(kind, bytes)| DataPoint {
        metric: LIVE,
        labels: vec![("kind", kind.name().replace(' ', "_"))],
        value: bytes.get(),
    });
    let library = |group: &Group| label(group.library.as_deref().unwrap_or("program"));
    let scope = |group: &Group| label(&group.path.join(" > "));
    let place = |group: &Group| label(group.place.as_deref().or(group.library.as_deref()).unwrap_or_default());
    let groups = &collected.groups;
    let groups = [
        sums(LIBRARY, ["library"], groups, |group| [library(group)], most),
        sums(SCOPE, ["scope"], groups, |group| [scope(group)], most),
        sums(PLACE, ["place", "scope"], groups, |group| [place(group), scope(group)], most),
    ];
    peaks.into_iter().chain(kinds).chain(groups.into_iter().flatten()).collect()
}

/// Adds up the groups that have the same labels. Returns the largest sums, and one sum for all others.
fn sums<const N: usize>(
    metric: Metric,
    names: [&'static str; N],
    groups: &[Group],
    labels: impl Fn(&Group) -> [String; N],
    most: usize,
) -> Vec<DataPoint> {
    let mut sums = HashMap::new();
    for group in groups.iter().filter(|group| !group.is_cache) {
        *sums.entry(labels(group)).or_default() += group.bytes.get();
    }
    let sums = largest(sums, most, || [OTHER; N].map(str::to_owned)).into_iter();
    sums.map(|(labels, value)| DataPoint { metric, labels: names.into_iter().zip(labels).collect(), value }).collect()
}

/// Converts a value to the type that the gauges of OpenTelemetry and the crate `metrics` take.
#[expect(clippy::cast_precision_loss, reason = "no device has 2^53 bytes")]
pub(crate) fn to_float(value: u64) -> f64 {
    value as f64
}

fn label(text: &str) -> String {
    text.chars().take(LONGEST).collect()
}

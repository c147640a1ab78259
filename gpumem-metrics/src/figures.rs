//! The figures of one collection.

use std::{cmp::Reverse, collections::HashMap};

use gpumem::{
    Result,
    intercept::{Collected, Collector},
    report::Group,
};

/// The metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Metric {
    Live,
    Library,
    Scope,
    Place,
    Peak,
    IntervalPeak,
    Refused,
    Lost,
}

impl Metric {
    #[cfg(feature = "opentelemetry")]
    pub(crate) const ALL: [Self; 8] = [
        Self::Live,
        Self::Library,
        Self::Scope,
        Self::Place,
        Self::Peak,
        Self::IntervalPeak,
        Self::Refused,
        Self::Lost,
    ];

    /// The name in OpenTelemetry.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Live => "gpumem.process.live",
            Self::Library => "gpumem.process.live.library",
            Self::Scope => "gpumem.process.live.scope",
            Self::Place => "gpumem.process.live.place",
            Self::Peak => "gpumem.process.peak",
            Self::IntervalPeak => "gpumem.process.interval.peak",
            Self::Refused => "gpumem.process.refused",
            Self::Lost => "gpumem.process.lost",
        }
    }

    pub(crate) const fn description(self) -> &'static str {
        match self {
            Self::Live => "Live GPU memory of this process, by kind",
            Self::Library => "Live GPU memory, by the library that allocated it",
            Self::Scope => "Live GPU memory, by the scope in which it was allocated",
            Self::Place => "Live GPU memory, by the line that allocated it",
            Self::Peak => "The most GPU memory that was live at one time",
            Self::IntervalPeak => "The most GPU memory that was live since the last collection",
            Self::Refused => "Allocations that the driver refused",
            Self::Lost => "Events that were lost: figures may be wrong",
        }
    }

    /// Returns whether it only rises. All others are bytes.
    pub(crate) const fn is_counter(self) -> bool {
        matches!(self, Self::Refused | Self::Lost)
    }
}

/// One value of a metric.
#[derive(Debug)]
pub(crate) struct Figure {
    pub(crate) metric: Metric,
    pub(crate) labels: Vec<(&'static str, String)>,
    pub(crate) value: u64,
}

/// A label has at most this many characters.
const LONGEST: usize = 128;

/// A collector for each of the devices.
pub(crate) fn collectors() -> Result<Vec<Collector>> {
    (0..gpumem::device::count()?).map(Collector::new).collect()
}

/// Returns the figures of all devices. The child of a fork has none.
pub(crate) fn collect(collectors: &mut [Collector], largest: usize) -> Vec<Figure> {
    let mut figures = Vec::new();
    for (at, collector) in collectors.iter_mut().enumerate() {
        let device = match collector.uuid() {
            Some(uuid) => ("gpu.uuid", uuid),
            None => ("cuda.ordinal", collector.device().to_string()),
        };
        let Ok(collected) = collector.collect() else { return Vec::new() };
        // They belong to all devices.
        if at == 0 {
            for (metric, value) in [(Metric::Refused, collected.refused), (Metric::Lost, collected.lost)] {
                figures.push(Figure { metric, labels: Vec::new(), value });
            }
        }
        figures.extend(of_device(&collected, largest).into_iter().map(|mut figure| {
            figure.labels.push(device.clone());
            figure
        }));
    }
    figures
}

fn of_device(collected: &Collected, largest: usize) -> Vec<Figure> {
    let peaks = [(Metric::Peak, collected.peak), (Metric::IntervalPeak, collected.interval_peak)];
    let peaks = peaks.map(|(metric, bytes)| Figure { metric, labels: Vec::new(), value: bytes.get() });
    let kinds = collected.kinds.iter().map(|(kind, bytes)| Figure {
        metric: Metric::Live,
        labels: vec![("kind", kind.name().replace(' ', "_"))],
        value: bytes.get(),
    });
    let library = |group: &Group| vec![("library", label(group.library.as_deref().unwrap_or("program")))];
    let scope = |group: &Group| vec![("scope", label(&group.path.join(" > ")))];
    let place = |group: &Group| {
        let place = group.place.as_deref().or(group.library.as_deref()).unwrap_or_default();
        vec![("place", label(place)), ("scope", label(&group.path.join(" > ")))]
    };
    let by = |metric, labels: &dyn Fn(&Group) -> _| sums(metric, &collected.groups, labels, largest);
    let groups = [by(Metric::Library, &library), by(Metric::Scope, &scope), by(Metric::Place, &place)];
    peaks.into_iter().chain(kinds).chain(groups.into_iter().flatten()).collect()
}

/// Returns the sums of the groups that have the same labels: the largest ones, and one of all others.
fn sums(
    metric: Metric,
    groups: &[Group],
    labels: &dyn Fn(&Group) -> Vec<(&'static str, String)>,
    largest: usize,
) -> Vec<Figure> {
    let mut sums: HashMap<Vec<(&'static str, String)>, u64> = HashMap::new();
    for group in groups.iter().filter(|group| !group.is_cache) {
        *sums.entry(labels(group)).or_default() += group.bytes.get();
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    sums.sort_by(|(one, bytes), (other, more)| Reverse(bytes).cmp(&Reverse(more)).then_with(|| one.cmp(other)));
    let rest = sums.split_off(largest.min(sums.len()));
    if let Some((labels, _)) = rest.first() {
        let other = labels.iter().map(|(name, _)| (*name, "other".to_owned())).collect();
        sums.push((other, rest.iter().map(|(_, bytes)| bytes).sum()));
    }
    sums.into_iter().map(|(labels, value)| Figure { metric, labels, value }).collect()
}

fn label(text: &str) -> String {
    text.chars().take(LONGEST).collect()
}

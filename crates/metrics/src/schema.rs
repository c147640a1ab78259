//! The metrics of a process: their names, units and help texts, and the choice of the sums that get their own series. `gpumem export` uses
//! the same metrics.

/// One metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Metric {
    /// The name for OpenTelemetry.
    pub name: &'static str,
    /// The kind of instrument.
    pub kind: Kind,
    /// The unit of its values.
    pub unit: Unit,
    /// The description, one sentence or phrase.
    pub help: &'static str,
}

/// The kind of instrument of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A value that may be added up over GPUs. In Prometheus it is a gauge.
    UpDown,
    /// A value that rises and falls.
    Gauge,
    /// A value that only rises.
    Counter,
}

/// The unit of the values of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// A fraction of 1.
    Ratio,
    /// Events, such as failed allocations.
    Events,
    /// Countable things, such as processes.
    Things,
}

impl Unit {
    /// Returns the name for OpenTelemetry.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bytes => "By",
            Self::Ratio | Self::Things => "1",
            Self::Events => "{event}",
        }
    }
}

impl Metric {
    /// Creates a metric with these properties.
    pub const fn new(name: &'static str, kind: Kind, unit: Unit, help: &'static str) -> Self {
        Self { name, kind, unit, help }
    }

    /// Creates a gauge of bytes.
    pub const fn bytes(name: &'static str, help: &'static str) -> Self {
        Self::new(name, Kind::Gauge, Unit::Bytes, help)
    }

    /// Creates a metric that counts events since the start.
    pub const fn events(name: &'static str, help: &'static str) -> Self {
        Self::new(name, Kind::Counter, Unit::Events, help)
    }

    /// Returns the name for Prometheus, as OpenTelemetry derives it.
    pub fn prometheus_name(&self) -> String {
        let unit = match self.unit {
            Unit::Bytes => "_bytes",
            Unit::Ratio => "_ratio",
            Unit::Events | Unit::Things => "",
        };
        let total = if self.kind == Kind::Counter { "_total" } else { "" };
        format!("{}{unit}{total}", label(self.name))
    }
}

/// Returns the name of an attribute for Prometheus.
pub fn label(attribute: &str) -> String {
    attribute.replace('.', "_")
}

/// The peak of the device.
pub const PEAK: Metric = Metric::bytes("gpumem.process.peak", "The peak of the memory that a process had allocated.");
/// The peak since the last collection.
pub const INTERVAL_PEAK: Metric = Metric::bytes(
    "gpumem.process.interval.peak",
    "The peak of the memory that a process had allocated since the last collection.",
);
/// The live bytes by kind of memory.
pub const LIVE: Metric =
    Metric::bytes("gpumem.process.live", "Memory that a process has allocated, by kind of memory.");
/// The live bytes by library.
pub const LIBRARY: Metric = Metric::bytes(
    "gpumem.process.live.library",
    "Memory that a process has allocated, by the library that allocated it.",
);
/// The live bytes by scope.
pub const SCOPE: Metric = Metric::bytes("gpumem.process.live.scope", "Memory that a process has allocated, by scope.");
/// The live bytes by line and scope.
pub const PLACE: Metric =
    Metric::bytes("gpumem.process.live.place", "Memory that a process has allocated, by line and scope.");
/// The allocations that failed because the driver was out of memory.
pub const REJECTED: Metric =
    Metric::events("gpumem.process.refused", "Allocations that the driver rejected: out of memory.");
/// The events that were lost.
pub const LOST: Metric =
    Metric::events("gpumem.process.lost", "Events that were lost. If there are any, the numbers may be wrong.");

/// The metrics that this crate publishes.
#[cfg(any(test, feature = "opentelemetry"))]
pub(crate) const OF_PROGRAMS: [Metric; 8] = [PEAK, INTERVAL_PEAK, LIVE, LIBRARY, SCOPE, PLACE, REJECTED, LOST];

/// The label for the sum of everything that is not among the largest.
pub const OTHER: &str = "other";

/// Returns the largest `most` sums that are above 0, and the total of the rest under the name `other()`.
pub fn largest<N: Ord>(
    sums: impl IntoIterator<Item = (N, u64)>,
    most: usize,
    other: impl FnOnce() -> N,
) -> Vec<(N, u64)> {
    let mut sums: Vec<_> = sums.into_iter().filter(|(_, bytes)| *bytes > 0).collect();
    sums.sort_by(|(a, x), (b, y)| y.cmp(x).then_with(|| a.cmp(b)));
    let rest: u64 = sums.iter().skip(most).map(|(_, bytes)| bytes).sum();
    sums.truncate(most);
    if rest > 0 {
        let other = other();
        match sums.iter_mut().find(|(name, _)| *name == other) {
            Some((_, bytes)) => *bytes += rest,
            None => sums.push((other, rest)),
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_documentation_has_all_metrics() {
        let rows = include_str!("lib.rs").lines().filter(|line| line.starts_with("//! | `"));
        let names = rows.map(|row| row.split('|').skip(1).take(2).map(|cell| cell.trim().to_owned()).collect());
        let expected = OF_PROGRAMS.map(|of| vec![format!("`{}`", of.name), format!("`{}`", of.prometheus_name())]);
        assert_eq!(names.collect::<BTreeSet<Vec<_>>>(), BTreeSet::from(expected));
    }

    #[test]
    fn the_largest_have_names() {
        let sums = [("b", 3), ("a", 3), ("none", 0), ("c", 9), ("other", 4), ("d", 1)];
        assert_eq!(largest(sums, 2, || OTHER), [("c", 9), ("other", 11)]);
        assert_eq!(largest(sums, 3, || OTHER), [("c", 9), ("other", 8), ("a", 3)]);
        assert_eq!(largest(sums, 9, || OTHER).len(), 5);
    }
}

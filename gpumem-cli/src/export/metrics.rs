//! The names of exported metrics: those of OpenTelemetry, and those of Prometheus that are derived from them.

use std::collections::BTreeMap;

use super::sample::{
    DeviceSample, GpuId, GpuSample, LiveSample, PoolSample, ProcessId, RecordingSample, Sample, UsageSample,
};

/// One metric.
#[derive(Clone, Copy, Debug)]
pub(super) struct Metric {
    /// OpenTelemetry's name.
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) unit: Unit,
    pub(super) help: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The sum over GPUs makes sense. The metric is a gauge for Prometheus.
    UpDown,
    Gauge,
    Counter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Bytes,
    Ratio,
    Events,
    Things,
}

impl Unit {
    /// The name for OpenTelemetry.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Bytes => "By",
            Self::Ratio | Self::Things => "1",
            Self::Events => "{event}",
        }
    }
}

impl Metric {
    const fn new(name: &'static str, kind: Kind, unit: Unit, help: &'static str) -> Self {
        Self { name, kind, unit, help }
    }

    /// The name for Prometheus, as OpenTelemetry derives it.
    pub(super) fn prometheus_name(&self) -> String {
        let unit = match self.unit {
            Unit::Bytes => "_bytes",
            Unit::Ratio => "_ratio",
            Unit::Events | Unit::Things => "",
        };
        let total = if self.kind == Kind::Counter { "_total" } else { "" };
        format!("{}{unit}{total}", label(self.name))
    }
}

/// The name of an attribute for Prometheus.
pub(super) fn label(attribute: &str) -> String {
    attribute.replace('.', "_")
}

macro_rules! metrics {
    ($($name:ident = $text:literal, $kind:ident, $unit:ident, $help:literal;)*) => {
        $(const $name: &str = $text;)*
        pub(super) const METRICS: &[Metric] =
            &[$(Metric::new($name, Kind::$kind, Unit::$unit, $help),)*];
    };
}

metrics! {
    LIMIT = "hw.gpu.memory.limit", UpDown, Bytes, "Memory of the GPU or of the MIG slice.";
    USAGE = "hw.gpu.memory.usage", UpDown, Bytes, "Memory in use, as nvidia-smi shows it.";
    UTILIZATION = "hw.gpu.memory.utilization", Gauge, Ratio, "Memory in use, as a part of all.";
    FREE = "gpumem.gpu.memory.free", Gauge, Bytes, "Memory that is free.";
    RESERVED = "gpumem.gpu.memory.reserved", Gauge, Bytes, "Memory that the driver reserves for itself.";
    PROCESS_USAGE = "gpumem.process.usage", Gauge, Bytes, "Memory of a process, as the driver says.";
    ACCOUNTED = "gpumem.process.accounted.peak", Gauge, Bytes, "The most memory of a process, by NVML's accounting.";
    PEAK = "gpumem.process.peak", Gauge, Bytes, "The most that a recorded process had allocated since its recording began.";
    INTERVAL_PEAK = "gpumem.process.interval.peak", Gauge, Bytes,
        "The most that a recorded process had allocated since the same scraper has asked.";
    LIVE = "gpumem.process.live", Gauge, Bytes, "What a recorded process has allocated, by kind of memory.";
    LIBRARY = "gpumem.process.live.library", Gauge, Bytes, "What a recorded process has allocated, by the library that did it.";
    SCOPE = "gpumem.process.live.scope", Gauge, Bytes, "What a recorded process has allocated, by scope.";
    PLACE = "gpumem.process.live.place", Gauge, Bytes, "What a recorded process has allocated, by line and scope.";
    POOL_USED = "gpumem.process.pool.used", Gauge, Bytes, "What a registered pool has given out.";
    POOL_RESERVED = "gpumem.process.pool.reserved", Gauge, Bytes, "What a registered pool has from the driver.";
    LARGEST_HOLE = "gpumem.process.pool.largest.hole", Gauge, Bytes, "The largest unused piece in the blocks of a registered pool.";
    REFUSED = "gpumem.process.refused", Counter, Events, "Allocations that the driver refused: out of memory.";
    RETRIED = "gpumem.process.retried", Counter, Events, "Refused allocations that the same thread obtained within a second.";
    LOST = "gpumem.process.lost", Counter, Events,
        "Events that the recording or the exporter lost. If there are any, the figures may be wrong.";
    HIDDEN = "gpumem.exporter.hidden", Gauge, Things, "How much the exporter cannot see.";
}

/// The name of the sum of all that are not among the largest.
pub(super) const OTHER: &str = "other";

pub(super) type Attributes = Vec<(&'static str, String)>;

/// The values of each metric, by its attributes: no two are the same.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Points(BTreeMap<&'static str, BTreeMap<Attributes, f64>>);

impl Points {
    /// The points of a sample.
    pub(super) fn of(sample: &Sample) -> Self {
        let mut points = Self::default();
        for gpu in &sample.gpus {
            points.gpu(gpu);
        }
        for usage in &sample.usages {
            points.usage(usage);
        }
        for recording in &sample.recordings {
            points.recording(recording);
        }
        let hidden = sample.hidden;
        for (what, number) in [
            ("process", hidden.processes),
            ("recorded", hidden.unknown),
            ("recording", hidden.recordings),
            ("reading", hidden.readings),
        ] {
            points.add(HIDDEN, vec![("what", what.to_owned())], Some(number as u64));
        }
        points
    }

    /// The values of a metric, by attributes.
    pub(super) fn of_metric(&self, name: &str) -> impl Iterator<Item = (&Attributes, f64)> {
        self.0.get(name).into_iter().flatten().map(|(attributes, value)| (attributes, *value))
    }

    fn add(&mut self, name: &'static str, attributes: Attributes, value: Option<u64>) {
        // Amounts are below 2^53.
        #[expect(clippy::cast_precision_loss, reason = "they are exact")]
        self.add_number(name, attributes, value.map(|value| value as f64));
    }

    fn add_number(&mut self, name: &'static str, attributes: Attributes, value: Option<f64>) {
        if let Some(value) = value {
            self.0.entry(name).or_default().entry(attributes).or_insert(value);
        }
    }

    fn gpu(&mut self, of: &GpuSample) {
        let mut attributes = gpu_attributes(&of.gpu);
        attributes.extend(of.parent.clone().map(|parent| ("hw.parent", parent)));
        attributes.extend(of.model.clone().map(|model| ("hw.model", model)));
        let memory = of.memory;
        for (name, value) in [
            (LIMIT, memory.total_bytes),
            (USAGE, memory.used_bytes),
            (FREE, memory.free_bytes),
            (RESERVED, memory.reserved_bytes),
        ] {
            self.add(name, attributes.clone(), value);
        }
        #[expect(clippy::cast_precision_loss, reason = "it is a ratio")]
        let ratio = |(used, total): (u64, u64)| used as f64 / total as f64;
        let utilization = memory.used_bytes.zip(memory.total_bytes).filter(|(_, total)| *total > 0).map(ratio);
        self.add_number(UTILIZATION, attributes, utilization);
    }

    fn usage(&mut self, of: &UsageSample) {
        let attributes = [process_attributes(&of.process), gpu_attributes(&of.gpu)].concat();
        self.add(PROCESS_USAGE, attributes.clone(), of.used);
        self.add(ACCOUNTED, attributes, of.accounted_peak);
    }

    fn recording(&mut self, of: &RecordingSample) {
        let process = process_attributes(&of.process);
        for (name, value) in [(REFUSED, of.refused), (RETRIED, of.retried), (LOST, of.lost)] {
            self.add(name, process.clone(), Some(value));
        }
        for DeviceSample { gpu, peak, interval_peak, live } in &of.devices {
            let attributes = [process.clone(), gpu_attributes(gpu)].concat();
            self.add(PEAK, attributes.clone(), *peak);
            self.add(INTERVAL_PEAK, attributes.clone(), *interval_peak);
            if let Some(live) = live {
                self.live(&attributes, live);
            }
        }
    }

    fn live(&mut self, attributes: &Attributes, live: &LiveSample) {
        let with = |more: &[(&'static str, &str)]| {
            let more = more.iter().map(|(name, value)| (*name, (*value).to_owned()));
            attributes.iter().cloned().chain(more).collect::<Attributes>()
        };
        for (kind, bytes) in &live.kinds {
            self.add(LIVE, with(&[("kind", kind)]), Some(*bytes));
        }
        for (library, bytes) in &live.libraries {
            self.add(LIBRARY, with(&[("library", library)]), Some(*bytes));
        }
        for (scope, bytes) in &live.scopes {
            self.add(SCOPE, with(&[("scope", scope)]), Some(*bytes));
        }
        for ((place, scope), bytes) in &live.places {
            self.add(PLACE, with(&[("place", place), ("scope", scope)]), Some(*bytes));
        }
        for PoolSample { name, used, reserved, largest_hole } in &live.pools {
            let values = [(POOL_USED, Some(*used)), (POOL_RESERVED, Some(*reserved)), (LARGEST_HOLE, *largest_hole)];
            for (metric, value) in values {
                self.add(metric, with(&[("pool", name)]), value);
            }
        }
    }
}

fn gpu_attributes(GpuId { id, uuid, ordinal }: &GpuId) -> Attributes {
    let all =
        [("hw.id", id.clone()), ("gpu.uuid", uuid.clone()), ("cuda.ordinal", ordinal.map(|number| number.to_string()))];
    known(all)
}

fn process_attributes(ProcessId { pid, command, owner, container, pod }: &ProcessId) -> Attributes {
    known([
        ("process.pid", pid.map(|pid| pid.to_string())),
        ("process.command", command.clone()),
        ("process.owner", owner.clone()),
        ("container.id", container.clone()),
        ("k8s.pod.uid", pod.clone()),
    ])
}

fn known<const N: usize>(all: [(&'static str, Option<String>); N]) -> Attributes {
    all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

/// The largest `most` of these sums, and the rest as one.
pub(super) fn largest<N: Ord>(
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
    use std::{collections::BTreeSet, fs};

    use super::*;

    fn file(name: &str) -> String {
        fs::read_to_string(format!("{}/../{name}", env!("CARGO_MANIFEST_DIR"))).expect("it is there")
    }

    /// The names of metrics in a text.
    fn names(text: &str) -> BTreeSet<String> {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let is_name = |word: &&str| word.starts_with("gpumem_") || word.starts_with("hw_gpu_");
        words.filter(is_name).map(str::to_owned).collect()
    }

    #[test]
    fn the_book_has_all_metrics_and_the_rules_and_the_dashboard_no_others() {
        let all: BTreeSet<_> = METRICS.iter().map(Metric::prometheus_name).collect();
        let page = file("docs/book/src/metrics.md");
        let table: String = page.lines().filter(|line| line.starts_with("| `")).collect();
        assert_eq!(names(&table), all);
        for text in
            ["contrib/prometheus/rules.yml", "contrib/prometheus/dashboard.json"].map(file).iter().chain([&page])
        {
            let others: Vec<_> = names(text).difference(&all).cloned().collect();
            assert!(others.is_empty(), "{others:?}");
        }
    }

    #[test]
    fn the_largest_have_names() {
        let sums = [("b", 3), ("a", 3), ("none", 0), ("c", 9), ("other", 4), ("d", 1)];
        assert_eq!(largest(sums, 2, || OTHER), [("c", 9), ("other", 11)]);
        assert_eq!(largest(sums, 3, || OTHER), [("c", 9), ("other", 8), ("a", 3)]);
        assert_eq!(largest(sums, 9, || OTHER).len(), 5);
    }
}

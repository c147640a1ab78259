//! The names of exported metrics: OpenTelemetry's, and the names for Prometheus that are derived from them.

use std::collections::BTreeMap;

use gpumem_core::model::MemKind;
use gpumem_metrics::schema::{INTERVAL_PEAK, Kind, LIBRARY, LIVE, LOST, Metric, PEAK, PLACE, REJECTED, SCOPE, Unit};

use super::sample::{
    Counts, DeviceSample, DriverSample, GpuId, GpuSample, LiveSample, PoolSample, ProcessId, RecordingSample, Sample,
    UsageSample,
};

const LIMIT: Metric =
    Metric::new("hw.gpu.memory.limit", Kind::UpDown, Unit::Bytes, "Memory of the GPU or of the MIG slice.");
const USAGE: Metric =
    Metric::new("hw.gpu.memory.usage", Kind::UpDown, Unit::Bytes, "Memory in use, as nvidia-smi shows it.");
const UTILIZATION: Metric =
    Metric::new("hw.gpu.memory.utilization", Kind::Gauge, Unit::Ratio, "The fraction of the memory that is in use.");
const FREE: Metric = Metric::bytes("gpumem.gpu.memory.free", "Memory that is free.");
const RESERVED: Metric = Metric::bytes("gpumem.gpu.memory.reserved", "Memory that the driver reserves for itself.");
const PROCESS_USAGE: Metric = Metric::bytes("gpumem.process.usage", "Memory of a process, as the driver reports it.");
const ACCOUNTED: Metric =
    Metric::bytes("gpumem.process.accounted.peak", "The peak memory of a process, from NVML's accounting.");
const POOL_USED: Metric = Metric::bytes("gpumem.process.pool.used", "Memory that a registered pool has handed out.");
const POOL_RESERVED: Metric =
    Metric::bytes("gpumem.process.pool.reserved", "Memory that a registered pool holds from the driver.");
const LARGEST_HOLE: Metric =
    Metric::bytes("gpumem.process.pool.largest.hole", "The largest unused piece in the blocks of a registered pool.");
pub(super) const DRIVER: Metric = Metric::bytes(
    "gpumem.process.driver",
    "Memory that the driver took by itself for a process, as it was measured last, by kind of memory.",
);
const RETRIED: Metric =
    Metric::events("gpumem.process.retried", "Rejected allocations that the same thread obtained within a second.");
const HIDDEN: Metric = Metric::new(
    "gpumem.exporter.hidden",
    Kind::Gauge,
    Unit::Things,
    "Processes and recordings that the exporter cannot see, and failed readings.",
);

/// All metrics. The crate `gpumem-metrics` defines the ones that a program exports itself.
pub(super) const METRICS: &[Metric] = &[
    LIMIT,
    USAGE,
    UTILIZATION,
    FREE,
    RESERVED,
    PROCESS_USAGE,
    ACCOUNTED,
    PEAK,
    INTERVAL_PEAK,
    LIVE,
    LIBRARY,
    SCOPE,
    PLACE,
    POOL_USED,
    POOL_RESERVED,
    LARGEST_HOLE,
    DRIVER,
    REJECTED,
    RETRIED,
    LOST,
    HIDDEN,
];

pub(super) type Attributes = Vec<(&'static str, String)>;

/// The values of each metric, by attributes. No two values share all attributes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Points(BTreeMap<&'static str, BTreeMap<Attributes, f64>>);

impl Points {
    /// Returns the points of a sample.
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
            ("dormant", hidden.dormant),
            ("recording", hidden.recordings),
            ("reading", hidden.readings),
        ] {
            points.add(HIDDEN, vec![("what", what.to_owned())], Some(number as u64));
        }
        points
    }

    /// Returns the values of a metric, by attributes.
    pub(super) fn of_metric(&self, metric: &Metric) -> impl Iterator<Item = (&Attributes, f64)> {
        self.0.get(metric.name).into_iter().flatten().map(|(attributes, value)| (attributes, *value))
    }

    fn add(&mut self, metric: Metric, attributes: Attributes, value: Option<u64>) {
        // Amounts are below 2^53.
        #[expect(clippy::cast_precision_loss, reason = "they are exact")]
        self.add_number(metric, attributes, value.map(|value| value as f64));
    }

    fn add_number(&mut self, metric: Metric, attributes: Attributes, value: Option<f64>) {
        if let Some(value) = value {
            let known = self.0.entry(metric.name).or_default().entry(attributes).or_insert(value);
            // A process may have ended one recording and started another.
            if [PEAK, INTERVAL_PEAK].contains(&metric) {
                *known = known.max(value);
            }
        }
    }

    fn gpu(&mut self, of: &GpuSample) {
        let mut attributes = gpu_attributes(&of.gpu);
        attributes.extend(of.parent.clone().map(|parent| ("hw.parent", parent)));
        attributes.extend(of.model.clone().map(|model| ("hw.model", model)));
        let memory = of.memory;
        for (metric, value) in [
            (LIMIT, memory.total_bytes),
            (USAGE, memory.used_bytes),
            (FREE, memory.free_bytes),
            (RESERVED, memory.reserved_bytes),
        ] {
            self.add(metric, attributes.clone(), value);
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
        let Counts { rejected, retried, lost } = of.counts;
        for (metric, value) in [(REJECTED, rejected), (RETRIED, retried), (LOST, lost)] {
            self.add(metric, process.clone(), Some(value));
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
        // Without live memory, one kind gets 0: a missing series would mean a value that could not be read.
        let none = [(MemKind::Device.name(), 0)];
        let kinds = if live.kinds.is_empty() { &none[..] } else { &live.kinds };
        for (kind, bytes) in kinds {
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
        if let Some(DriverSample { measured_by, kinds }) = &live.driver {
            for (kind, bytes) in kinds {
                self.add(DRIVER, with(&[("kind", kind), ("measured_by", measured_by.name())]), Some(*bytes));
            }
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

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs};

    use super::*;

    fn file(name: &str) -> String {
        fs::read_to_string(format!("{}/tests/linked/{name}", env!("CARGO_MANIFEST_DIR"))).expect("it is there")
    }

    /// Returns the names of metrics that occur in a text.
    fn names(text: &str) -> BTreeSet<String> {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        // The page also contains the name of the crate.
        let is_name =
            |word: &&str| (word.starts_with("gpumem_") || word.starts_with("hw_gpu_")) && *word != "gpumem_metrics";
        words.filter(is_name).map(str::to_owned).collect()
    }

    #[test]
    fn the_book_has_all_metrics_and_the_rules_and_the_dashboard_no_others() {
        let all: BTreeSet<_> = METRICS.iter().map(Metric::prometheus_name).collect();
        let page = file("metrics.md");
        let table: String = page.lines().filter(|line| line.starts_with("| `")).collect();
        assert_eq!(names(&table), all);
        for text in ["rules.yml", "dashboard.json"].map(file).iter().chain([&page]) {
            let others: Vec<_> = names(text).difference(&all).cloned().collect();
            assert!(others.is_empty(), "{others:?}");
        }
    }
}

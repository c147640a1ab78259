//! Publishes metrics through OpenTelemetry meters.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use gpumem::{Result, intercept::Collector};
use opentelemetry::{
    KeyValue,
    metrics::{AsyncInstrumentBuilder, Meter},
};

use crate::{
    LARGEST,
    data_points::{DataPoint, collect, collectors, to_float},
    schema::{INTERVAL_PEAK, Kind, Metric, OF_PROGRAMS, Unit},
    windows::Windows,
};

/// Creates the instruments for all devices. Their callbacks collect the values whenever a reader of the meter asks for them, without
/// calling the driver. If a provider has several readers, each reader gets each peak. A reader is identified by the thread on which it
/// collects, so a reader that moves to another thread may get a peak twice.
///
/// ```
/// # let _gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// gpumem_metrics::observe(&opentelemetry::global::meter("gpumem"))?;
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// # Errors
/// Returns an error if there is no driver, or if allocations cannot be intercepted.
pub fn observe(meter: &Meter) -> Result<()> {
    let shared = Arc::new(Mutex::new(Shared {
        collectors: collectors()?,
        intervals: HashMap::new(),
        readers: Vec::new(),
        made: 0,
    }));
    for metric in &OF_PROGRAMS {
        let shared = Arc::clone(&shared);
        instrument(meter, metric, move || shared.lock().unwrap_or_else(PoisonError::into_inner).values_of(*metric));
    }
    Ok(())
}

/// The values of a metric, and the attributes of each.
type Values = Vec<(f64, Vec<KeyValue>)>;

/// Creates the instrument of a metric. `values` is called for each collection.
pub fn instrument(meter: &Meter, metric: &'static Metric, values: impl Fn() -> Values + Send + Sync + 'static) {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "they are whole numbers, and not negative"
    )]
    let whole = |value: f64| value as u64;
    match (metric.kind, metric.unit) {
        (_, Unit::Ratio) => {
            observing(meter.f64_observable_gauge(metric.name), metric, values, |value| value).build();
        }
        (Kind::Gauge, _) => {
            observing(meter.u64_observable_gauge(metric.name), metric, values, whole).build();
        }
        (Kind::Counter, _) => {
            observing(meter.u64_observable_counter(metric.name), metric, values, whole).build();
        }
        (Kind::UpDown, _) => {
            let signed = move |value| whole(value).cast_signed();
            observing(meter.i64_observable_up_down_counter(metric.name), metric, values, signed).build();
        }
    }
}

fn observing<'meter, I, M>(
    builder: AsyncInstrumentBuilder<'meter, I, M>,
    metric: &Metric,
    values: impl Fn() -> Values + Send + Sync + 'static,
    number: impl Fn(f64) -> M + Send + Sync + 'static,
) -> AsyncInstrumentBuilder<'meter, I, M> {
    let builder = builder.with_unit(metric.unit.name()).with_description(metric.help);
    builder.with_callback(move |to| {
        for (value, attributes) in values() {
            to.observe(number(value), &attributes);
        }
    })
}

/// The maximum number of readers that are remembered. The reader that has not collected for the longest time is forgotten first.
const MOST_READERS: usize = 16;
/// If a value is observed for one reader, the SDK stores it for the other readers, too. A reader that collects at the same time would get
/// that value instead of its own peak. Therefore all readers get a peak that was observed within this time.
const AT_ONCE: Duration = Duration::from_millis(100);

struct Shared {
    collectors: Vec<Collector>,
    /// The peaks of each device, by its labels.
    intervals: HashMap<Labels, Windows>,
    /// The readers, in the order of their last collection; the latest is at the end.
    readers: Vec<Reader>,
    /// The number of readers so far.
    made: u32,
}

type Labels = Vec<(&'static str, String)>;

/// A reader of the meter. Within one collection, all its instruments get values that were read at the same moment.
struct Reader {
    thread: ThreadId,
    number: u32,
    points: Vec<DataPoint>,
    /// The metrics whose values this reader has already taken.
    taken: HashSet<Metric>,
    /// The time of the last request.
    collected_at: Instant,
}

impl Shared {
    fn values_of(&mut self, metric: Metric) -> Values {
        let thread = thread::current().id();
        let mut reader = if let Some(at) = self.readers.iter().position(|reader| reader.thread == thread) {
            self.readers.remove(at)
        } else {
            self.made += 1;
            Reader {
                thread,
                number: self.made,
                points: Vec::new(),
                taken: HashSet::new(),
                collected_at: Instant::now(),
            }
        };
        // If a metric is requested again, this is the start of the next collection.
        if reader.taken.is_empty() || !reader.taken.insert(metric) {
            reader.points = self.collect(reader.number);
            reader.taken = HashSet::from([metric]);
        }
        reader.collected_at = Instant::now();
        let of_others = |point: &DataPoint| {
            let others = self.readers.iter().filter(|other| other.collected_at.elapsed() < AT_ONCE);
            let same = others.flat_map(|other| &other.points).filter(|other| other.labels == point.labels);
            same.filter(|other| other.metric == metric).map(|other| other.value).max().unwrap_or(0)
        };
        let value =
            |point: &DataPoint| if metric == INTERVAL_PEAK { point.value.max(of_others(point)) } else { point.value };
        let labels =
            |point: &DataPoint| point.labels.iter().map(|(name, value)| KeyValue::new(*name, value.clone())).collect();
        let points = reader.points.iter().filter(|point| point.metric == metric);
        let values = points.map(|point| (to_float(value(point)), labels(point))).collect();
        self.readers.push(reader);
        if self.readers.len() > MOST_READERS {
            let forgotten = self.readers.remove(0).number;
            self.intervals.values_mut().for_each(|windows| windows.forget(forgotten));
        }
        values
    }

    /// Collects the values for this reader.
    fn collect(&mut self, reader: u32) -> Vec<DataPoint> {
        let mut points = collect(&mut self.collectors, LARGEST);
        for point in points.iter_mut().filter(|point| point.metric == INTERVAL_PEAK) {
            let windows = self.intervals.entry(point.labels.clone()).or_default();
            windows.note(point.value);
            // The collector's next interval starts with the memory that is in use now.
            point.value = windows.collect(reader, 0);
            windows.confirm(reader);
        }
        points
    }
}

//! Meters of OpenTelemetry.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
};

use gpumem::{Result, intercept::Collector};
use opentelemetry::{
    KeyValue,
    metrics::{AsyncInstrumentBuilder, Meter},
};

use crate::{
    LARGEST,
    figures::{Figure, collect, collectors, to_float},
    schema::{Kind, Metric, OF_PROGRAMS, Unit},
};

/// Creates the instruments of all devices. Their callbacks collect the figures whenever a reader of the meter asks, without asking the driver. If
/// a provider has several readers, each ends the interval of `gpumem.process.interval.peak` for all of them.
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
    let shared = Arc::new(Mutex::new(Shared { collectors: collectors()?, figures: Vec::new(), taken: HashSet::new() }));
    for metric in &OF_PROGRAMS {
        let shared = Arc::clone(&shared);
        instrument(meter, metric, move || shared.lock().unwrap_or_else(PoisonError::into_inner).values_of(*metric));
    }
    Ok(())
}

/// The values of a metric, and the attributes of each.
type Values = Vec<(f64, Vec<KeyValue>)>;

/// Creates the instrument of a metric. Each collection calls `values`.
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

/// All instruments of one collection have figures of the same moment.
struct Shared {
    collectors: Vec<Collector>,
    figures: Vec<Figure>,
    /// The metrics whose figures were taken.
    taken: HashSet<Metric>,
}

impl Shared {
    fn values_of(&mut self, metric: Metric) -> Values {
        // A metric that is asked for again belongs to the next collection.
        if self.taken.is_empty() || !self.taken.insert(metric) {
            self.figures = collect(&mut self.collectors, LARGEST);
            self.taken = HashSet::from([metric]);
        }
        let figures = self.figures.iter().filter(|figure| figure.metric == metric);
        let labels =
            |figure: &Figure| figure.labels.iter().map(|(name, value)| KeyValue::new(*name, value.clone())).collect();
        figures.map(|figure| (to_float(figure.value), labels(figure))).collect()
    }
}

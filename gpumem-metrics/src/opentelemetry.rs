//! Meters of OpenTelemetry.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
};

use gpumem::{Result, intercept::Collector};
use opentelemetry::{KeyValue, metrics::Meter};

use crate::{
    LARGEST,
    figures::{Figure, Metric, collect, collectors},
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
/// If there is no driver, or if allocations cannot be intercepted.
pub fn observe(meter: &Meter) -> Result<()> {
    let shared = Arc::new(Mutex::new(Shared { collectors: collectors()?, figures: Vec::new(), taken: HashSet::new() }));
    for metric in Metric::ALL {
        let shared = Arc::clone(&shared);
        let values = move || shared.lock().unwrap_or_else(PoisonError::into_inner).values_of(metric);
        if metric.is_counter() {
            let counter = meter.u64_observable_counter(metric.name()).with_unit("{event}");
            counter
                .with_description(metric.description())
                .with_callback(move |observer| {
                    for (value, labels) in values() {
                        observer.observe(value, &labels);
                    }
                })
                .build();
        } else {
            let gauge = meter.u64_observable_gauge(metric.name()).with_unit("By");
            gauge
                .with_description(metric.description())
                .with_callback(move |observer| {
                    for (value, labels) in values() {
                        observer.observe(value, &labels);
                    }
                })
                .build();
        }
    }
    Ok(())
}

/// All instruments of one collection have figures of the same moment.
struct Shared {
    collectors: Vec<Collector>,
    figures: Vec<Figure>,
    /// The metrics whose figures were taken.
    taken: HashSet<Metric>,
}

impl Shared {
    fn values_of(&mut self, metric: Metric) -> Vec<(u64, Vec<KeyValue>)> {
        // A metric that is asked for again belongs to the next collection.
        if self.taken.is_empty() || !self.taken.insert(metric) {
            self.figures = collect(&mut self.collectors, LARGEST);
            self.taken = HashSet::from([metric]);
        }
        let figures = self.figures.iter().filter(|figure| figure.metric == metric);
        let labels =
            |figure: &Figure| figure.labels.iter().map(|(name, value)| KeyValue::new(*name, value.clone())).collect();
        figures.map(|figure| (figure.value, labels(figure))).collect()
    }
}

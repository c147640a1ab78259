//! The facade `metrics`.

use std::collections::HashMap;

use gpumem::{Result, intercept::Collector};
use metrics::{Key, Label, counter, gauge};

use crate::{
    LARGEST,
    figures::{Figure, collect, collectors, to_float},
    schema::{Kind, Metric, label},
};

/// Sets the metrics of the recorder that the program has installed.
///
/// ```no_run
/// let mut reporter = gpumem_metrics::Reporter::new()?;
/// std::thread::spawn(move || loop {
///     reporter.report();
///     std::thread::sleep(std::time::Duration::from_secs(5));
/// });
/// # Ok::<(), gpumem::Error>(())
/// ```
#[derive(Debug)]
pub struct Reporter {
    collectors: Vec<Collector>,
    largest: usize,
    /// The series of the last report.
    before: HashMap<(Metric, Vec<Label>), String>,
}

impl Reporter {
    /// Makes a reporter of all devices. It begins to intercept allocations.
    ///
    /// # Errors
    /// Returns an error if there is no driver, or if allocations cannot be intercepted.
    pub fn new() -> Result<Self> {
        Ok(Self { collectors: collectors()?, largest: LARGEST, before: HashMap::new() })
    }

    /// Sets the number of libraries, scopes and places that have series of their own; [`LARGEST`], unless this is
    /// called.
    #[must_use]
    pub fn largest(mut self, largest: usize) -> Self {
        self.largest = largest;
        self
    }

    /// Sets all metrics. The next interval begins. A series that is not among the largest ones any more becomes 0: its bytes are in `other`.
    pub fn report(&mut self) {
        let figures = collect(&mut self.collectors, self.largest);
        if figures.is_empty() {
            return;
        }
        let mut now = HashMap::new();
        for Figure { metric, labels, value } in figures {
            let labels: Vec<_> = labels.into_iter().map(|(name, value)| Label::new(label(name), value)).collect();
            let name = metric.prometheus_name();
            let key = Key::from_parts(name.clone(), labels.clone());
            if metric.kind == Kind::Counter {
                counter!(key.name().to_owned(), key.labels()).absolute(value);
            } else {
                gauge!(key.name().to_owned(), key.labels()).set(to_float(value));
                now.insert((metric, labels), name);
            }
        }
        for ((metric, labels), name) in self.before.drain() {
            if !now.contains_key(&(metric, labels.clone())) {
                gauge!(name, labels.iter()).set(0.0);
            }
        }
        self.before = now;
    }
}

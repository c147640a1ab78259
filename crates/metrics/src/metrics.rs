//! The facade `metrics`.

use std::collections::{HashMap, HashSet};

use gpumem::{Result, intercept::Collector};
use metrics::{Label, counter, gauge};

use crate::{
    LARGEST,
    figures::{Figure, collect, collectors, to_float},
    schema::{Kind, Metric, OTHER, label},
};

/// At most this many times as many names get series over time as at once: the facade cannot remove a series. There are fewer kinds of memory.
const OVER_TIME: usize = 10;

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
    /// All series so far.
    series: HashSet<Series>,
}

/// A metric and its labels. The last label is the device.
type Series = (Metric, Vec<Label>);

impl Reporter {
    /// Makes a reporter of all devices. It begins to intercept allocations.
    ///
    /// # Errors
    /// Returns an error if there is no driver, or if allocations cannot be intercepted.
    pub fn new() -> Result<Self> {
        Ok(Self { collectors: collectors()?, largest: LARGEST, series: HashSet::new() })
    }

    /// Sets the number of libraries, scopes and places that have series of their own; [`LARGEST`], unless this is
    /// called.
    #[must_use]
    pub fn largest(mut self, largest: usize) -> Self {
        self.largest = largest;
        self
    }

    /// Sets all metrics. The next interval begins. A series that is not among the largest ones any more becomes 0: its bytes are in `other`.
    /// When ten times as many names as [`largest`](Self::largest) have had series of their own, new ones are in `other`, too.
    pub fn report(&mut self) {
        let figures = collect(&mut self.collectors, self.largest);
        if figures.is_empty() {
            return;
        }
        let mut now: HashMap<Series, u64> = HashMap::new();
        for Figure { metric, labels, value } in figures {
            let labels: Vec<_> = labels.into_iter().map(|(name, value)| Label::new(label(name), value)).collect();
            if metric.kind == Kind::Counter {
                counter!(metric.prometheus_name(), labels.iter()).absolute(value);
            } else {
                *now.entry(self.series_of(metric, labels)).or_default() += value;
            }
        }
        for series in &self.series {
            let (metric, labels) = series;
            gauge!(metric.prometheus_name(), labels.iter()).set(to_float(now.get(series).copied().unwrap_or(0)));
        }
    }

    /// Returns the series with these labels, or the one of all others.
    fn series_of(&mut self, metric: Metric, labels: Vec<Label>) -> Series {
        let of_device = |known: &&Series| known.0 == metric && known.1.last() == labels.last();
        let is_full = self.series.iter().filter(of_device).count() >= self.largest.max(1).saturating_mul(OVER_TIME);
        let mut series = (metric, labels);
        if is_full
            && !self.series.contains(&series)
            && let Some((_, names)) = series.1.split_last_mut()
        {
            for name in names {
                *name = Label::new(name.key().to_owned(), OTHER);
            }
        }
        self.series.insert(series.clone());
        series
    }
}

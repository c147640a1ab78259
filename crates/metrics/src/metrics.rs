//! Sets metrics through the facade `metrics`.

use std::collections::{HashMap, HashSet};

use gpumem::{Result, intercept::Collector};
use metrics::{Label, counter, gauge};

use crate::{
    LARGEST,
    data_points::{DataPoint, collect, collectors, to_float},
    schema::{Kind, Metric, OTHER, label},
};

/// The facade cannot remove a series. Therefore the number of names that ever get their own series is limited to this many times the
/// number of names that have one at the same time. Kinds of memory stay below that limit.
const OVER_TIME: usize = 10;

/// Sets the metrics on the recorder that the program has installed.
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

/// A metric and its labels, with the device as the last label.
type Series = (Metric, Vec<Label>);

impl Reporter {
    /// Creates a reporter for all devices, and starts to intercept allocations.
    ///
    /// # Errors
    /// Returns an error if there is no driver, or if allocations cannot be intercepted.
    pub fn new() -> Result<Self> {
        Ok(Self { collectors: collectors()?, largest: LARGEST, series: HashSet::new() })
    }

    /// Sets the number of libraries, scopes and places that have their own series. The default is [`LARGEST`].
    #[must_use]
    pub fn largest(mut self, largest: usize) -> Self {
        self.largest = largest;
        self
    }

    /// Sets all metrics and starts the next interval. A series that is no longer among the largest is set to 0, and its bytes are added to
    /// `other`. Once ten times [`largest`](Self::largest) names have had their own series, new names are added to `other` as well.
    pub fn report(&mut self) {
        let points = collect(&mut self.collectors, self.largest);
        if points.is_empty() {
            return;
        }
        let mut now: HashMap<Series, u64> = HashMap::new();
        for DataPoint { metric, labels, value } in points {
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

    /// Returns the series with these labels, or the series `other` if the limit is reached.
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

//! Statistics of traces: each end of a trace is counted, and nothing is printed.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sketches_ddsketch::DDSketch;

use crate::session::{Session, current, events::Numbered};
use crate::{
    derive::{Names, short_names},
    model::{ByteDelta, Bytes, CallsiteId, Trace, alike, name_in_line},
    process,
    report::{CallFigures, Content, MOST_ALIKE, NameStats, Spread, Stats, WorstCall},
};

/// The statistics of a session, by names that differ in numbers at most and by device.
#[derive(Default)]
pub(in crate::session) struct StatsTable(Mutex<HashMap<(u32, u32), Alike>>);

/// The names that differ in numbers alone. Their memory does not grow with the number of calls.
#[derive(Default)]
struct Alike {
    /// The calls of all of them.
    calls: u64,
    rows: Vec<Row>,
    /// There were too many names, so one row is for all.
    is_together: bool,
}

struct Row {
    callsite: CallsiteId,
    /// Without its figures.
    counts: NameStats,
    figures: Option<Figures>,
}

struct Figures {
    used: Distribution,
    sum: i64,
    peaked: Distribution,
    worst: WorstCall,
    /// The number of the worst call among those of all names that are alike.
    worst_of_alike: u64,
}

struct Distribution {
    min: i64,
    max: i64,
    sketch: DDSketch,
}

/// The statistics of the traces that ended since the start, or since [`stats_n_reset`]: those under `#[gpu_mem_trace(stats)]`, with
/// [`stats`](crate::GpuMemTraceBuilder::stats), or for which `GPUMEM` asks. They are printed when the process ends.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// use gpumem::{Bytes, GpuMemTrace};
///
/// for step in 1..=100 {
///     let _step = GpuMemTrace::builder().ctx("step").stats().start()?;
///     drop(gpu.alloc(Bytes::mib(step))?);
/// }
/// let stats = gpumem::stats();
/// let step = &stats.names[0];
/// let figures = step.figures.as_ref().unwrap();
/// assert_eq!((step.calls, figures.peaked.max.mb(), figures.worst.call), (100, 100, 100));
/// println!("{stats}");
/// # Ok::<(), gpumem::Error>(())
/// ```
pub fn stats() -> Stats {
    if process::is_forked() {
        return Stats::default();
    }
    let session = current();
    let rows = session.stats_table().values().flat_map(Alike::rows).collect();
    session.named(rows)
}

/// As [`stats`]. Prints them, and counts from 0 on: for the end of an epoch.
///
/// ```
/// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::GpuMemTrace;
/// drop(GpuMemTrace::builder().ctx("step").stats().start()?);
/// gpumem::stats_n_reset();
/// assert!(gpumem::stats().names.is_empty());
/// # Ok::<(), gpumem::Error>(())
/// ```
pub fn stats_n_reset() -> Stats {
    if process::is_forked() {
        return Stats::default();
    }
    let session = current();
    let stats = session.take_stats();
    session.print(Content::Stats(stats.clone()));
    stats
}

/// Prints the statistics, if there are any.
pub(in crate::session) fn print_stats(session: &'static Session) {
    let stats = session.take_stats();
    if !stats.names.is_empty() {
        session.print(Content::Stats(stats));
    }
}

impl Session {
    fn stats_table(&self) -> MutexGuard<'_, HashMap<(u32, u32), Alike>> {
        self.stats.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_stats(&self) -> Stats {
        let table = std::mem::take(&mut *self.stats_table());
        self.named(table.values().flat_map(Alike::rows).collect())
    }

    /// Counts the end of a trace. `name` is its own.
    pub(in crate::session) fn count(&self, callsite: Numbered, trace: &Trace, name: impl FnOnce() -> Option<String>) {
        let Numbered { id, alike, .. } = callsite;
        let mut table = self.stats_table();
        let Alike { calls, rows, is_together } = table.entry((alike, trace.device)).or_default();
        *calls += 1;
        if !*is_together && rows.len() == MOST_ALIKE && !rows.iter().any(|row| row.callsite == id) {
            let first = rows.drain(..).reduce(Row::merged);
            rows.extend(first);
            *is_together = true;
        }
        let at = if *is_together { Some(0) } else { rows.iter().position(|row| row.callsite == id) };
        let at = at.unwrap_or_else(|| {
            rows.push(Row::new(id, trace));
            rows.len() - 1
        });
        rows[at].count(trace, *calls, || (name(), self.inbox.age()));
    }

    /// The rows with their names. For a row of several names, the callsite is any of them.
    fn named(&self, rows: Vec<(CallsiteId, bool, NameStats)>) -> Stats {
        let callsites: Vec<_> = rows.iter().map(|(callsite, ..)| *callsite).collect();
        let names = short_names(&self.inbox, self, &callsites);
        let with_name = |((callsite, is_together, mut row), name): ((CallsiteId, bool, NameStats), String)| {
            row.name = name;
            if is_together {
                row.name = alike(&name_in_line(&self.callsite(callsite).to_string())).into_owned();
            }
            row
        };
        Stats::of(rows.into_iter().zip(names).map(with_name).collect())
    }
}

impl Alike {
    fn rows(&self) -> impl Iterator<Item = (CallsiteId, bool, NameStats)> {
        self.rows.iter().map(|row| {
            let mut shown = row.counts.clone();
            shown.figures = row.figures.as_ref().map(Figures::shown);
            if let Some(figures) = shown.figures.as_mut().filter(|_| !self.is_together) {
                figures.worst.name = None;
            }
            (row.callsite, self.is_together, shown)
        })
    }
}

impl Row {
    fn new(callsite: CallsiteId, trace: &Trace) -> Self {
        let counts = NameStats::new(String::new(), trace.device, trace.simulated);
        Self { callsite, counts, figures: None }
    }

    /// `now` is the name of the trace and the time.
    fn count(&mut self, trace: &Trace, of_alike: u64, now: impl FnOnce() -> (Option<String>, Duration)) {
        let counts = &mut self.counts;
        counts.calls += 1;
        counts.sampled += u64::from(trace.sampling.is_some());
        counts.doubtful += u64::from(trace.lost > 0 || trace.untracked > 0);
        counts.overlapped += u64::from(trace.overlapped || trace.adoption_is_shared);
        if !trace.is_measured() {
            counts.unmeasured += 1;
            return;
        }
        let (used, needed) = (trace.used.get(), trace.peak_over_start());
        let peaked = i64::try_from(trace.peaked.get()).unwrap_or(i64::MAX);
        let worst = |call| {
            let (name, time) = now();
            WorstCall::new(call, name, time, needed)
        };
        match &mut self.figures {
            None => {
                let (used_in, peaked) = (Distribution::of(used), Distribution::of(peaked));
                let worst = worst(counts.calls);
                self.figures = Some(Figures { used: used_in, sum: used, peaked, worst, worst_of_alike: of_alike });
            }
            Some(figures) => {
                figures.used.add(used);
                figures.peaked.add(peaked);
                figures.sum = figures.sum.saturating_add(used);
                if needed > figures.worst.needed {
                    (figures.worst, figures.worst_of_alike) = (worst(counts.calls), of_alike);
                }
            }
        }
    }

    /// One row for both.
    fn merged(mut self, other: Self) -> Self {
        let (counts, more) = (&mut self.counts, &other.counts);
        counts.calls += more.calls;
        counts.unmeasured += more.unmeasured;
        counts.sampled += more.sampled;
        counts.doubtful += more.doubtful;
        counts.overlapped += more.overlapped;
        self.figures = match (self.figures, other.figures) {
            (Some(one), Some(other)) => Some(one.merged(other)),
            (one, other) => one.or(other),
        };
        if let Some(figures) = &mut self.figures {
            figures.worst.call = figures.worst_of_alike;
        }
        self
    }
}

impl Figures {
    fn merged(mut self, other: Self) -> Self {
        self.used.merge(&other.used);
        self.peaked.merge(&other.peaked);
        self.sum = self.sum.saturating_add(other.sum);
        let order = |figures: &Self| (figures.worst.needed, std::cmp::Reverse(figures.worst_of_alike));
        if order(&other) > order(&self) {
            (self.worst, self.worst_of_alike) = (other.worst, other.worst_of_alike);
        }
        self
    }

    fn shown(&self) -> CallFigures {
        let peaked = self.peaked.spread().map(|bytes| Bytes::new(bytes.max(0).unsigned_abs()));
        CallFigures::new(self.used.spread().map(ByteDelta::new), ByteDelta::new(self.sum), peaked, self.worst.clone())
    }
}

#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "quantiles are right to 1 %")]
impl Distribution {
    fn of(value: i64) -> Self {
        let mut sketch = DDSketch::default();
        sketch.add(value as f64);
        Self { min: value, max: value, sketch }
    }

    fn add(&mut self, value: i64) {
        self.min = self.min.min(value);
        self.max = self.max.max(value);
        self.sketch.add(value as f64);
    }

    fn merge(&mut self, other: &Self) {
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        // It fails only if the two have different settings.
        let _ = self.sketch.merge(&other.sketch);
    }

    fn spread(&self) -> Spread<i64> {
        let quantile = |part| {
            let value = self.sketch.quantile(part).ok().flatten();
            value.map_or(self.max, |value| value.round() as i64).clamp(self.min, self.max)
        };
        Spread::new(self.min, quantile(0.5), quantile(0.99), self.max)
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::{
        export::Sink,
        session::{GpuMemTrace, TestSession, set_sink},
        source::sim::SimGpu,
    };

    fn session(filter: &str) -> (TestSession, SimGpu) {
        let session = TestSession::new(&[("GPUMEM_REPORT", "off"), ("GPUMEM", filter)]).unwrap();
        let gpu = session.add(Bytes::gib(16)).unwrap();
        (session, gpu)
    }

    fn call(gpu: &SimGpu, name: &str, mib: u64) {
        let trace = GpuMemTrace::with_ctx(name);
        drop(gpu.alloc(Bytes::mib(mib)).unwrap());
        drop(trace);
    }

    #[test]
    fn quantiles_are_right_to_one_percent() {
        let mut all = Distribution::of(-1000);
        (-999..=1000).for_each(|value| all.add(value * 1001));
        let Spread { min, median, p99, max, .. } = all.spread();
        assert_eq!((min, max), (-999_999, 1_001_000));
        assert!(median.abs() <= 2002, "{median}");
        assert!((p99 - 980_980).abs() <= 9810, "{p99}");
        let one = Distribution::of(512 << 20).spread();
        assert_eq!((one.median, one.p99), (512 << 20, 512 << 20));
    }

    #[test]
    fn each_name_has_a_row_until_there_are_too_many() {
        let (session, gpu) = session("stats");
        session.run(|| {
            let names = || stats().names.into_iter().map(|name| (name.name, name.calls)).collect::<Vec<_>>();
            let numbers = 0..u64::try_from(MOST_ALIKE).unwrap();
            numbers.clone().for_each(|number| call(&gpu, &format!("request {number}"), 20 - number));
            call(&gpu, "request 3", 1);
            call(&gpu, "load", 100);
            assert_eq!((names().len(), names()[0].clone()), (MOST_ALIKE + 1, ("load".to_owned(), 1)));
            assert_eq!(names()[1..3], [("request 0".to_owned(), 1), ("request 1".to_owned(), 1)]);
            assert_eq!(stats().names[1].figures.as_ref().unwrap().worst.name, None);
            (100..2000).for_each(|number| call(&gpu, &format!("request {number}"), 1));
            let all = u64::try_from(MOST_ALIKE).unwrap() + 1 + 1900;
            assert_eq!(names(), [("load".to_owned(), 1), ("request #".to_owned(), all)]);
            let figures = stats().names[1].figures.clone().unwrap();
            assert_eq!((figures.worst.call, figures.worst.name.as_deref()), (1, Some("request 0")));
            call(&gpu, "request 5000", 50);
            let figures = stats_n_reset().names[1].figures.clone().unwrap();
            assert_eq!((figures.worst.call, figures.worst.name.as_deref()), (all + 1, Some("request 5000")));
            assert_eq!((figures.peaked.min, figures.peaked.max), (Bytes::mib(1), Bytes::mib(50)));
            assert!(figures.peaked.median.get().abs_diff(1 << 20) <= 1 << 14, "{figures:?}");
            assert_eq!(stats(), Stats::default());
        });
    }

    #[test]
    fn what_may_be_wrong_is_counted() {
        let (session, gpu) = session("");
        session.run(|| {
            let start = || GpuMemTrace::builder().ctx("step").stats();
            let sampled = start().gauge(crate::model::Gauge::Sampled).start().unwrap();
            drop(sampled);
            let outer = start().start().unwrap();
            let lost = crate::model::EventKind::Lost { count: 1 };
            current().inbox.post(&lost);
            drop(outer);
            // The explicit option, `silent` and the filter.
            drop(start().silent(true).start().unwrap());
            let kept = gpu.alloc(Bytes::mib(3)).unwrap();
            let freed = start().start().unwrap();
            drop(kept);
            drop(freed);
            let step = stats().names.remove(0);
            assert_eq!((step.calls, step.sampled, step.doubtful, step.unmeasured), (3, 1, 1, 0));
            let figures = step.figures.unwrap();
            assert_eq!((figures.used.min, figures.sum), (ByteDelta::new(-3 << 20), ByteDelta::new(-3 << 20)));
        });
    }

    #[test]
    fn nothing_is_printed_before_it_is_asked_for() {
        let (session, gpu) = session("stats,load=lines");
        let printed: std::sync::Arc<Mutex<Vec<String>>> = std::sync::Arc::default();
        let to = std::sync::Arc::clone(&printed);
        session.run(|| {
            set_sink(Sink::custom(move |output| to.lock().unwrap().push(output.to_string())));
            call(&gpu, "step", 64);
            call(&gpu, "load", 1);
            let printed = || std::mem::take(&mut *printed.lock().unwrap());
            let lines = printed();
            assert!(lines.iter().any(|line| line.contains("(load: exit)")), "{lines:?}");
            assert!(!lines.iter().any(|line| line.contains("step")), "{lines:?}");
            let stats = stats_n_reset().to_string();
            assert!(stats.contains("\n step      1  used"), "{stats}");
            assert_eq!(printed(), [stats]);
            print_stats(current());
            assert!(printed().is_empty(), "there are none");
            call(&gpu, "step", 1);
            print_stats(current());
            assert_eq!(printed().len(), 1);
        });
    }
}

//! Statistics of traces: each end of a trace is counted, and nothing is printed.

use crate::session::{
    Session, current,
    events::{Numbered, numberless_of},
    output::stats_table::UnnamedRow,
};
use crate::{
    derive::{Names, short_names},
    model::{Trace, alike, name_in_line},
    process,
    report::{Content, Stats},
};

/// Returns the statistics of the traces that ended since the start, or since [`stats_n_reset`]: those under
/// `#[gpu_mem_trace(stats)]`, with [`stats`](crate::GpuMemTraceBuilder::stats), or requested by `GPUMEM`. They are also printed
/// when the process exits.
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
/// let measured = step.measured.as_ref().unwrap();
/// assert_eq!((step.calls, measured.peaked.max.mb(), measured.worst.call), (100, 100, 100));
/// println!("{stats}");
/// # Ok::<(), gpumem::Error>(())
/// ```
pub fn stats() -> Stats {
    if process::is_forked() {
        return Stats::default();
    }
    let session = current();
    session.named(session.stats.rows())
}

/// Returns and prints the same statistics as [`stats`], and restarts the counts from 0, for the end of an epoch.
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
    let stats = session.named(session.stats.take());
    session.print(Content::Stats(stats.clone()));
    stats
}

/// Prints the statistics, if there are any.
pub(in crate::session) fn print_stats(session: &'static Session) {
    let stats = session.named(session.stats.take());
    if !stats.names.is_empty() {
        session.print(Content::Stats(stats));
    }
}

impl Session {
    /// Counts the end of a trace. `name` returns the name of the trace.
    pub(in crate::session) fn count(&self, callsite: Numbered, trace: &Trace, name: impl FnOnce() -> Option<String>) {
        self.stats.count(callsite, trace, || (name(), self.inbox.age()));
    }

    /// Returns the rows with their names. For a row of several names, the callsite is any of them.
    fn named(&self, rows: Vec<UnnamedRow>) -> Stats {
        let callsites: Vec<_> = rows.iter().map(|row| row.callsite).collect();
        let names = short_names(&self.inbox, self, &callsites);
        let with_name = |(UnnamedRow { callsite, is_together, mut row }, name): (UnnamedRow, String)| {
            let full = self.callsite(callsite).to_string();
            row.name = match numberless_of(&full) {
                Some(numberless) => numberless.to_owned(),
                None if is_together => alike(&name_in_line(&full)).into_owned(),
                None => name,
            };
            row
        };
        Stats::of(rows.into_iter().zip(names).map(with_name).collect())
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{
        export::Sink,
        model::{ByteDelta, Bytes},
        report::MOST_ALIKE,
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
    fn each_name_has_a_row_until_there_are_too_many() {
        let (session, gpu) = session("request #=stats,load=stats");
        session.run(|| {
            let names = || stats().names.into_iter().map(|name| (name.name, name.calls)).collect::<Vec<_>>();
            let numbers = 0..u64::try_from(MOST_ALIKE).unwrap();
            numbers.clone().for_each(|number| call(&gpu, &format!("request {number}"), 20 - number));
            call(&gpu, "request 3", 1);
            call(&gpu, "load", 100);
            assert_eq!((names().len(), names()[0].clone()), (MOST_ALIKE + 1, ("load".to_owned(), 1)));
            assert_eq!(names()[1..3], [("request 0".to_owned(), 1), ("request 1".to_owned(), 1)]);
            assert_eq!(stats().names[1].measured.as_ref().unwrap().worst.name, None);
            (100..2000).for_each(|number| call(&gpu, &format!("request {number}"), 1));
            let all = u64::try_from(MOST_ALIKE).unwrap() + 1 + 1900;
            assert_eq!(names(), [("load".to_owned(), 1), ("request #".to_owned(), all)]);
            let measured = stats().names[1].measured.clone().unwrap();
            assert_eq!((measured.worst.call, measured.worst.name.as_deref()), (1, Some("request 0")));
            call(&gpu, "request 5000", 50);
            let measured = stats_n_reset().names[1].measured.clone().unwrap();
            assert_eq!((measured.worst.call, measured.worst.name.as_deref()), (all + 1, Some("request 5000")));
            assert_eq!((measured.peaked.min, measured.peaked.max), (Bytes::mib(1), Bytes::mib(50)));
            assert_eq!((measured.peaked.median, measured.peaked.p99), (Bytes::mib(1), Bytes::mib(1)));
            assert_eq!(stats(), Stats::default());
            // The row has the same name after a reset, although this name came after too many others.
            call(&gpu, "request 6000", 1);
            assert_eq!(names(), [("request #".to_owned(), 1)]);
        });
    }

    #[test]
    fn each_quantile_is_what_a_call_had() {
        let (session, gpu) = session("stats");
        session.run(|| {
            (1..=10).for_each(|call_of| call(&gpu, "ten", call_of * 100));
            call(&gpu, "two", 10);
            call(&gpu, "two", 1000);
            let stats = stats().names;
            let peaked =
                |at: usize| stats[at].measured.as_ref().map(|measured| (measured.peaked.median, measured.peaked.p99));
            assert_eq!(peaked(0), Some((Bytes::mib(500), Bytes::mib(1000))));
            assert_eq!(peaked(1), Some((Bytes::mib(10), Bytes::mib(1000))));
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
            let measured = step.measured.unwrap();
            assert_eq!((measured.used.min, measured.sum), (ByteDelta::new(-3 << 20), ByteDelta::new(-3 << 20)));
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

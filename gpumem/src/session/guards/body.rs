//! What an attribute puts into the body of a function: its trace, and the lines and the budget that were asked for.

use std::{
    mem,
    panic::Location,
    sync::{Arc, Mutex, PoisonError},
};

use crate::report;
use crate::session::{Budget, GpuMemTrace, GpuMemTraceBuilder, ScopeHandle};

/// What is to be measured, before it starts.
#[must_use = "nothing is measured before `start`"]
pub struct TraceSpec {
    trace: GpuMemTraceBuilder,
    lines: Option<Lines>,
    budget: Option<Budget>,
    end: Option<Shared>,
}

impl TraceSpec {
    /// A body under this trace, which starts later and perhaps elsewhere: its place in the sources is the caller's.
    #[track_caller]
    pub fn new(mut trace: GpuMemTraceBuilder) -> Self {
        trace.at = Some(Location::caller());
        Self { trace, lines: None, budget: None, end: None }
    }

    /// Each statement is told; the body marks where they begin.
    pub fn lines(mut self, lines: &Lines) -> Self {
        self.lines = Some(lines.clone());
        self
    }

    /// It fails when it comes to more.
    pub fn budget(mut self, budget: Budget) -> Self {
        self.budget = Some(budget);
        self
    }

    /// It ends where this is dropped, and not with the future around it.
    pub fn ended_by(mut self, end: &End) -> Self {
        self.end = Some(Arc::clone(&end.0));
        self
    }

    /// Starts the trace. What is returned beside the guard is where the guard is to be put, if the body ends it.
    pub(in crate::session) fn start_shared(mut self) -> (BodyGuard, Option<Shared>) {
        let end = self.end.take();
        (self.start(), end)
    }

    /// Starts the trace.
    pub fn start(self) -> BodyGuard {
        let Self { trace: builder, lines, mut budget, end: _ } = self;
        let report = builder.on_exit_report;
        // Reported here, when everything is known.
        let builder = builder.on_exit_report(false);
        let (trace, budget) = match budget.take() {
            None => (builder.start_or_off(), None),
            Some(budget) => budget.start(builder),
        };
        let trace = match &lines {
            None => Some(trace),
            Some(lines) => {
                lines.recorder().trace = Some(trace);
                None
            }
        };
        BodyGuard { trace, lines, budget, report }
    }
}

/// The guard of a body. Its drop reports, and then panics if the budget was not kept, unless a panic is on its way.
#[must_use = "a body is measured until this is dropped"]
pub struct BodyGuard {
    /// The trace, unless the lines have it.
    trace: Option<GpuMemTrace>,
    lines: Option<Lines>,
    budget: Option<Budget>,
    report: bool,
}

impl BodyGuard {
    /// What carries the scope of the trace to other threads and tasks.
    pub(in crate::session) fn handle(&self) -> ScopeHandle {
        let handle = match &self.lines {
            None => self.trace.as_ref().map(GpuMemTrace::handle),
            Some(lines) => lines.recorder().trace.as_ref().map(GpuMemTrace::handle),
        };
        handle.unwrap_or_else(|| ScopeHandle::of(None))
    }
}

impl Drop for BodyGuard {
    fn drop(&mut self) {
        let lines = self.lines.take().map(|lines| mem::take(&mut *lines.recorder()));
        let (trace, lines) = match lines {
            None => (self.trace.take(), None),
            Some(mut recorder) => {
                recorder.leave();
                (recorder.trace, Some((recorder.lines, recorder.end)))
            }
        };
        let Some(mut trace) = trace else { return };
        trace.stop();
        let (figures, lines) = match lines {
            None => (trace.data(), None),
            Some((lines, end)) => {
                let (figures, lines) = lines.finish(end, trace.data());
                (figures, Some((lines, end)))
            }
        };
        if self.report {
            trace.tell(Some(&"exit"), figures, lines);
        }
        if let Some(budget) = self.budget.take() {
            budget.check(figures, &trace);
        }
    }
}

/// The guard of an async body, while it runs.
pub(in crate::session) type Shared = Arc<Mutex<Option<BodyGuard>>>;

/// Ends the measurement of an async body: a variable of the body, declared after its arguments and before all else, so that
/// it is dropped where the guard of any other function is.
#[must_use = "a body is measured until this is dropped"]
pub struct End(Shared);

impl End {
    /// Of a body that has not started.
    #[expect(clippy::new_without_default, reason = "for the code that the attribute writes alone")]
    pub fn new() -> Self {
        Self(Arc::default())
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // Dropped after the lock: it reports, and may panic.
        let measured = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(measured);
    }
}

/// The statements of a body as they run. The guard has one end of it, the body the other.
#[derive(Clone)]
pub struct Lines(Arc<Mutex<Recorder>>);

#[derive(Default)]
struct Recorder {
    /// There while the body runs.
    trace: Option<GpuMemTrace>,
    lines: report::Lines,
    /// The statement that is running.
    running: Option<(u32, &'static str)>,
    /// The last line of the body.
    end: u32,
}

impl Lines {
    /// Of a body that ends on line `end`.
    pub fn new(end: u32) -> Self {
        Self(Arc::new(Mutex::new(Recorder { end, ..Recorder::default() })))
    }

    /// A statement begins here, and the one before it is over.
    pub fn line(&self, number: u32, source: &'static str) -> Mark<'_> {
        let mut recorder = self.recorder();
        recorder.leave();
        recorder.running = Some((number, source));
        Mark(self)
    }

    /// The last statement is over: what its scope holds is dropped from now on.
    pub fn end(&self) {
        self.recorder().leave();
    }

    fn recorder(&self) -> std::sync::MutexGuard<'_, Recorder> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recorder {
    /// The running statement is over, by one reading that begins what comes next.
    fn leave(&mut self) {
        if let (Some((number, source)), Some(trace)) = (self.running.take(), &self.trace) {
            self.lines.push(number, source, trace.read_next());
            #[cfg(feature = "capture")]
            trace.record_line(number, source);
        }
    }
}

/// Stands after the variables of one statement and before those of the next. Variables are dropped from the last to the
/// first, so that the first mark to be dropped knows that the body is being left, by whatever way.
#[must_use = "it marks the end of the body"]
pub struct Mark<'a>(&'a Lines);

impl Drop for Mark<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

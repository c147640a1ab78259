//! The parts that an attribute adds to a function body: a trace, and optionally its lines and its budget.

use std::{
    mem,
    sync::{Arc, Mutex, PoisonError},
};

use crate::report;
use crate::session::{Budget, GpuMemTrace, GpuMemTraceBuilder, ScopeHandle, events::CodeLine};

/// The settings of an attribute's measurement, before it starts.
#[must_use = "nothing is measured before `start`"]
pub struct TraceSpec {
    trace: GpuMemTraceBuilder,
    lines: Option<Lines>,
    budget: Option<Budget>,
    end: Option<Shared>,
}

impl TraceSpec {
    /// Creates a body with this trace. The trace starts later, possibly at another source location; reports name the location of
    /// this call.
    #[track_caller]
    pub fn new(mut trace: GpuMemTraceBuilder) -> Self {
        trace.at = Some(CodeLine::of_caller());
        Self { trace, lines: None, budget: None, end: None }
    }

    /// Reports each statement. The body marks where statements start.
    pub fn lines(mut self, lines: &Lines) -> Self {
        self.lines = Some(lines.clone());
        self
    }

    /// Sets a budget. The end of the body panics if the budget is exceeded.
    pub fn budget(mut self, budget: Budget) -> Self {
        self.budget = Some(budget);
        self
    }

    /// Makes the measurement end when `end` is dropped, instead of when the future around it ends.
    pub fn ended_by(mut self, end: &End) -> Self {
        self.end = Some(Arc::clone(&end.0));
        self
    }

    /// Makes the scope one that threads enter only through its handle. Without a budget, only allocations inside the scope count,
    /// because other tasks of the thread run while it is open.
    pub(in crate::session) fn unentered(mut self) -> Self {
        self.trace = self.trace.entered(false);
        self.trace.request.of_task = self.budget.is_none();
        self
    }

    /// Starts the trace. If the body ends the measurement, the caller must store the guard in the second value.
    pub(in crate::session) fn start_shared(mut self) -> (BodyGuard, Option<Shared>) {
        let end = self.end.take();
        (self.start(), end)
    }

    /// Starts the trace.
    pub fn start(self) -> BodyGuard {
        let Self { trace: builder, lines, mut budget, end: _ } = self;
        let report = builder.on_exit_report;
        // `BodyGuard` prints the report, together with the lines.
        let builder = builder.on_exit_report(false);
        let (trace, budget) = match budget.take() {
            None => (builder.start_or_off(), None),
            Some(budget) => budget.start(builder),
        };
        let trace = match &lines {
            None => Some(trace),
            Some(lines) => {
                lines.state().trace = Some(trace);
                None
            }
        };
        BodyGuard { trace, lines, budget, report }
    }
}

/// The guard of a body. Dropping it prints the report, then panics if the budget was exceeded, unless the thread is already
/// panicking.
#[must_use = "a body is measured until this is dropped"]
pub struct BodyGuard {
    /// The trace, unless `lines` holds it.
    trace: Option<GpuMemTrace>,
    lines: Option<Lines>,
    budget: Option<Budget>,
    report: bool,
}

impl BodyGuard {
    /// Returns the handle of the trace's scope, for other threads and tasks.
    pub(in crate::session) fn handle(&self) -> ScopeHandle {
        let handle = match &self.lines {
            None => self.trace.as_ref().map(GpuMemTrace::handle),
            Some(lines) => lines.state().trace.as_ref().map(GpuMemTrace::handle),
        };
        handle.unwrap_or_else(|| ScopeHandle::of(None))
    }
}

impl Drop for BodyGuard {
    fn drop(&mut self) {
        let lines = self.lines.take().map(|lines| mem::take(&mut *lines.state()));
        let (trace, lines) = match lines {
            None => (self.trace.take(), None),
            Some(mut state) => {
                state.end_statement();
                (state.trace, Some((state.lines, state.end)))
            }
        };
        let Some(mut trace) = trace else { return };
        // A budget needs the blocks.
        let keep_period = self.budget.is_some() || trace.guard.as_ref().is_some_and(|guard| guard.prints_lines());
        trace.close(keep_period);
        let (result, lines) = match lines {
            None => (trace.data(), Vec::new()),
            Some((lines, end)) => lines.finish(end, trace.data()),
        };
        if self.report {
            trace.print_report(Some(&"exit"), result, lines, true);
        }
        if let Some(budget) = self.budget.take() {
            budget.check(result, &trace);
        }
    }
}

/// The guard of an async body, while the body runs.
pub(in crate::session) type Shared = Arc<Mutex<Option<BodyGuard>>>;

/// Ends the measurement of an async body. It is a variable of the body, declared after the arguments and before everything else.
/// Therefore, it is dropped at the same point as the guard of a sync function.
#[must_use = "a body is measured until this is dropped"]
pub struct End(Shared);

impl End {
    /// Creates the end of a body that has not started.
    #[expect(clippy::new_without_default, reason = "for the code that the attribute writes alone")]
    pub fn new() -> Self {
        Self(Arc::default())
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // The guard is dropped after the lock is released: its drop prints a report and may panic.
        let guard = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(guard);
    }
}

/// The results for the statements of a body. Shared between the guard and the body.
#[derive(Clone)]
pub struct Lines(Arc<Mutex<LinesState>>);

#[derive(Default)]
struct LinesState {
    /// The guard. It is `Some` while the body runs.
    trace: Option<GpuMemTrace>,
    lines: report::Lines,
    /// The statement that is running.
    running: Option<(u32, &'static str)>,
    /// The last line of the body.
    end: u32,
}

impl Lines {
    /// Creates the lines of a body that ends on line `end`.
    pub fn new(end: u32) -> Self {
        Self(Arc::new(Mutex::new(LinesState { end, ..LinesState::default() })))
    }

    /// Ends the previous statement and starts a new one.
    pub fn line(&self, number: u32, source: &'static str) -> Mark<'_> {
        let mut state = self.state();
        state.end_statement();
        state.running = Some((number, source));
        Mark(self)
    }

    /// Ends the last statement. After this, the variables of the body are dropped.
    pub fn end(&self) {
        self.state().end_statement();
    }

    fn state(&self) -> std::sync::MutexGuard<'_, LinesState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LinesState {
    /// Ends the running statement. The same reading starts the next one.
    fn end_statement(&mut self) {
        if let (Some((number, source)), Some(trace)) = (self.running.take(), &self.trace) {
            self.lines.push(number, source, trace.read_next());
        }
    }
}

/// A variable between two statements. Variables are dropped in reverse order, so the drop of the first mark means that the body ends,
/// for whatever reason.
#[must_use = "it marks the end of the body"]
pub struct Mark<'a>(&'a Lines);

impl Drop for Mark<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

//! The reports of a trace.

use std::{
    borrow::Cow,
    fmt::{self, Display},
    mem,
    num::NonZeroU64,
};

use super::trace::{ActiveTrace, GpuMemTrace, TraceState};
use crate::session::events::Numbered;
use crate::{
    model::{Gauge, Trace},
    process,
    report::{Content, Line, Report},
    settings::{Rule, What},
};

impl GpuMemTrace {
    /// Prints the current values: `△Used Peaked MB: 10 15 (ctx)`.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::{Bytes, GpuMemTrace};
    /// let trace = GpuMemTrace::with_ctx("load");
    /// let weights = gpu.alloc(Bytes::mib(10))?;
    /// trace.report(); // △Used Peaked MB:     10      0 (load)
    /// # drop(weights);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn report(&self) {
        self.report_now(None);
    }

    /// Like [`report`](Self::report), with a text after the context: `(ctx: subctx)`.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::{Bytes, GpuMemTrace};
    /// let trace = GpuMemTrace::with_ctx("epoch");
    /// for batch in 0..2 {
    ///     drop(gpu.alloc(Bytes::mib(10))?);
    ///     trace.report_with(format!("batch {batch}")); // △Used Peaked MB:      0     10 (epoch: batch 0)
    /// }
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn report_with(&self, subctx: impl Display) {
        self.report_now(Some(&subctx));
    }

    /// Like [`report`](Self::report), but then resets the trace to the reported reading, so that no event is missed in
    /// between. [`report_n_reset_with`](Self::report_n_reset_with) adds a text after the context.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::{Bytes, GpuMemTrace};
    /// # let mut trace = GpuMemTrace::with_ctx("load");
    /// let weights = gpu.alloc(Bytes::mib(10))?;
    /// trace.report_n_reset(); // △Used Peaked MB:     10      0 (load)
    /// assert_eq!(trace.data().used, 0);
    /// # drop(weights);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    // The comment between the brackets is in the compiler's error for `report_n_reset("x")`, which shows this line.
    pub fn report_n_reset(&mut self /* for a text after the context: report_n_reset_with */) {
        self.print_report(None, self.read_n_reset(), Vec::new(), false);
    }

    /// Like [`report_with`](Self::report_with), but then resets the trace to the reported reading.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::{Bytes, GpuMemTrace};
    /// # let mut trace = GpuMemTrace::with_ctx("load");
    /// let weights = gpu.alloc(Bytes::mib(10))?;
    /// trace.report_n_reset_with("weights"); // △Used Peaked MB:     10      0 (load: weights)
    /// assert_eq!(trace.data().used, 0);
    /// # drop(weights);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn report_n_reset_with(&mut self, subctx: impl Display) {
        self.print_report(Some(&subctx), self.read_n_reset(), Vec::new(), false);
    }

    /// Stops the trace, and prints its last report: what a drop does to a trace with a report. It can be read afterwards.
    pub(crate) fn exit(&mut self) {
        let Some(guard) = &self.guard else { return };
        let prints_lines = guard.prints_lines();
        self.close(prints_lines);
        self.print_report(Some(&"exit"), self.data(), Vec::new(), true);
    }

    fn end(&mut self) {
        let Some(guard) = &mut self.guard else { return };
        if guard.settings.on_exit_report && !guard.settings.silent {
            self.exit();
        } else if let TraceState::Running(scope) = mem::replace(&mut guard.state, TraceState::Off) {
            scope.close_unread();
        }
    }

    /// Prints a report of the current values. Reads the device only if the report is printed.
    fn report_now(&self, subctx: Option<&dyn Display>) {
        if self.guard.as_ref().is_some_and(|guard| !guard.settings.silent) {
            self.print_report(subctx, self.data(), Vec::new(), false);
        }
    }

    /// Prints a report with these values, or counts them if the trace ends. `lines` are the statements of the function.
    pub(in crate::session) fn print_report(
        &self,
        subctx: Option<&dyn Display>,
        trace: Trace,
        lines: Vec<Line>,
        is_end: bool,
    ) {
        let Some(guard) = &self.guard else { return };
        let ActiveTrace { session, settings, .. } = &**guard;
        // Traces are off in the child of a fork, and the lock of stdout may be held there by a thread that does not exist.
        if settings.silent || trace.gauge == Gauge::Off || process::is_forked() {
            return;
        }
        session.notify_missed(trace.lost, trace.untracked);
        if session.is_inside_sink() {
            return;
        }
        if !guard.prints(&trace, is_end) || session.is_silent() {
            return;
        }
        let subctx = subctx.map(ToString::to_string);
        let mut report = Report::new(trace, settings.shown_ctx().as_deref(), subctx.as_deref()).inside(guard.outer());
        report.lines = lines;
        let mut output = session.output(Content::Trace(report));
        output.at = Some(guard.at.into());
        output.module = settings.request.module.map(Into::into);
        session.write(&output);
    }
}

impl ActiveTrace {
    /// Returns the output of the trace at its end, under this rule of `GPUMEM`.
    fn what(&self, rule: Rule) -> What {
        rule.what.unwrap_or(if self.settings.stats { What::Stats } else { What::Lines })
    }

    /// Returns whether lines of the trace are printed, if they are large enough.
    pub(super) fn prints_lines(&self) -> bool {
        self.callsite().is_none_or(|callsite| self.what(callsite.rule) == What::Lines)
    }

    /// Returns whether a line with these values is printed. If a trace for statistics ends, counts the values instead.
    fn prints(&self, trace: &Trace, is_end: bool) -> bool {
        let Some(callsite @ Numbered { id, rule, .. }) = self.callsite() else { return true };
        let is_chosen = |every: NonZeroU64| self.session.callsites.next_line(id).is_multiple_of(every.get());
        match self.what(rule) {
            What::Lines => {
                let is_large_enough = rule.is_large_enough(trace);
                self.session.notices.add_line((!is_large_enough).then(|| Rule::most(trace)));
                is_large_enough && rule.every.is_none_or(is_chosen)
            }
            What::Stats => {
                if is_end {
                    self.session.count(callsite, trace, || self.settings.shown_ctx().map(Cow::into_owned));
                }
                false
            }
            What::Off => false,
        }
    }
}

impl Drop for GpuMemTrace {
    #[inline]
    fn drop(&mut self) {
        if self.guard.is_some() {
            self.end();
        }
    }
}

/// Writes the line that [`report`](GpuMemTrace::report) prints, with the current values.
impl Display for GpuMemTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ctx = self.guard.as_ref().and_then(|guard| guard.settings.shown_ctx());
        let outer = self.guard.as_ref().map(|guard| guard.outer()).unwrap_or_default();
        Report::new(self.data(), ctx.as_deref(), None).inside(outer).fmt(f)
    }
}

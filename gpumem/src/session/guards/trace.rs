//! The guard.

use std::{
    borrow::Cow,
    fmt::{self, Display},
    mem,
    panic::Location,
};

use crate::session::{
    ScopeHandle, Session, current,
    recording::{OpenScope, ScopeRequest},
};
use crate::{
    derive::{KeptPeak, live_blocks},
    error::Result,
    ledger::ScopePeriod,
    model::{Gauge, ScopeId, Source, Trace, short_name},
    report::{Content, Line, LiveBlock, PeakHolders, Report},
    source::{traces_are_off, turn_traces_off},
    sys::process,
};

/// Traces the GPU memory of a piece of code: how much more is in use after it, and how much was needed on top of that
/// at the worst moment.
///
/// It measures from its creation on and reports when it is dropped, also while unwinding:
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// use gpumem::GpuMemTrace;
///
/// let weights;
/// {
///     let _trace = GpuMemTrace::with_ctx("epoch");
///     weights = gpu.alloc(gpumem::Bytes::mib(20))?;
/// } // △Used Peaked MB:     20      0 (epoch: exit)
/// # drop(weights);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// Give it a name: `let _ = GpuMemTrace::new()` drops it at once. Values of a block are dropped before a guard that was
/// created first in it, so what they held shows as `peaked`, not as `used`; [`GpuMemTrace::scope`] hands them out.
///
/// The device is fixed when the trace starts: the builder's, else the calling thread's current CUDA device, else 0.
/// By default a trace counts all threads of the process, so traces that run at the same time overlap; of different threads, their
/// lines say so ([`Trace::overlapped`]). It is `Send`: it
/// may live across `.await` and move between threads. Its scope is its thread's until then, for whatever runs there; of tasks
/// that run by turns, [`wrap`](GpuMemTraceBuilder::wrap) each.
///
/// Without a GPU, or with one that cannot be read, a trace is off: one line on stderr says why, nothing is reported, and
/// [`data`](Self::data) is zeros under [`Gauge::Off`].
#[must_use = "a trace measures until it is dropped; bind it to a name"]
pub struct GpuMemTrace {
    /// `None`: traces are off for as long as the process runs. Boxed, so that such a guard is two words.
    guard: Option<Box<Guard>>,
    /// The device in [`data`](Self::data) of a trace that is off.
    device: u32,
}

struct Guard {
    session: &'static Session,
    state: State,
    /// Where it was started.
    at: &'static Location<'static>,
    settings: GpuMemTraceBuilder,
}

enum State {
    Off,
    Running(OpenScope),
    Stopped(ScopeId, Trace, Option<ScopePeriod>, Option<KeptPeak<'static>>),
}

impl GpuMemTrace {
    /// Starts a trace of the current device.
    #[inline]
    #[track_caller]
    pub fn new() -> Self {
        Self::builder().start_or_off()
    }

    /// Starts a trace whose reports carry this context. An empty one counts as none.
    #[inline]
    #[track_caller]
    pub fn with_ctx(ctx: impl Into<String>) -> Self {
        Self::builder().ctx_unless_off(|| ctx).start_or_off()
    }

    /// A trace with settings.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// use gpumem::{Gauge, GpuMemTrace};
    ///
    /// let trace = GpuMemTrace::builder()
    ///     .ctx("foobar")
    ///     .device(1)
    ///     .gauge(Gauge::Sampled)
    ///     .silent(true)
    ///     .on_exit_report(false)
    ///     .start()?;
    /// assert_eq!((trace.data().device, trace.data().gauge), (1, Gauge::Sampled));
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    #[inline]
    pub fn builder() -> GpuMemTraceBuilder {
        GpuMemTraceBuilder {
            ctx: None,
            function: None,
            request: ScopeRequest::default(),
            at: None,
            module: None,
            silent: false,
            on_exit_report: true,
        }
    }

    /// Runs `code` under a trace, reports when it is through, and gives its result out: what it holds is reported as
    /// used, as with Python's `with`.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// use gpumem::{Bytes, GpuMemTrace};
    ///
    /// let y = GpuMemTrace::scope("forward", |_trace| gpu.alloc(Bytes::mib(10)))?;
    /// // △Used Peaked MB:     10      0 (forward: exit)
    /// # drop(y);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    #[inline]
    #[track_caller]
    pub fn scope<R>(ctx: impl Into<String>, code: impl FnOnce(&mut Self) -> R) -> R {
        let mut trace = Self::with_ctx(ctx);
        code(&mut trace)
    }

    /// Measures from now on. A trace that runs is [`reset`](Self::reset), one that was stopped or off is started anew. One that was
    /// off because there was no GPU stays off.
    #[track_caller]
    pub fn start(&mut self) {
        let Some(guard) = &mut self.guard else { return };
        match &guard.state {
            State::Running(scope) => _ = scope.reset(),
            State::Stopped(..) | State::Off => {
                guard.at = guard.settings.at.unwrap_or(Location::caller());
                guard.state = guard.settings.open_or_off(guard.session, guard.at);
            }
        }
    }

    /// Ends the measurement and freezes the figures: [`data`](Self::data) and reports tell them from now on. Stopping
    /// again changes nothing.
    pub fn stop(&mut self) {
        let Some(guard) = &mut self.guard else { return };
        guard.state = match mem::replace(&mut guard.state, State::Off) {
            State::Running(scope) => {
                let id = scope.id;
                let (trace, within, peak) = scope.close();
                State::Stopped(id, trace, within, peak)
            }
            ended => ended,
        };
    }

    /// Begins anew from this moment, if it runs.
    pub fn reset(&mut self) {
        if let Some((_, scope)) = self.running() {
            scope.reset();
        }
    }

    /// The figures of this moment, or the frozen ones. Never an error: see [`Trace::gauge`] and [`Trace::stale`].
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # let trace = gpumem::GpuMemTrace::new();
    /// let data = trace.data();
    /// println!("{} bytes more, {} MB at the worst moment", data.used.get(), data.peaked.mb());
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn data(&self) -> Trace {
        match self.guard.as_ref().map(|guard| &guard.state) {
            None | Some(State::Off) => Trace::off(self.device),
            Some(State::Running(scope)) => scope.read(),
            Some(State::Stopped(_, trace, ..)) => *trace,
        }
    }

    /// Prints the figures: `△Used Peaked MB:     10     15 (ctx)`.
    pub fn report(&self) {
        self.report_now(None);
    }

    /// As [`report`](Self::report), with a word on which one it is: ` (ctx: subctx)`.
    pub fn report_with(&self, subctx: impl Display) {
        self.report_now(Some(&subctx));
    }

    /// As [`report`](Self::report), and begins anew from the very reading that was reported.
    pub fn report_n_reset(&mut self) {
        self.tell(None, self.read_n_reset(), None);
    }

    /// As [`report_with`](Self::report_with), and begins anew from the very reading that was reported.
    pub fn report_n_reset_with(&mut self, subctx: impl Display) {
        self.tell(Some(&subctx), self.read_n_reset(), None);
    }

    /// Whether this trace prints no reports.
    pub fn set_silent(&mut self, silent: bool) {
        if let Some(guard) = &mut self.guard {
            guard.settings.silent = silent;
        }
    }

    /// What was allocated inside and is still there, the largest first: until now, or until it was stopped. That is what its
    /// own thread allocated while it was open, and what was allocated where its scope was [handed](Self::handle) to, in
    /// scopes inside it as well; other threads' blocks are not in it. Of every kind of memory and every device, and from the start
    /// on, whatever was [reset](Self::reset) since. Empty if allocations are not
    /// intercepted ([`Trace::gauge`] is not exact).
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// use gpumem::{Bytes, GpuMemTrace};
    ///
    /// let trace = GpuMemTrace::with_ctx("step");
    /// let leaked = gpu.alloc(Bytes::mib(1))?;
    /// for block in trace.live() {
    ///     println!("{} at {}", block.bytes, block.place().unwrap_or("?")); // 1 MiB at src/main.rs:5:14
    /// }
    /// assert_eq!(trace.live().len(), 1);
    /// # drop(leaked);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn live(&self) -> Vec<LiveBlock> {
        let Some(guard) = &self.guard else { return Vec::new() };
        let session = guard.session;
        let within = match &guard.state {
            State::Off => None,
            State::Running(scope) => session.inbox.scope_period(scope.id),
            State::Stopped(_, _, within, _) => within.clone(),
        };
        #[cfg(feature = "capture")]
        if let Some(scope) = self.scope_id() {
            record_request!(session, LiveBlocks { scope: Some(scope) });
        }
        within.map(|within| live_blocks(&session.inbox, session, Some(&within))).unwrap_or_default()
    }

    /// Which allocations made the trace's peak: by scope and line, what was in use at the peak and was not at the start, since
    /// the start or the last [reset](Self::reset). They add up to [`Trace::peak_over_start`] of the same moment; what was in
    /// use at the start and was given back before the peak counts as less than nothing. If the peak was reached several times,
    /// it is one of them. `None` unless the trace was started with [`at_peak`](GpuMemTraceBuilder::at_peak) and its figures
    /// are exact.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// use gpumem::{Bytes, GpuMemTrace};
    ///
    /// let trace = GpuMemTrace::builder().ctx("step").at_peak(true).start()?;
    /// let kept = gpu.alloc(Bytes::mib(10))?;
    /// drop(gpu.alloc(Bytes::mib(500))?);
    /// let peak = trace.peak_holders().unwrap();
    /// assert_eq!(peak.bytes, Bytes::mib(510));
    /// assert_eq!(peak.holders[0].path, ["step"]);
    /// println!("{peak}");
    /// # drop(kept);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn peak_holders(&self) -> Option<PeakHolders> {
        let guard = self.guard.as_ref()?;
        let session = guard.session;
        let peak = match &guard.state {
            State::Off => None,
            State::Running(scope) => {
                KeptPeak::of_open(&session.inbox, scope.id, session.next_scope())?.holders(session)
            }
            State::Stopped(_, _, _, peak) => peak.as_ref()?.holders(session),
        };
        let mut peak = peak?;
        let Trace { untracked, lost, .. } = self.data();
        (peak.untracked, peak.lost) = (untracked, lost);
        #[cfg(feature = "capture")]
        if let Some(scope) = self.scope_id() {
            record_request!(session, PeakHolders { scope });
        }
        Some(peak)
    }

    /// What carries the trace's scope to another thread or task, so that what is allocated there counts as allocated in it.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// use gpumem::{Bytes, GpuMemTrace};
    ///
    /// let trace = GpuMemTrace::builder().ctx("load").thread_local_only().start()?;
    /// let handle = trace.handle();
    /// let block = std::thread::scope(|threads| {
    ///     threads.spawn(|| handle.in_scope(|| gpu.alloc(Bytes::mib(10)))).join().unwrap()
    /// })?;
    /// assert_eq!(trace.data().used.mb(), 10);
    /// # drop(block);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn handle(&self) -> ScopeHandle {
        ScopeHandle::of(self.running().map(|(guard, scope)| (guard.session, scope.id)))
    }

    fn running(&self) -> Option<(&Guard, &OpenScope)> {
        let guard = self.guard.as_ref()?;
        if let State::Running(scope) = &guard.state { Some((guard, scope)) } else { None }
    }

    /// Of the scope that it opened last.
    #[cfg(feature = "capture")]
    fn scope_id(&self) -> Option<ScopeId> {
        match &self.guard.as_ref()?.state {
            State::Off => None,
            State::Running(scope) => Some(scope.id),
            State::Stopped(scope, ..) => Some(*scope),
        }
    }

    /// A statement is over, by the newest reading.
    #[cfg(feature = "capture")]
    pub(in crate::session) fn record_line(&self, number: u32, source: &str) {
        if let (Some(guard), Some(scope)) = (&self.guard, self.scope_id()) {
            record_request!(guard.session, Line { scope, number, source: source.to_owned() });
        }
    }

    fn read_n_reset(&self) -> Trace {
        self.running().map_or_else(|| self.data(), |(_, scope)| scope.reset())
    }

    /// As [`read_n_reset`](Self::read_n_reset), but [`peak_holders`](Self::peak_holders) are still those since the start.
    pub(in crate::session) fn read_next(&self) -> Trace {
        self.running().map_or_else(|| self.data(), |(_, scope)| scope.next())
    }

    fn end(&mut self) {
        self.stop();
        if self.guard.as_ref().is_some_and(|guard| guard.settings.on_exit_report) {
            self.report_with("exit");
        }
    }

    /// A report that nobody sees does not read the device.
    fn report_now(&self, subctx: Option<&dyn Display>) {
        if self.guard.as_ref().is_some_and(|guard| !guard.settings.silent) {
            self.tell(subctx, self.data(), None);
        }
    }

    /// Prints the line of a trace; `lines` are the statements of its function, and the function's last line.
    pub(in crate::session) fn tell(&self, subctx: Option<&dyn Display>, trace: Trace, lines: Option<(Vec<Line>, u32)>) {
        let Some(guard) = &self.guard else { return };
        let Guard { session, settings, .. } = &**guard;
        // In the child of a fork traces are off, and a thread that it does not have may hold the lock of stdout.
        if settings.silent || trace.gauge == Gauge::Off || process::is_forked() {
            return;
        }
        session.notify_missed(trace.lost, trace.untracked);
        let subctx = subctx.map(ToString::to_string);
        let mut report = Report::new(trace, settings.shown_ctx().as_deref(), subctx.as_deref());
        let (lines, end) = lines.unzip();
        report.lines = lines.unwrap_or_default();
        #[cfg(feature = "capture")]
        if let Some(scope) = self.scope_id() {
            let (ctx, subctx) = (report.ctx.clone(), report.subctx.clone());
            record_request!(session, Report { scope, ctx, subctx, lines: end });
        }
        #[cfg(not(feature = "capture"))]
        let _ = end;
        if session.is_silent() {
            return;
        }
        let mut output = session.output(Content::Trace(report));
        output.at = Some(guard.at.into());
        output.module = settings.module.map(Into::into);
        session.write(&output);
    }
}

impl Default for GpuMemTrace {
    #[track_caller]
    fn default() -> Self {
        Self::new()
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

/// The line that [`report`](GpuMemTrace::report) prints, of this moment.
impl Display for GpuMemTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ctx = self.guard.as_ref().and_then(|guard| guard.settings.shown_ctx());
        Report::new(self.data(), ctx.as_deref(), None).fmt(f)
    }
}

/// State and settings. Does not read the device.
impl fmt::Debug for GpuMemTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("GpuMemTrace");
        let Some(guard) = &self.guard else { return shown.field("state", &"off").finish_non_exhaustive() };
        match &guard.state {
            State::Off => shown.field("state", &"off"),
            State::Running(scope) => {
                shown.field("state", &"running").field("device", &scope.device.ordinal).field("gauge", &scope.gauge)
            }
            State::Stopped(_, trace, ..) => shown.field("state", &"stopped").field("trace", trace),
        };
        shown.field("ctx", &guard.settings.ctx).field("silent", &guard.settings.silent).finish_non_exhaustive()
    }
}

/// Settings of a [`GpuMemTrace`] that is yet to start.
#[derive(Clone, Debug)]
#[must_use = "nothing is measured before `start`"]
pub struct GpuMemTraceBuilder {
    ctx: Option<String>,
    /// The compiler's name of the function, instead of a context.
    function: Option<&'static str>,
    request: ScopeRequest,
    /// Where the trace is in the sources, if not where it is started.
    pub(in crate::session) at: Option<&'static Location<'static>>,
    /// The module of the function that it is in, if that is known.
    module: Option<&'static str>,
    silent: bool,
    pub(in crate::session) on_exit_report: bool,
}

impl GpuMemTraceBuilder {
    /// The context of all reports. An empty one counts as none.
    pub fn ctx(mut self, ctx: impl Into<String>) -> Self {
        (self.ctx, self.function) = (Some(ctx.into()), None);
        self
    }

    /// The function, by the compiler's name of the closure in it, is the scope, and its short name the context.
    #[inline]
    pub(crate) fn function(mut self, closure: &'static str, module: &'static str) -> Self {
        (self.function, self.module) = (Some(closure), Some(module));
        self
    }

    /// The context as reports have it.
    fn shown_ctx(&self) -> Option<Cow<'_, str>> {
        let given = self.ctx.as_deref().map(Cow::Borrowed);
        given.or_else(|| self.function.map(|function| short_name(function).into()))
    }

    /// The CUDA ordinal of the device, instead of the calling thread's current one.
    pub fn device(mut self, ordinal: u32) -> Self {
        self.request.device = Some(ordinal);
        self
    }

    /// How to measure, instead of the best way that the device offers (or `GPUMEM_GAUGE`).
    pub fn gauge(mut self, gauge: Gauge) -> Self {
        self.request.gauge = Some(gauge);
        self
    }

    /// Through which source allocations are intercepted, instead of the best one that there is (or `GPUMEM_SOURCE`):
    /// [`Source::Dispatch`] or [`Source::Cupti`]. The whole process uses one source at a time; if another is in use already,
    /// [`start`](Self::start) gives an error.
    pub fn source(mut self, source: Source) -> Self {
        self.request.source = Some(source);
        self
    }

    /// Counts only what the calling thread allocates, wherever it is freed, instead of the whole process; and what other threads
    /// allocate in the scope, if it is [handed](GpuMemTrace::handle) to them. In a scope of another thread it is the same: the
    /// other thread's own allocations do not count.
    ///
    /// Needs exact figures: `GPUMEM_GAUGE=sampled` and `pool` do not apply to it.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// use gpumem::{Bytes, GpuMemTrace};
    ///
    /// let trace = GpuMemTrace::builder().thread_local_only().start()?;
    /// let other = std::thread::scope(|threads| threads.spawn(|| gpu.alloc(Bytes::mib(100))).join().unwrap())?;
    /// let own = gpu.alloc(Bytes::mib(1))?;
    /// assert_eq!(trace.data().used.mb(), 1);
    /// # drop((own, other));
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn thread_local_only(mut self) -> Self {
        self.request.of_thread = true;
        self
    }

    /// Whether [`peak_holders`](GpuMemTrace::peak_holders) is to tell which allocations made the peak; not unless asked for. Each
    /// allocation then costs a little more. Without effect on a trace whose figures are not exact.
    pub fn at_peak(mut self, at_peak: bool) -> Self {
        self.request.at_peak = at_peak;
        self
    }

    /// Whether reports are kept from being printed; they are not unless asked for.
    pub fn silent(mut self, silent: bool) -> Self {
        self.silent = silent;
        self
    }

    /// Whether dropping the trace reports; it does unless told not to.
    pub fn on_exit_report(mut self, report: bool) -> Self {
        self.on_exit_report = report;
        self
    }

    /// Starts the trace.
    ///
    /// # Errors
    /// When there is no such device, it cannot be read, or the gauge is not available on it.
    #[track_caller]
    pub fn start(self) -> Result<GpuMemTrace> {
        let (session, at) = (current(), self.at.unwrap_or(Location::caller()));
        let state = self.open(session, at)?;
        Ok(self.guard(session, state, at))
    }

    /// Starts the trace, or one that is off, where [`start`](Self::start) would give an error; the error is then said
    /// once on stderr.
    #[inline]
    #[track_caller]
    pub fn start_or_off(self) -> GpuMemTrace {
        if self.is_off() {
            return GpuMemTrace { guard: None, device: self.request.device.unwrap_or(0) };
        }
        self.started_or_off(Location::caller())
    }

    fn started_or_off(self, caller: &'static Location<'static>) -> GpuMemTrace {
        let (session, at) = (current(), self.at.unwrap_or(caller));
        let state = self.open_or_off(session, at);
        self.guard(session, state, at)
    }

    fn guard(self, session: &'static Session, state: State, at: &'static Location<'static>) -> GpuMemTrace {
        let device = self.request.device.unwrap_or(0);
        GpuMemTrace { guard: Some(Box::new(Guard { session, state, at, settings: self })), device }
    }

    /// The context of all reports, if there will be any. The attribute calls this after all other settings.
    #[doc(hidden)]
    #[inline]
    pub fn ctx_unless_off<C: Into<String>>(self, ctx: impl FnOnce() -> C) -> Self {
        if self.is_off() { self } else { self.ctx(ctx()) }
    }

    /// This trace would be off, for as long as the process runs.
    #[inline]
    fn is_off(&self) -> bool {
        self.request.gauge.is_none() && traces_are_off()
    }

    fn open(&self, session: &'static Session, at: &'static Location<'static>) -> Result<State> {
        let scope = OpenScope::open(session, self.request, self.function.or(self.ctx.as_deref()), at)?;
        if scope.is_none() && self.request.gauge.is_none() {
            turn_traces_off();
        }
        Ok(scope.map_or(State::Off, State::Running))
    }

    fn open_or_off(&self, session: &'static Session, at: &'static Location<'static>) -> State {
        self.open(session, at).unwrap_or_else(|error| {
            session.notify_off(&error);
            if error.is_unavailable() && session.is_without_devices() {
                turn_traces_off();
            }
            State::Off
        })
    }
}

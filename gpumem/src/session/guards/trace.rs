//! The guard of a trace.

use std::{fmt, mem};

use super::builder::GpuMemTraceBuilder;
use crate::session::{
    ScopeHandle, Session, current,
    events::{CodeLine, Numbered, OpenScope},
};
use crate::{
    derive::{KeptPeak, live_blocks, outer_names},
    error::Result,
    ledger::ScopePeriod,
    model::Trace,
    report::{DriverMemory, LiveBlock, PeakHolders},
};

/// Traces the GPU memory of a piece of code: how much more is in use after it, and how much more than that was in use at the peak.
///
/// The trace measures from its creation. Dropping it prints a report, even while unwinding:
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
/// Bind it to a name: `let _ = GpuMemTrace::new()` drops it immediately. The values of a block are dropped before a guard that
/// was created first in the block, so their memory counts as `peaked` and not as `used`. [`GpuMemTrace::scope`] returns the value
/// instead.
///
/// The device is fixed when the trace starts: the builder's device, else the calling thread's current CUDA device, else device 0.
/// A trace is `Send`: you may hold it across `.await` and move it between threads. Until it is dropped, it is the scope of the thread
/// that created it. For tasks, use [`wrap`](GpuMemTraceBuilder::wrap).
///
/// # What a trace counts
///
/// A trace counts its own thread, threads that are in its thread's scopes, and threads that are in no scope. Memory belongs to the traces
/// that were open when it was allocated. They and the traces inside them count its free, on any thread. Any other free counts like an
/// allocation of the freeing thread. Therefore a trace of another thread changes nothing, as long as the two threads exchange no memory. If
/// a thread in no scope allocates while several threads have traces, all of these traces count the allocation, and their lines name the
/// amount ([`Trace::shared`]). [`thread_local_only`](GpuMemTraceBuilder::thread_local_only) leaves out threads in no scope and the memory
/// they allocate while the trace is open, and [`all_threads`](GpuMemTraceBuilder::all_threads) counts every thread.
///
/// Without a GPU, or if it cannot be read, a trace is off: a notice on stderr gives the reason, nothing is reported, and
/// [`data`](Self::data) returns zeros with [`Gauge::Off`](crate::Gauge::Off).
#[must_use = "a trace measures until it is dropped; bind it to a name"]
pub struct GpuMemTrace {
    /// The state. `None` if traces are off for the whole process. Boxed, so that such a guard takes only two words.
    pub(super) guard: Option<Box<ActiveTrace>>,
    /// The device in [`data`](Self::data) of a trace that is off.
    device: u32,
}

pub(super) struct ActiveTrace {
    pub(super) session: &'static Session,
    pub(super) state: TraceState,
    /// The place where the trace was started.
    pub(super) at: CodeLine,
    pub(super) settings: GpuMemTraceBuilder,
}

pub(super) enum TraceState {
    Off,
    Running(OpenScope),
    /// The closed scope's callsite and its last trace.
    Stopped(Numbered, Trace, Option<ScopePeriod>, Option<KeptPeak<'static>>),
}

impl GpuMemTrace {
    /// Starts a trace of the current device.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::{Bytes, GpuMemTrace};
    /// let trace = GpuMemTrace::new();
    /// let weights = gpu.alloc(Bytes::mib(10))?;
    /// assert_eq!(trace.data().used.mb(), 10);
    /// drop(trace); // △Used Peaked MB:     10      0 (exit)
    /// # drop(weights);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    #[inline]
    #[track_caller]
    pub fn new() -> Self {
        Self::builder().start_or_off()
    }

    /// Starts a trace with this context, which its reports print. An empty context counts as none.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::GpuMemTrace;
    /// let trace = GpuMemTrace::with_ctx("epoch");
    /// drop(trace); // △Used Peaked MB:      0      0 (epoch: exit)
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    #[inline]
    #[track_caller]
    pub fn with_ctx(ctx: impl Into<String>) -> Self {
        Self::builder().ctx_unless_off(|| ctx).start_or_off()
    }

    /// Returns the settings of a new trace.
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
        GpuMemTraceBuilder::new()
    }

    /// Runs `code` under a trace, reports, and returns its result. The memory of the result thus counts as used, as with Python's
    /// `with`.
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

    /// Starts the measurement. This resets a running trace and restarts a stopped one. A trace that is off starts too, unless traces are
    /// off for the whole process, for example without a GPU.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::{Bytes, GpuMemTrace};
    /// # let mut trace = GpuMemTrace::new();
    /// trace.stop();
    /// let weights = gpu.alloc(Bytes::mib(10))?; // not measured
    /// trace.start();
    /// drop(gpu.alloc(Bytes::mib(5))?);
    /// assert_eq!((trace.data().used.mb(), trace.data().peaked.mb()), (0, 5));
    /// # drop(weights);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    #[track_caller]
    pub fn start(&mut self) {
        let Some(guard) = &mut self.guard else { return };
        match &guard.state {
            TraceState::Running(scope) => _ = scope.reset(),
            TraceState::Stopped(..) | TraceState::Off => {
                guard.at = guard.settings.at.unwrap_or(CodeLine::of_caller());
                guard.state = TraceState::of(guard.settings.open_or_off(guard.session, guard.at));
            }
        }
    }

    /// Ends the measurement. [`data`](Self::data) and reports show its last values afterwards. Does nothing if the trace is
    /// stopped.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::{Bytes, GpuMemTrace};
    /// # let mut trace = GpuMemTrace::new();
    /// let weights = gpu.alloc(Bytes::mib(10))?;
    /// trace.stop();
    /// drop(weights);
    /// assert_eq!(trace.data().used.mb(), 10); // as it was when the trace stopped
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn stop(&mut self) {
        self.close(true);
    }

    /// Stops the trace. With `keep_period`, its blocks and the names of its outer scopes stay known.
    pub(super) fn close(&mut self, keep_period: bool) {
        let Some(guard) = &mut self.guard else { return };
        guard.state = match mem::replace(&mut guard.state, TraceState::Off) {
            TraceState::Running(scope) => {
                let within = if keep_period { scope.period() } else { None };
                let callsite = scope.callsite;
                let (trace, peak) = scope.close();
                TraceState::Stopped(callsite, trace, within, peak)
            }
            ended => ended,
        };
    }

    /// Restarts the measurement, if the trace is running.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::{Bytes, GpuMemTrace};
    /// # let mut trace = GpuMemTrace::new();
    /// let weights = gpu.alloc(Bytes::mib(10))?;
    /// trace.reset();
    /// assert_eq!(trace.data().used.mb(), 0);
    /// # drop(weights);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn reset(&mut self) {
        if let Some((_, scope)) = self.running() {
            scope.reset();
        }
    }

    /// Returns the current values, or the last ones of a stopped trace. This never fails: see [`Trace::gauge`] and
    /// [`Trace::stale`].
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
            None | Some(TraceState::Off) => Trace::off(self.device),
            Some(TraceState::Running(scope)) => scope.read(),
            Some(TraceState::Stopped(_, trace, ..)) => *trace,
        }
    }

    /// Turns the reports of this trace off (`true`) or on again (`false`). It measures in either case.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # let mut trace = gpumem::GpuMemTrace::new();
    /// trace.set_silent(true);
    /// trace.report(); // prints nothing
    /// assert!(trace.data().is_measured()); // but it measures
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn set_silent(&mut self, silent: bool) {
        if let Some(guard) = &mut self.guard {
            guard.settings.silent = silent;
        }
    }

    /// Returns the blocks that were allocated inside the trace and are still live, the largest first. A stopped trace lists those allocated
    /// before it was stopped. Blocks count if the trace's own thread allocated them while the trace was open, or if another thread
    /// allocated them in its scope through the [handle](Self::handle). With [`all_threads`](GpuMemTraceBuilder::all_threads), the blocks of
    /// all threads count. The list covers all kinds of memory on all devices since the trace was created, even after a
    /// [`reset`](Self::reset). Empty if allocations are not intercepted ([`Trace::gauge`] is not exact).
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
        let Some(mut within) = guard.period() else { return Vec::new() };
        if guard.settings.request.all_threads {
            within = within.of_all_threads();
        }
        live_blocks(&guard.session.inbox, guard.session, Some(&within))
    }

    /// Returns the memory that the driver took for itself inside the trace and has not returned, the largest first: modules that were
    /// loaded at the first launch of a function, local memory, executable graphs. The numbers of the trace do not count it. This is the
    /// reason if the first step of a program needs more memory than `used` says. Empty if allocations are not intercepted in the driver's
    /// dispatch table, or NVML cannot be used.
    ///
    /// ```no_run
    /// # fn step() {}
    /// let trace = gpumem::GpuMemTrace::with_ctx("first step");
    /// step();
    /// for row in trace.driver_memory() {
    ///     println!("{} {row}", row.bytes); // 140 MiB modules of libcublasLt.so.13
    /// }
    /// ```
    pub fn driver_memory(&self) -> Vec<DriverMemory> {
        let Some(guard) = &self.guard else { return Vec::new() };
        guard.period().map(|within| guard.session.driver_memory(None, Some(&within))).unwrap_or_default()
    }

    /// Returns the allocations that made the trace's peak, by scope and line: the memory that was in use at the peak and not at
    /// the start, or at the last [reset](Self::reset). The rows add up to [`Trace::peak_over_start`] of the same moment. Memory
    /// that was in use at the start and was freed before the peak counts as negative. If the peak was reached several times, this
    /// is one of these moments. `None` unless the trace was started with [`at_peak`](GpuMemTraceBuilder::at_peak) and its results
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
            TraceState::Off => None,
            TraceState::Running(scope) => {
                KeptPeak::of_open(&session.inbox, scope.id, session.next_scope())?.holders(session)
            }
            TraceState::Stopped(_, _, _, peak) => peak.as_ref()?.holders(session),
        };
        let mut peak = peak?;
        let Trace { untracked, lost, .. } = self.data();
        (peak.untracked, peak.lost) = (untracked, lost);
        Some(peak)
    }

    /// Returns a handle to enter the trace's scope on other threads and in tasks. Their allocations then count for the scope.
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

    fn running(&self) -> Option<(&ActiveTrace, &OpenScope)> {
        let guard = self.guard.as_ref()?;
        if let TraceState::Running(scope) = &guard.state { Some((guard, scope)) } else { None }
    }

    pub(super) fn read_n_reset(&self) -> Trace {
        self.running().map_or_else(|| self.data(), |(_, scope)| scope.reset())
    }

    /// Like [`read_n_reset`](Self::read_n_reset), but [`peak_holders`](Self::peak_holders) still counts from the start.
    pub(crate) fn read_next(&self) -> Trace {
        self.running().map_or_else(|| self.data(), |(_, scope)| scope.next())
    }
}

impl ActiveTrace {
    /// Returns the period during which the scope was open.
    fn period(&self) -> Option<ScopePeriod> {
        match &self.state {
            TraceState::Off => None,
            TraceState::Running(scope) => self.session.inbox.scope_period(scope.id),
            TraceState::Stopped(_, _, within, _) => within.clone(),
        }
    }

    /// Returns the callsite of the scope that was opened last.
    pub(super) fn callsite(&self) -> Option<Numbered> {
        match &self.state {
            TraceState::Off => None,
            TraceState::Running(scope) => Some(scope.callsite),
            TraceState::Stopped(callsite, ..) => Some(*callsite),
        }
    }

    /// Returns the names of the trace's outer scopes.
    pub(super) fn outer(&self) -> Vec<String> {
        let names = |within| outer_names(&self.session.inbox, self.session, &within);
        self.period().map(names).unwrap_or_default()
    }
}

impl TraceState {
    fn of(scope: Option<OpenScope>) -> Self {
        scope.map_or(Self::Off, Self::Running)
    }
}

impl Default for GpuMemTrace {
    #[track_caller]
    fn default() -> Self {
        Self::new()
    }
}

/// Shows the state and the settings. Does not read the device.
impl fmt::Debug for GpuMemTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("GpuMemTrace");
        let Some(guard) = &self.guard else { return shown.field("state", &"off").finish_non_exhaustive() };
        match &guard.state {
            TraceState::Off => shown.field("state", &"off"),
            TraceState::Running(scope) => {
                shown.field("state", &"running").field("device", &scope.device.ordinal).field("gauge", &scope.gauge)
            }
            TraceState::Stopped(_, trace, ..) => shown.field("state", &"stopped").field("trace", trace),
        };
        shown.field("ctx", &guard.settings.ctx).field("silent", &guard.settings.silent).finish_non_exhaustive()
    }
}

impl GpuMemTraceBuilder {
    /// Starts the trace.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::GpuMemTrace;
    /// let error = GpuMemTrace::builder().device(99).start().unwrap_err();
    /// assert!(error.is_unknown_device());
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if there is no such device, it cannot be read, or the gauge is not available on it.
    #[track_caller]
    pub fn start(self) -> Result<GpuMemTrace> {
        let (session, at) = (current(), self.at.unwrap_or(CodeLine::of_caller()));
        let state = TraceState::of(self.open(session, at)?);
        Ok(self.guard(session, state, at))
    }

    /// Starts the trace. If [`start`](Self::start) would return an error, the trace is off, and the error is printed once on stderr.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::{Gauge, GpuMemTrace};
    /// let trace = GpuMemTrace::builder().device(99).start_or_off(); // stderr says why it is off
    /// assert_eq!(trace.data().gauge, Gauge::Off);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    #[inline]
    #[track_caller]
    pub fn start_or_off(self) -> GpuMemTrace {
        if self.is_off() {
            return GpuMemTrace { guard: None, device: self.request.device.unwrap_or(0) };
        }
        self.started_or_off(CodeLine::of_caller())
    }

    fn started_or_off(self, caller: CodeLine) -> GpuMemTrace {
        let (session, at) = (current(), self.at.unwrap_or(caller));
        let state = TraceState::of(self.open_or_off(session, at));
        self.guard(session, state, at)
    }

    fn guard(self, session: &'static Session, state: TraceState, at: CodeLine) -> GpuMemTrace {
        let device = self.request.device.unwrap_or(0);
        GpuMemTrace { guard: Some(Box::new(ActiveTrace { session, state, at, settings: self })), device }
    }
}

//! The settings of a trace.

use std::borrow::Cow;

use crate::session::{
    ScopeHandle, Session,
    events::{CodeLine, OpenScope, ScopeRequest},
};
use crate::{
    error::Result,
    model::{Device, Gauge, Source, Threads, short_name},
    source::{traces_are_off, turn_traces_off},
};

/// Settings of a trace, from [`GpuMemTrace::builder`](crate::GpuMemTrace::builder).
#[derive(Clone, Debug)]
#[must_use = "nothing is measured before `start`"]
#[expect(clippy::struct_excessive_bools, reason = "each is a setting of its own")]
pub struct GpuMemTraceBuilder {
    pub(super) ctx: Option<Cow<'static, str>>,
    /// The compiler's name of the function, used instead of the context.
    pub(super) function: Option<&'static str>,
    pub(super) request: ScopeRequest,
    /// The source location of the trace. `None` for the place where it is started.
    pub(super) at: Option<CodeLine>,
    pub(super) silent: bool,
    pub(super) on_exit_report: bool,
    /// True if the thread that starts the trace enters its scope.
    pub(super) entered: bool,
    pub(super) stats: bool,
}

impl GpuMemTraceBuilder {
    /// Returns the default settings.
    #[inline]
    pub(super) fn new() -> Self {
        Self {
            ctx: None,
            function: None,
            request: ScopeRequest::default(),
            at: None,
            silent: false,
            on_exit_report: true,
            entered: true,
            stats: false,
        }
    }

    /// Sets the context of all reports. An empty one counts as none.
    pub fn ctx(mut self, ctx: impl Into<String>) -> Self {
        (self.ctx, self.function) = (Some(Cow::Owned(ctx.into())), None);
        self
    }

    /// Sets the function as the scope, by the compiler's name of a closure in it. The context of reports is its short name.
    #[inline]
    pub(crate) fn function(mut self, closure: &'static str, module: &'static str) -> Self {
        (self.function, self.request.module) = (Some(closure), Some(module));
        self
    }

    /// Sets the line of a program in another language.
    pub(crate) fn at(mut self, file: &'static str, line: u32) -> Self {
        self.at = Some(CodeLine { file, line, column: 1 });
        self
    }

    /// Returns the context to show in reports.
    pub(super) fn shown_ctx(&self) -> Option<Cow<'_, str>> {
        let given = self.ctx.as_deref().map(Cow::Borrowed);
        given.or_else(|| self.function.map(|function| short_name(function).into()))
    }

    /// Sets the CUDA ordinal of the device. The default is the calling thread's current device.
    pub fn device(mut self, ordinal: u32) -> Self {
        self.request.device = Some(ordinal);
        self
    }

    /// Sets the kind of measurement. The default is the gauge in `GPUMEM_GAUGE`, or else the best gauge that the device offers.
    pub fn gauge(mut self, gauge: Gauge) -> Self {
        self.request.gauge = Some(gauge);
        self
    }

    /// Sets the source that intercepts allocations: [`Source::Dispatch`] or [`Source::Cupti`]. The default is `GPUMEM_SOURCE`, or else
    /// the best one that is available. A process uses one source at a time: if another one is in use, [`start`](Self::start) returns an
    /// error.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// use gpumem::{GpuMemTrace, intercept::Source};
    ///
    /// match GpuMemTrace::builder().source(Source::Cupti).start() {
    ///     Ok(trace) => println!("measured by {}", trace.data().source),
    ///     Err(error) => println!("not through CUPTI: {error}"),
    /// }
    /// # assert!(GpuMemTrace::builder().source(Source::Cupti).start()?.data().is_measured()); // simulated devices ignore it
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn source(mut self, source: Source) -> Self {
        self.request.source = Some(source);
        self
    }

    /// Leaves out threads that are in no scope: the trace counts the calling thread, and threads that enter its scopes through a
    /// [handle](crate::GpuMemTrace::handle). Otherwise it counts like any [trace](crate::GpuMemTrace#what-a-trace-counts).
    ///
    /// Such a trace needs exact results, so it ignores `GPUMEM_GAUGE=sampled`.
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
        (self.request.of_thread, self.request.all_threads) = (true, false);
        self
    }

    /// Counts all threads of the process, including those in scopes of other threads. Sampled traces always do.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// use gpumem::{Bytes, GpuMemTrace};
    ///
    /// let own = GpuMemTrace::new();
    /// let all = GpuMemTrace::builder().all_threads().start()?;
    /// let traced = || {
    ///     let _trace = GpuMemTrace::with_ctx("worker");
    ///     gpu.alloc(Bytes::mib(100))
    /// };
    /// let block = std::thread::scope(|threads| threads.spawn(traced).join().unwrap())?;
    /// assert_eq!((own.data().used.mb(), all.data().used.mb()), (0, 100));
    /// # drop(block);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn all_threads(mut self) -> Self {
        (self.request.of_thread, self.request.all_threads) = (false, true);
        self
    }

    /// Counts all threads of the process, and requires exact results.
    pub(in crate::session) fn all_threads_exactly(mut self) -> Self {
        self.request.exact = true;
        self.all_threads()
    }

    /// Returns whether the program requested the calling thread only.
    pub(in crate::session) fn counts_own_thread(&self) -> bool {
        self.request.of_thread
    }

    /// Returns whether the trace would use a custom gauge if it started now.
    pub(in crate::session) fn is_custom(&self, session: &Session) -> bool {
        self.request.custom_devices(session).is_some()
    }

    /// Returns the device that the trace would have if it started now.
    pub(in crate::session) fn device_or_current(&self, session: &Session) -> Result<Device> {
        session.devices()?.device(self.request.device)
    }

    /// Adopts threads: their allocations outside their own scopes count for the innermost open scope of the thread that started this
    /// trace, as if they had entered it through a [handle](crate::GpuMemTrace::handle). The default is `GPUMEM_ADOPT`, or else the
    /// threads of [`scope::adopt`](crate::scope::adopt), or else none.
    ///
    /// Use this for threads that a library starts, such as burn's device thread, and for `spawn_blocking`. If scopes of two
    /// threads adopt the same thread at the same time, its allocations count for the scope that was opened last, and the lines of
    /// both name them ([`Trace::shared`](crate::Trace::shared)).
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// use gpumem::{Bytes, GpuMemTrace, scope::Threads};
    ///
    /// let trace = GpuMemTrace::builder().ctx("load").adopt(Threads::named("DSD-")).start()?;
    /// let device_thread = std::thread::Builder::new().name("DSD-0-0".to_owned());
    /// let page = device_thread.spawn(move || gpu.alloc(Bytes::mib(64)))?.join().unwrap()?;
    /// assert_eq!(trace.live()[0].path, ["load"]);
    /// # drop(page);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn adopt(mut self, threads: Threads) -> Self {
        self.request.adopt = Some(threads);
        self
    }

    /// Keeps the allocations that made up the peak, for [`peak_holders`](crate::GpuMemTrace::peak_holders). The default is `false`.
    /// `true` makes each allocation a little slower, and has no effect if the results are not exact.
    pub fn at_peak(mut self, at_peak: bool) -> Self {
        self.request.at_peak = at_peak;
        self
    }

    /// Sets whether all reports of the trace are off. The default is `false`.
    pub fn silent(mut self, silent: bool) -> Self {
        self.silent = silent;
        self
    }

    /// Sets whether dropping the trace prints a report. The default is `true`.
    pub fn on_exit_report(mut self, report: bool) -> Self {
        self.on_exit_report = report;
        self
    }

    /// Sets whether the thread that starts the trace is in its scope. The default is `true`. With `false`, threads and tasks
    /// enter it through its [handle](crate::GpuMemTrace::handle), and exact results count their allocations in it, wherever these are
    /// freed. Therefore such traces do not affect each other or other traces.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// use gpumem::{Bytes, GpuMemTrace};
    ///
    /// let trace = GpuMemTrace::builder().ctx("request").entered(false).start()?;
    /// let other = gpu.alloc(Bytes::mib(1))?;
    /// let own = trace.handle().in_scope(|| gpu.alloc(Bytes::mib(10)))?;
    /// assert_eq!(trace.data().used.mb(), 10);
    /// # drop((other, own));
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn entered(mut self, entered: bool) -> Self {
        (self.entered, self.request.of_task) = (entered, !entered);
        self
    }

    /// Counts the end of the trace in [`stats`](crate::stats()) instead of printing lines. `GPUMEM` may choose otherwise for it.
    pub fn stats(mut self) -> Self {
        self.stats = true;
        self
    }

    /// Sets the context, unless the trace will be off. The attribute calls this after all other settings.
    #[doc(hidden)]
    #[inline]
    pub fn ctx_unless_off<C: Into<String>>(self, ctx: impl FnOnce() -> C) -> Self {
        if self.is_off() { self } else { self.ctx(ctx()) }
    }

    /// Returns whether the trace will be off, because traces are off for the whole process.
    #[inline]
    pub(super) fn is_off(&self) -> bool {
        self.request.gauge.is_none() && traces_are_off()
    }

    /// Opens the scope. `None` if the trace is off.
    pub(super) fn open(&self, session: &'static Session, at: CodeLine) -> Result<Option<OpenScope>> {
        let scope = OpenScope::open(session, self.request, self.function.or(self.ctx.as_deref()), at)?;
        if scope.is_none() && self.request.gauge.is_none() {
            session.notify_gauge_off();
            turn_traces_off();
        }
        if let Some(scope) = &scope
            && !self.entered
            && !self.request.is_of_task(scope.gauge)
        {
            ScopeHandle::of(Some((session, scope.id))).leave();
        }
        Ok(scope)
    }

    /// Like [`open`](Self::open), but an error is printed once, and the trace is off.
    pub(super) fn open_or_off(&self, session: &'static Session, at: CodeLine) -> Option<OpenScope> {
        self.open(session, at).unwrap_or_else(|error| {
            session.notify_off(&error);
            if error.is_unavailable() && session.is_without_devices() {
                turn_traces_off();
            }
            None
        })
    }
}

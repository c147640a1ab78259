//! The open scopes that guards hold.

use std::{convert::Infallible, time::Duration};

use crate::{
    derive::KeptPeak,
    error::{Error, Kind, Result},
    inbox::name_threads_with,
    ledger::ScopePeriod,
    model::{Counted, Device, EventKind, Gauge, ScopeId, ScopeSpec, Source, Threads, Trace},
    process,
    session::{
        Notice, Session, alive, current,
        events::{Numbered, callsites::CodeLine, sampling},
    },
    source::{Devices, custom_devices},
};

impl Session {
    /// Returns the id of a callsite. Writes the definition of a new callsite to the recording.
    pub(in crate::session) fn number_callsite(
        &self,
        ctx: Option<&str>,
        location: CodeLine,
        module: Option<&'static str>,
    ) -> Numbered {
        #[cfg_attr(not(feature = "capture"), expect(unused_variables, reason = "only recordings say what is new"))]
        let (callsite, is_new) = self.callsites.number(ctx, location, module, &self.settings.filter);
        #[cfg(feature = "capture")]
        if is_new {
            self.record_callsite(callsite.id);
        }
        callsite
    }
}

/// The settings that the program requests for a new scope.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a setting of its own")]
pub(in crate::session) struct ScopeRequest {
    /// The device. `None` for the calling thread's current device.
    pub(in crate::session) device: Option<u32>,
    /// The gauge. `None` for the best that is available.
    pub(in crate::session) gauge: Option<Gauge>,
    /// The source of exact results. `None` for the one in use, or else the best one.
    pub(in crate::session) source: Option<Source>,
    /// True to count only allocations of the calling thread.
    pub(in crate::session) of_thread: bool,
    /// True to count all threads of the process.
    pub(in crate::session) all_threads: bool,
    /// True to count only allocations of threads that enter the scope. The calling thread does not.
    pub(in crate::session) of_task: bool,
    /// True if only exact results are useful.
    pub(in crate::session) exact: bool,
    /// True to keep the allocations that make the scope's peak.
    pub(in crate::session) at_peak: bool,
    /// The threads that the scope adopts. `None` for the threads in `GPUMEM_ADOPT`, or else in a call of [`adopt`].
    pub(in crate::session) adopt: Option<Threads>,
    /// The module of the traced function, if it is known.
    pub(in crate::session) module: Option<&'static str>,
}

impl ScopeRequest {
    /// Returns whether only threads that enter the scope are in it. The thread that opens any other scope also enters it.
    pub(in crate::session) fn is_of_task(&self, gauge: Gauge) -> bool {
        self.of_task && !self.all_threads && gauge == Gauge::Exact
    }

    /// Returns the custom gauges if the scope must be measured by one of them.
    pub(in crate::session) fn custom_devices(&self, session: &Session) -> Option<&'static dyn Devices> {
        let Self { device, gauge, source, of_thread, exact, .. } = *self;
        let is_open = (device, gauge, source, of_thread, exact) == (None, None, None, false, false);
        if is_open { custom_devices().filter(|_| session.settings().gauge() == Ok(None)) } else { None }
    }
}

/// Makes all scopes opened after this call adopt these threads, as with
/// [`GpuMemTraceBuilder::adopt`](crate::GpuMemTraceBuilder::adopt). Use this in a library that knows the threads of a framework.
/// The request of a trace and `GPUMEM_ADOPT` have priority, and only the first call has an effect.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// use gpumem::{Bytes, GpuMemTrace, scope::{Threads, adopt}};
///
/// adopt(Threads::named("pt_autograd_")); // PyTorch's backward pass
/// let trace = GpuMemTrace::with_ctx("backward");
/// let thread = std::thread::Builder::new().name("pt_autograd_0".to_owned());
/// let gradient = thread.spawn(move || gpu.alloc(Bytes::mib(64)))?.join().unwrap()?;
/// assert_eq!(trace.live()[0].path, ["backward"]);
/// # drop(gradient);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn adopt(threads: Threads) {
    _ = current().adopted.set(threads);
}

/// An open scope. Its device does not change.
pub(in crate::session) struct OpenScope {
    pub(in crate::session) session: &'static Session,
    pub(in crate::session) id: ScopeId,
    pub(in crate::session) callsite: Numbered,
    pub(in crate::session) device: Device,
    pub(in crate::session) gauge: Gauge,
    /// True if the ledger keeps the allocations that made its peak.
    pub(in crate::session) at_peak: bool,
    pub(in crate::session) devices: &'static dyn Devices,
}

impl OpenScope {
    /// Opens a scope with the requested gauge, or else the one in `GPUMEM_GAUGE`, or else the device's best one. `None` if the
    /// gauge is `Off`.
    pub(in crate::session) fn open(
        session: &'static Session,
        request: ScopeRequest,
        ctx: Option<&str>,
        location: CodeLine,
    ) -> Result<Option<Self>> {
        // This check comes first, because another thread may hold the lock of the environment in the child of a fork.
        alive()?;
        let needs_exact = request.of_thread || request.exact;
        let settings = session.settings();
        let gauge = match (request.gauge, unless_needed(settings.gauge(), needs_exact)) {
            (Some(gauge), _) => Some(gauge),
            // Scopes of one thread and budgets need exact results, so `GPUMEM_GAUGE` has no effect on them.
            (None, set) if needs_exact && set != Ok(Some(Gauge::Off)) => Some(Gauge::Exact),
            (None, set) => set?,
        };
        if gauge == Some(Gauge::Off) {
            return Ok(None);
        }
        let custom = request.custom_devices(session);
        let devices = match custom {
            Some(custom) => {
                process::notice_forks();
                custom
            }
            None => session.devices()?,
        };
        let device = devices.device(request.device)?;
        let ordinal = device.ordinal;
        session.ensure_started();
        let requested_by = |gauge: Gauge| match request.gauge {
            Some(_) => format!("the program requests the gauge `{gauge}`"),
            None => format!("GPUMEM_GAUGE is {gauge}"),
        };
        if let (Some(gauge @ Gauge::Sampled), Some(source)) = (gauge, request.source) {
            let detail = format!("`{source}` gives exact numbers, and {}; leave one of them out", requested_by(gauge));
            return Err(Kind::BadSetting { setting: "source", detail }.into());
        }
        let interruptions = session.subscription.interruptions();
        let (gauge, source, not_exact) = match gauge {
            _ if custom.is_some() => (Gauge::Sampled, Source::Custom, None),
            Some(Gauge::Sampled) => (Gauge::Sampled, Source::Sampling, None),
            _ => match session.subscribe(devices, request.source, needs_exact) {
                Ok(source) => (Gauge::Exact, source, None),
                Err(why) if gauge.is_none() && request.source.is_none() => {
                    (Gauge::Sampled, Source::Sampling, Some(why))
                }
                Err(why) => return Err(why),
            },
        };
        let sampled = gauge == Gauge::Sampled;
        if gauge != Gauge::Exact && needs_exact {
            let setting = if request.of_thread { "thread_local_only" } else { "a budget" };
            let detail = format!("it needs exact numbers, and {}; leave one of them out", requested_by(gauge));
            return Err(not_exact.unwrap_or_else(|| Kind::BadSetting { setting, detail }.into()));
        }
        let every = if sampled { session.settings.sample_every } else { Duration::ZERO };
        let counts = match request {
            _ if gauge != Gauge::Exact => Counted::AllThreads,
            ScopeRequest { all_threads: true, .. } => Counted::AllThreads,
            ScopeRequest { of_task: true, .. } => Counted::Task,
            ScopeRequest { of_thread: true, .. } => Counted::Own,
            _ => Counted::OwnAndUnscoped,
        };
        let callsite = session.number_callsite(ctx, location, request.module);
        let spec = ScopeSpec { device, gauge, every, counts, callsite: callsite.id, source, at_peak: request.at_peak };
        let id = session.next_scope();
        let open = EventKind::Open { scope: id, spec };
        if sampled {
            let read = || {
                let memory = devices.read(ordinal)?;
                session.sample(device, devices)?;
                Ok::<_, Error>(EventKind::Sample { device, memory })
            };
            session.readings.ask(&session.inbox, device, read, &open)?;
        } else {
            devices.check(ordinal)?;
            if !process::is_forked() {
                devices.poll(ordinal);
                session.compare_displaced(devices);
            }
            session.inbox.post(&open);
            // `unsubscribe` may have recorded a loss before this scope opened.
            if session.subscription.interruptions() != interruptions {
                session.inbox.post(&EventKind::Lost { count: 1 });
            }
        }
        if let Some(threads) = request.adopt.or(settings.adopt).or(session.adopted.get().copied()) {
            name_threads_with(process::name_of_thread);
            session.inbox.post(&EventKind::Adopt { scope: id, threads });
        }
        // The notice about an invalid setting already names the replacement.
        if let Some(why) = not_exact.filter(|why| !session.settings.is_problem(why)) {
            let text = format_args!(
                "{device} is sampled every {every:?}, all processes on it, and shorter peaks are missed, because {why}"
            );
            session.notify(Notice::Sampled, &text);
        }
        if custom.is_some() {
            let name = devices.name(ordinal)?;
            let text = format_args!(
                "the numbers come from the program's gauge `{name}`, for the whole process: peaks between two readings, {every:?} apart, are missed"
            );
            session.notify(Notice::Custom, &text);
        }
        let at_peak = request.at_peak && gauge == Gauge::Exact;
        Ok(Some(Self { session, id, callsite, device, gauge, at_peak, devices }))
    }

    pub(in crate::session) fn read(&self) -> Trace {
        self.ask(EventKind::Read { scope: self.id })
    }

    /// Like [`reset`](Self::reset), but the allocations at the peak and the device of allocations still count from the start.
    pub(in crate::session) fn next(&self) -> Trace {
        self.ask(EventKind::ResetKeepingPeak { scope: self.id })
    }

    /// Returns the trace and restarts from the same reading, so that no event is lost in between.
    pub(in crate::session) fn reset(&self) -> Trace {
        self.ask(EventKind::Reset { scope: self.id })
    }

    fn ask(&self, query: EventKind) -> Trace {
        let Self { session, device, devices, .. } = *self;
        let Session { inbox, readings, .. } = session;
        if self.gauge == Gauge::Exact && !process::is_forked() {
            session.post_polled(device, devices);
        }
        let trace = match self.gauge {
            Gauge::Sampled if !process::is_forked() => {
                let read = || Ok::<_, Infallible>(sampling::reading(session, device, devices));
                let Ok(trace) = readings.ask(inbox, device, read, &query);
                trace
            }
            _ => inbox.ask(None, &query),
        };
        // A thread that is already inside the inbox gets no answer, nor does the child of a fork.
        trace.unwrap_or_else(|| Trace::stale(self.device.ordinal, self.gauge))
    }

    /// Returns the period of the scope, which identifies the blocks that were allocated in it.
    pub(in crate::session) fn period(&self) -> Option<ScopePeriod> {
        self.session.inbox.scope_period(self.id)
    }

    /// Closes the scope. Returns its trace and the allocations that made its peak.
    pub(in crate::session) fn close(self) -> (Trace, Option<KeptPeak<'static>>) {
        let trace = self.ask(EventKind::Close { scope: self.id });
        if self.gauge == Gauge::Sampled {
            self.session.sampler.remove_scope(self.device);
        }
        (trace, self.at_peak.then(|| KeptPeak::of_closed(&self.session.inbox, self.id)))
    }

    /// Closes the scope when its result can no longer be requested. An exact scope without a kept peak is not read; its device is
    /// only polled.
    pub(in crate::session) fn close_unread(self) {
        if self.gauge != Gauge::Exact || self.at_peak || process::is_forked() {
            self.close();
        } else {
            self.devices.poll(self.device.ordinal);
            self.session.inbox.post(&EventKind::Close { scope: self.id });
        }
    }
}

/// Ignores the error of an invalid environment variable if the program itself requires the measurement.
pub(in crate::session) fn unless_needed<T>(set: Result<Option<T>>, is_needed: bool) -> Result<Option<T>> {
    // The notice about the settings names the problem.
    if is_needed { Ok(set.unwrap_or(None)) } else { set }
}

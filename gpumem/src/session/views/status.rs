//! What is measured, by what, since when, and how well.

use std::{fmt, time::Duration};

use crate::session::{Session, current};
use crate::{
    error::{Error, Kind, Result},
    model::{Bytes, Gauge, MemKind, Source},
    report::counted,
    settings::Settings,
    source::Devices,
    sys::process,
};

/// What is measured, by what, since when, and how well: the answer of [`status`].
///
/// `Display` is a few lines for people; it ends with the `GPUMEM_` variables that are set and what they stand for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Status {
    /// What a trace that is started now, without a gauge of its own, would have.
    pub gauge: Gauge,
    /// Why that is not exact; with both reasons, if neither the dispatch table nor CUPTI can be used.
    pub why_not_exact: Option<Error>,
    /// What the numbers of such a trace would come from.
    pub source: Source,
    /// Why that is not the dispatch table. `None` unless CUPTI is used instead and nobody asked for CUPTI.
    pub why_not_dispatch: Option<Error>,
    /// The library in which allocations are intercepted, or the simulated device. `None` if they are not, or not yet.
    pub intercepted_by: Option<String>,
    /// How long ago the first trace (or [`subscribe`](crate::session::subscribe)) began to count. Zero before.
    pub since: Duration,
    /// Allocations and frees that were intercepted since then.
    pub events: u64,
    /// Frees since then of blocks whose size nobody knows.
    pub untracked: u64,
    /// Allocations and other events since then that could not be counted, and functions that another tool took from gpumem.
    pub lost: u64,
    /// What is live of the memory whose allocation was intercepted, by kind of memory.
    pub live: Vec<LiveMemory>,
    /// Not in the child of a fork, which may not read the environment.
    settings: Option<&'static Settings>,
}

/// Live memory of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveMemory {
    /// What sort of memory. Traces count what [`is_on_device`](MemKind::is_on_device).
    pub kind: MemKind,
    /// How many allocations.
    pub blocks: u64,
    /// How much they add up to.
    pub bytes: Bytes,
}

/// What is measured, by what, since when, and how well. Starts nothing and never fails.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # let trace = gpumem::GpuMemTrace::new();
/// # let block = gpu.alloc(gpumem::Bytes::mib(2))?;
/// println!("{}", gpumem::status());
/// # assert_eq!(gpumem::status().events, 1);
/// # drop(block);
/// # Ok::<(), gpumem::Error>(())
/// ```
pub fn status() -> Status {
    let session = current();
    let Now { gauge, source, why_not_exact, why_not_dispatch, intercepted_by } = Now::find(session);
    let (counts, stats) = (session.inbox.counts(), session.inbox.stats());
    let live = MemKind::ALL.into_iter().map(|kind| {
        let of_kind = || stats.iter().map(|device| &device.kinds[kind as usize]);
        LiveMemory {
            kind,
            blocks: of_kind().map(|stat| stat.blocks.current).sum(),
            bytes: Bytes::new(of_kind().map(|stat| stat.bytes.current).sum()),
        }
    });
    Status {
        gauge,
        source,
        why_not_exact,
        why_not_dispatch,
        intercepted_by,
        since: if session.is_begun() { session.inbox.age() } else { Duration::ZERO },
        events: counts.events,
        untracked: counts.untracked,
        lost: counts.lost,
        live: live.filter(|live| live.blocks > 0).collect(),
        settings: (!process::is_forked()).then(|| session.settings()),
    }
}

/// Why live blocks are not known, if they are not.
pub(in crate::session) fn why_not_intercepted(session: &'static Session) -> Option<Error> {
    Now::find(session).why_not_exact
}

/// What a new trace would be.
#[derive(Clone, Debug)]
pub(in crate::session) struct Now {
    gauge: Gauge,
    source: Source,
    pub(in crate::session) why_not_exact: Option<Error>,
    why_not_dispatch: Option<Error>,
    intercepted_by: Option<String>,
}

impl Now {
    pub(in crate::session) fn find(session: &'static Session) -> Self {
        Self::of_devices(session).unwrap_or_else(|why| Self::inexact(Gauge::Off, Some(why)))
    }

    /// Allocations are intercepted and counted, or will be from the next trace on. Simulated devices report theirs also while nobody
    /// counts.
    pub(in crate::session) fn is_intercepted(&self, session: &Session) -> bool {
        self.gauge == Gauge::Exact || self.intercepted_by.is_some() && session.is_begun()
    }

    fn of_devices(session: &'static Session) -> Result<Self> {
        if process::is_forked() {
            return Err(Kind::Forked.into());
        }
        let request = session.settings().gauge()?;
        let devices = session.devices()?;
        // With a driver and no device there is nothing to trace.
        devices.check(0)?;
        let live = devices.subscribed();
        let intercepted_by = live.map(|live| live.library.to_owned());
        if let Some(gauge @ (Gauge::Off | Gauge::Pool | Gauge::Sampled)) = request {
            return Ok(Self { intercepted_by, ..Self::inexact(gauge, not_exact_by_wish(request)) });
        }
        let source = match (live, refused(session)) {
            (Some(live), _) => Ok(live.source),
            (None, Some(why)) => Err(why),
            (None, None) => session.settings().source().and_then(|wanted| devices.can_subscribe(wanted)),
        };
        match source {
            Ok(source) => {
                let why_not_dispatch = why_not_dispatch(session, devices, source);
                Ok(Self { gauge: Gauge::Exact, source, why_not_exact: None, why_not_dispatch, intercepted_by })
            }
            Err(why) if request.is_none() => Ok(Self::inexact(Gauge::Sampled, Some(why))),
            Err(why) => Err(why),
        }
    }

    fn inexact(gauge: Gauge, why_not_exact: Option<Error>) -> Self {
        let source = match gauge {
            Gauge::Pool => Source::PoolMark,
            Gauge::Sampled => Source::Sampling,
            _ => Source::Off,
        };
        Self { gauge, source, why_not_exact, why_not_dispatch: None, intercepted_by: None }
    }
}

/// Why CUPTI is used and not the dispatch table, unless that was wanted.
fn why_not_dispatch(session: &Session, devices: &dyn Devices, source: Source) -> Option<Error> {
    let by_itself = source == Source::Cupti && matches!(session.settings().source(), Ok(None));
    by_itself.then(|| devices.can_subscribe(Some(Source::Dispatch)).err()).flatten()
}

/// Why new traces are not exact, if that is what `GPUMEM_GAUGE` says.
pub(in crate::session) fn not_exact_by_wish(request: Option<Gauge>) -> Option<Error> {
    let why = match request {
        None | Some(Gauge::Exact) => return None,
        Some(Gauge::Off) => "GPUMEM_GAUGE says off",
        Some(Gauge::Pool) => "GPUMEM_GAUGE says pool",
        Some(_) => "GPUMEM_GAUGE says sampled",
    };
    Some(Kind::NoGauge { gauge: "exact", why }.into())
}

/// The error of a session after `unsubscribe`.
pub(in crate::session) fn given_up() -> Error {
    let why = "gpumem::intercept::unsubscribe() was called; call gpumem::intercept::subscribe()";
    Kind::NoGauge { gauge: "exact", why }.into()
}

/// Why the session does not intercept allocations, if that was tried or given up.
fn refused(session: &Session) -> Option<Error> {
    session.subscription.why_not(given_up)
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gauge of new traces: {}", self.gauge)?;
        if let Some(why) = &self.why_not_exact {
            write!(f, "\n  not exact: {why}")?;
        }
        if self.source != Source::Off {
            write!(f, "\nsource of new traces: {}", self.source)?;
        }
        if let Some(why) = &self.why_not_dispatch {
            write!(f, "\n  not dispatch: {why}")?;
        }
        let nobody = if self.gauge == Gauge::Exact { "nothing yet" } else { "nothing" };
        write!(f, "\nallocations intercepted by: {}", self.intercepted_by.as_deref().unwrap_or(nobody))?;
        let since = self.since.as_secs_f64();
        let Self { events, untracked, lost, .. } = self;
        write!(f, "\nsince {since:.1} s: {events} events, {untracked} untracked frees, {lost} lost")?;
        for LiveMemory { kind, blocks, bytes } in &self.live {
            let blocks = counted(*blocks, "block", "blocks");
            write!(f, "\n  live {kind:<11} {bytes:>12} in {blocks}")?;
        }
        for (at, variable) in self.settings.into_iter().flat_map(Settings::set).enumerate() {
            write!(f, "{}\n  {variable}", if at == 0 { "\nenvironment:" } else { "" })?;
        }
        Ok(())
    }
}

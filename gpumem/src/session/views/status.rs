//! The status of the measurement: its gauge, its source, its start and the live memory.

use std::{fmt, time::Duration};

use crate::session::{Session, current};
use crate::{
    error::{Error, Kind, Result},
    inbox::LedgerView,
    model::{Bytes, Gauge, MemKind, Source, one_line},
    process,
    report::counted,
    settings::Settings,
    source::{Devices, custom_devices},
};

/// The status of the measurement, from [`status`].
///
/// `Display` writes one fact per line, and then the `GPUMEM_` variables that are set, with their meanings.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Status {
    /// The gauge that a trace would have if it started now.
    pub gauge: Gauge,
    /// The reason why that gauge is not exact. If neither the dispatch table nor CUPTI can be used, it contains both reasons.
    pub why_not_exact: Option<Error>,
    /// The source of that trace's numbers.
    pub source: Source,
    /// The reason why the source is not the dispatch table. `None` unless CUPTI is used and was not requested.
    pub why_not_dispatch: Option<Error>,
    /// The library in which allocations are intercepted, or the simulated device. `None` if allocations are not intercepted, or not yet.
    pub intercepted_by: Option<String>,
    /// The time since the first trace or [`subscribe`](crate::session::subscribe). Zero before that.
    pub since: Duration,
    /// The number of allocations and frees that were intercepted since then.
    pub events: u64,
    /// The number of frees since then of blocks whose size is not known.
    pub untracked: u64,
    /// The number of known missed events since then, plus the number of driver functions that another tool has replaced.
    pub lost: u64,
    /// The CUDA ordinals of integrated devices, which use the machine's memory: their results describe the machine, and traces count
    /// pinned and managed memory as memory of the kind `device`.
    pub integrated: Vec<u32>,
    /// The live memory by kind, if its allocation was intercepted.
    pub live: Vec<LiveMemory>,
    /// The settings. `None` in the child of a fork, which must not read the environment.
    settings: Option<&'static Settings>,
}

/// Live memory of one kind.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # let trace = gpumem::GpuMemTrace::new();
/// let block = gpu.alloc(gpumem::Bytes::mib(2))?;
/// for live in gpumem::status().live {
///     println!("{} bytes of {} memory", live.bytes.get(), live.kind); // 2097152 bytes of device memory
/// }
/// # assert_eq!(gpumem::status().live[0].bytes, gpumem::Bytes::mib(2));
/// # drop(block);
/// # Ok::<(), gpumem::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveMemory {
    /// The kind of memory. Traces count the kinds that are [`is_on_device`](MemKind::is_on_device).
    pub kind: MemKind,
    /// The number of live allocations.
    pub blocks: u64,
    /// Their total size.
    pub bytes: Bytes,
}

/// Returns the status of the measurement. Starts no measurement and never fails.
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
    let NewTrace { gauge, source, why_not_exact, why_not_dispatch, intercepted_by } = NewTrace::find(session);
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
        since: if session.is_started() { session.inbox.age() } else { Duration::ZERO },
        events: counts.events,
        untracked: counts.untracked,
        lost: counts.lost,
        integrated: integrated(session),
        live: live.filter(|live| live.blocks > 0).collect(),
        settings: (!process::is_forked()).then(|| session.settings()),
    }
}

fn integrated(session: &'static Session) -> Vec<u32> {
    if process::is_forked() {
        return Vec::new();
    }
    let Ok(devices) = session.devices() else { return Vec::new() };
    (0..devices.count().unwrap_or(0)).filter(|ordinal| devices.is_integrated(*ordinal)).collect()
}

/// Returns the reason why allocations are not intercepted. `None` if they are.
pub(in crate::session) fn why_not_intercepted(session: &'static Session) -> Option<Error> {
    NewTrace::find(session).why_not_exact
}

/// The gauge and the source that a trace would have if it started now.
#[derive(Clone, Debug)]
pub(in crate::session) struct NewTrace {
    gauge: Gauge,
    source: Source,
    pub(in crate::session) why_not_exact: Option<Error>,
    why_not_dispatch: Option<Error>,
    intercepted_by: Option<String>,
}

impl NewTrace {
    pub(in crate::session) fn find(session: &'static Session) -> Self {
        Self::of_devices(session).unwrap_or_else(|why| Self::inexact(Gauge::Off, Some(why)))
    }

    /// Returns whether allocations are intercepted and counted, or will be once the next trace starts. Simulated devices report their
    /// allocations even before the session counts them.
    pub(in crate::session) fn is_intercepted(&self, session: &Session) -> bool {
        self.gauge == Gauge::Exact || self.intercepted_by.is_some() && session.is_started()
    }

    fn of_devices(session: &'static Session) -> Result<Self> {
        if process::is_forked() {
            return Err(Kind::Forked.into());
        }
        let request = session.settings().gauge()?;
        if request.is_none() && custom_devices().is_some() {
            let why =
                Kind::NoGauge { gauge: "exact", why: "the program uses its own gauge (gpumem::gauge::set_gauge)" };
            let live = session.devices().ok().and_then(Devices::subscribed);
            let intercepted_by = live.map(|live| live.library.to_owned());
            return Ok(Self {
                source: Source::Custom,
                intercepted_by,
                ..Self::inexact(Gauge::Sampled, Some(why.into()))
            });
        }
        let devices = session.devices()?;
        // There may be a driver but no device.
        devices.check(0)?;
        let live = devices.subscribed();
        let intercepted_by = live.map(|live| live.library.to_owned());
        if let Some(gauge @ (Gauge::Off | Gauge::Sampled)) = request {
            return Ok(Self { intercepted_by, ..Self::inexact(gauge, not_exact_by_setting(request)) });
        }
        let source = match (live, why_not_subscribed(session)) {
            (Some(live), _) => Ok(live.source),
            (None, Some(why)) => Err(why),
            (None, None) => session.settings().source().and_then(|source| devices.can_subscribe(source)),
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
            Gauge::Sampled => Source::Sampling,
            _ => Source::Off,
        };
        Self { gauge, source, why_not_exact, why_not_dispatch: None, intercepted_by: None }
    }
}

/// Returns the reason why CUPTI is used instead of the dispatch table. `None` if `GPUMEM_SOURCE` requests CUPTI.
fn why_not_dispatch(session: &Session, devices: &dyn Devices, source: Source) -> Option<Error> {
    let is_automatic = source == Source::Cupti && matches!(session.settings().source(), Ok(None));
    is_automatic.then(|| devices.can_subscribe(Some(Source::Dispatch)).err()).flatten()
}

/// Returns the reason why new traces are not exact, if `GPUMEM_GAUGE` sets another gauge.
pub(in crate::session) fn not_exact_by_setting(request: Option<Gauge>) -> Option<Error> {
    let why = match request {
        None | Some(Gauge::Exact) => return None,
        Some(Gauge::Off) => "GPUMEM_GAUGE is off",
        Some(_) => "GPUMEM_GAUGE is sampled",
    };
    Some(Kind::NoGauge { gauge: "exact", why }.into())
}

/// Returns the error of a session after `unsubscribe`.
pub(in crate::session) fn unsubscribed_error() -> Error {
    let why = "gpumem::intercept::unsubscribe() was called; call gpumem::intercept::subscribe()";
    Kind::NoGauge { gauge: "exact", why }.into()
}

/// Returns the reason why the session does not intercept allocations, if it failed to subscribe or has unsubscribed.
fn why_not_subscribed(session: &Session) -> Option<Error> {
    session.subscription.why_not(unsubscribed_error)
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gauge of new traces: {}", self.gauge)?;
        if let Some(why) = &self.why_not_exact {
            write!(f, "\n  not exact: {}", one_line(&why.to_string()))?;
        }
        if self.source != Source::Off {
            write!(f, "\nsource of new traces: {}", self.source)?;
        }
        if let Some(why) = &self.why_not_dispatch {
            write!(f, "\n  not dispatch: {}", one_line(&why.to_string()))?;
        }
        let none = if self.gauge == Gauge::Exact { "nothing yet" } else { "nothing" };
        write!(f, "\nallocations intercepted by: {}", one_line(self.intercepted_by.as_deref().unwrap_or(none)))?;
        let since = self.since.as_secs_f64();
        let events = counted(self.events, "event", "events");
        let untracked = counted(self.untracked, "untracked free", "untracked frees");
        write!(f, "\nsince {since:.1} s: {events}, {untracked}, {} lost", self.lost)?;
        for device in &self.integrated {
            write!(
                f,
                "\ndevice {device} has no separate memory: its values describe the machine's memory, and pinned and managed"
            )?;
            f.write_str(" memory counts as device memory")?;
        }
        for LiveMemory { kind, blocks, bytes } in &self.live {
            let blocks = counted(*blocks, "block", "blocks");
            write!(f, "\n  live {kind:<11} {bytes:>12} in {blocks}")?;
        }
        for (at, variable) in self.settings.into_iter().flat_map(Settings::set).enumerate() {
            write!(f, "{}\n  {}", if at == 0 { "\nenvironment:" } else { "" }, one_line(&variable))?;
        }
        Ok(())
    }
}

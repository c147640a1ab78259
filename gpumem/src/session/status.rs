//! What is measured, by what, since when, and how well.

use std::{
    fmt,
    sync::{PoisonError, atomic::Ordering::Relaxed},
    time::Duration,
};

use super::{begun, devices, gauge_of_environment};
use crate::{
    error::{Error, Kind},
    model::{Bytes, Gauge, MemKind},
    report::counted,
    sys::process,
};

/// What is measured, by what, since when, and how well: the answer of [`status`].
///
/// `Display` is a few lines for people.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Status {
    /// What a trace that is started now, without a gauge of its own, would have.
    pub gauge: Gauge,
    /// Why that is not exact.
    pub why_not_exact: Option<Error>,
    /// By what allocations are heard: the library's path, or the simulated device. `None` if they are not.
    pub heard_by: Option<String>,
    /// How long ago the first trace (or [`subscribe`](super::subscribe)) began to count. Zero before.
    pub since: Duration,
    /// Allocations and frees heard since then.
    pub heard: u64,
    /// Frees since then of blocks whose size nobody knows.
    pub untracked: u64,
    /// Allocations and other events since then that could not be taken.
    pub lost: u64,
    /// What is live of that which was heard, by kind of memory.
    pub live: Vec<LiveMemory>,
}

/// Live memory of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveMemory {
    /// `device`, `pool`, `managed`, `pinned host` or `vmm`. Traces count the first two and the last: managed memory is
    /// where it was touched last, and pinned memory is on the host.
    pub kind: &'static str,
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
/// # assert_eq!(gpumem::status().heard, 1);
/// # drop(block);
/// # Ok::<(), gpumem::Error>(())
/// ```
pub fn status() -> Status {
    let (gauge, why_not_exact, heard_by) = gauge_of_now();
    let counts = begun().map(|session| session.inbox.counts()).unwrap_or_default();
    let stats = begun().map(|session| session.inbox.stats()).unwrap_or_default();
    let live = MemKind::ALL.into_iter().map(|kind| {
        let of_kind = || stats.iter().map(|device| &device.kinds[kind as usize]);
        LiveMemory {
            kind: kind.name(),
            blocks: of_kind().map(|stat| stat.blocks.current).sum(),
            bytes: Bytes::new(of_kind().map(|stat| stat.bytes.current).sum()),
        }
    });
    Status {
        gauge,
        why_not_exact,
        heard_by,
        since: begun().map(|session| session.inbox.age()).unwrap_or_default(),
        heard: counts.heard,
        untracked: counts.untracked,
        lost: counts.lost,
        live: live.filter(|live| live.blocks > 0).collect(),
    }
}

/// Why live blocks are not known, if they are not.
pub(super) fn not_heard() -> Option<Error> {
    gauge_of_now().1
}

pub(super) fn gauge_of_now() -> (Gauge, Option<Error>, Option<String>) {
    let off = |why: Error| (Gauge::Off, Some(why), None);
    if process::is_forked() {
        return off(Kind::Forked.into());
    }
    let wish = match gauge_of_environment() {
        Ok(wish) => wish,
        Err(error) => return off(error),
    };
    let devices = match devices().and_then(|devices| devices.count().map(|_| devices)) {
        Ok(devices) => devices,
        Err(error) => return off(error),
    };
    let heard_by = devices.subscribed().map(str::to_owned);
    match (wish, &heard_by) {
        (Some(gauge @ (Gauge::Off | Gauge::Pool | Gauge::Sampled)), _) => {
            (gauge, not_exact_by_wish(Some(gauge)), heard_by)
        }
        (Some(Gauge::Exact) | None, Some(_)) => (Gauge::Exact, None, heard_by),
        (Some(Gauge::Exact) | None, None) => match refused().map_or_else(|| devices.can_subscribe(), Err) {
            Ok(()) => (Gauge::Exact, None, None),
            Err(why) if wish.is_none() => (Gauge::Sampled, Some(why), None),
            Err(why) => off(why),
        },
    }
}

/// Why new traces are not exact, if that is what `GPUMEM_GAUGE` says.
pub(super) fn not_exact_by_wish(wish: Option<Gauge>) -> Option<Error> {
    let why = match wish {
        None | Some(Gauge::Exact) => return None,
        Some(Gauge::Off) => "GPUMEM_GAUGE says off",
        Some(Gauge::Pool) => "GPUMEM_GAUGE says pool",
        Some(Gauge::Sampled) => "GPUMEM_GAUGE says sampled",
    };
    Some(Kind::NoGauge { gauge: "exact", why }.into())
}

/// Why the session does not hear allocations, if it was tried or given up.
fn refused() -> Option<Error> {
    let session = begun()?;
    if session.unsubscribed.load(Relaxed) {
        return Some(Kind::NoGauge { gauge: "exact", why: super::UNSUBSCRIBED }.into());
    }
    session.refused.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gauge of new traces: {}", self.gauge)?;
        if let Some(why) = &self.why_not_exact {
            write!(f, "\n  not exact: {why}")?;
        }
        let nobody = if self.gauge == Gauge::Exact { "nothing yet" } else { "nothing" };
        write!(f, "\nallocations heard by: {}", self.heard_by.as_deref().unwrap_or(nobody))?;
        let since = self.since.as_secs_f64();
        let Self { heard, untracked, lost, .. } = self;
        write!(f, "\nsince {since:.1} s: {heard} events, {untracked} untracked frees, {lost} lost")?;
        for LiveMemory { kind, blocks, bytes } in &self.live {
            let blocks = counted(*blocks, "block", "blocks");
            write!(f, "\n  live {kind:<11} {bytes:>12} in {blocks}")?;
        }
        Ok(())
    }
}

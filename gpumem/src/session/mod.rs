//! The running thing of a process: the sources in use, the inbox, the sampler.

mod inbox;
mod notice;
mod sampler;
mod sink;
mod trace;

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use once_cell::sync::OnceCell;

pub(crate) use self::notice::{Notice, notify};
use self::{inbox::Inbox, sampler::Sampler};
pub use self::{
    sink::{Sink, set_sink},
    trace::{GpuMemTrace, GpuMemTraceBuilder},
};
use crate::{
    error::{Error, Kind, Result},
    ledger::Answer,
    model::{Device, EventKind, Family, Gauge, ScopeId, Trace, Watch},
    source::{self, Devices},
};

static SESSION: OnceCell<Session> = OnceCell::new();

struct Session {
    inbox: Inbox,
    sampler: Sampler,
    /// The wanted time between two readings of the sampler.
    every: Duration,
    scopes: AtomicU64,
}

/// The session, begun at the first use.
fn session() -> &'static Session {
    SESSION.get_or_init(|| {
        #[cfg(feature = "sim")]
        source::listen(|fact| {
            session().inbox.post(&[fact]);
        });
        Session {
            inbox: Inbox::new(),
            sampler: Sampler::default(),
            every: sample_interval(),
            scopes: AtomicU64::new(0),
        }
    })
}

fn begun() -> Option<&'static Session> {
    SESSION.get()
}

/// `GPUMEM_SAMPLE_MS`: whole milliseconds between two readings, 1 unless told otherwise.
fn sample_interval() -> Duration {
    let default = Duration::from_millis(1);
    let Some(text) = std::env::var_os("GPUMEM_SAMPLE_MS") else { return default };
    if let Some(every @ 1..) = text.to_str().and_then(|text| text.trim().parse::<u32>().ok()) {
        return Duration::from_millis(every.into());
    }
    let text = text.display();
    let detail = format!("`{text}` is not a whole number of milliseconds from 1 on; readings are 1 ms apart");
    notify(Notice::SampleInterval, &Error::from(Kind::BadSetting { setting: "GPUMEM_SAMPLE_MS", detail }));
    default
}

/// The devices of this process, announced where they are simulated.
pub(crate) fn devices() -> Result<&'static dyn Devices> {
    let devices = source::devices()?;
    if devices.family() == Family::Simulated {
        let figures = "the figures are those of a simulated GPU (GPUMEM_SIM or SimGpu::install), not of a real one";
        notify(Notice::Simulated, &figures);
    }
    Ok(devices)
}

/// A scope that is open, on a device that is fixed.
struct OpenScope {
    id: ScopeId,
    device: Device,
    gauge: Gauge,
    devices: &'static dyn Devices,
}

impl OpenScope {
    /// Opens a scope by the gauge that was wished for, else by that of `GPUMEM_GAUGE`, else by the best that the device
    /// offers. None where the gauge is `Off`.
    fn open(ordinal: Option<u32>, wish: Option<Gauge>) -> Result<Option<Self>> {
        let wish = wish.map_or_else(gauge_of_environment, |gauge| Ok(Some(gauge)))?;
        if wish == Some(Gauge::Off) {
            return Ok(None);
        }
        let devices = devices()?;
        let ordinal = ordinal.map_or_else(|| devices.current(), Ok)?;
        let device = Device { family: devices.family(), ordinal };
        let told = devices.tells(ordinal);
        let gauge = match wish {
            Some(Gauge::Exact) => told.map(|()| Gauge::Exact)?,
            None if told.is_ok() => Gauge::Exact,
            _ => Gauge::Sampled,
        };
        let session = session();
        let id = ScopeId(session.scopes.fetch_add(1, Relaxed));
        let mut facts = Vec::with_capacity(2);
        let mut every = Duration::ZERO;
        if gauge == Gauge::Sampled {
            every = session.every;
            let memory = devices.read(ordinal)?;
            session.sampler.watch(session, device, devices)?;
            facts.push(EventKind::Sample { device, memory });
            notify(
                Notice::Sampled,
                &format_args!(
                    "memory of {device} is sampled every {every:?}, all processes on it together: a peak between two \
                     readings is missed (gauge: sampled; GPUMEM_SAMPLE_MS sets the interval, GPUMEM_REPORT=off silences)"
                ),
            );
        }
        let watch = Watch { device, gauge, every, thread: None };
        facts.push(EventKind::Open { scope: id, watch });
        session.inbox.post(&facts);
        Ok(Some(Self { id, device, gauge, devices }))
    }

    fn read(&self) -> Trace {
        self.ask(EventKind::Read { scope: self.id })
    }

    /// One reading, for the answer and for the new start: nothing falls between.
    fn reset(&self) -> Trace {
        self.ask(EventKind::Reset { scope: self.id })
    }

    fn ask(&self, question: EventKind) -> Trace {
        let session = session();
        let answer = if self.gauge == Gauge::Sampled {
            session.inbox.post(&[sampler::reading(self.device, self.devices), question])
        } else {
            session.inbox.post(&[question])
        };
        // Only a thread that is inside the inbox gets no answer, and it is told that it lost what it asked.
        match answer {
            Answer::Trace(trace) => trace,
            _ => Trace { stale: true, gauge: self.gauge, ..Trace::off(self.device.ordinal) },
        }
    }

    fn close(self) -> Trace {
        let trace = self.ask(EventKind::Close { scope: self.id });
        if self.gauge == Gauge::Sampled {
            session().sampler.unwatch(self.device);
        }
        trace
    }
}

/// `GPUMEM_GAUGE`: `exact`, `sampled`, `off`, or `auto` for the best.
fn gauge_of_environment() -> Result<Option<Gauge>> {
    static CHOSEN: OnceCell<Result<Option<Gauge>>> = OnceCell::new();
    let chosen = CHOSEN.get_or_init(|| {
        let Some(text) = std::env::var_os("GPUMEM_GAUGE") else { return Ok(None) };
        let text = text.to_string_lossy();
        if text.is_empty() || text.eq_ignore_ascii_case("auto") {
            return Ok(None);
        }
        let bad = |detail| Error::from(Kind::BadSetting { setting: "GPUMEM_GAUGE", detail });
        text.parse().map(Some).map_err(|error: crate::model::ParseGaugeError| bad(error.to_string()))
    });
    chosen.clone()
}

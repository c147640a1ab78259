//! `gpumem export`: metrics of a machine for Prometheus and OpenTelemetry.
//!
//! `exporter.rs` follows the recordings of all processes (`followed.rs` handles one of them) and makes a `Sample`.
//! `metrics.rs` names its metrics; `prometheus.rs` and `otlp.rs` write them.

mod cgroup;
mod exporter;
mod followed;
mod host;
mod http;
mod live_memory;
mod metrics;
mod otlp;
mod prometheus;
mod sample;

use std::{
    convert::Infallible,
    fs, io,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use gpumem_core::report::counted;
use rustix::time::ClockId;

use self::{
    exporter::{Exporter, lock},
    host::Names,
    http::Server,
    sample::Hidden,
};
use crate::{failure::Failure, run::endings, terminal};

/// Recordings are read this often, unless that takes too much time.
const EVERY: Duration = Duration::from_secs(1);
/// Looking for new recordings uses at most one part in this many of a processor's time.
const PART_OF_TIME: u32 = 20;

/// The options that the user gave.
#[derive(Debug)]
pub(crate) struct Options {
    /// The address as the user gave it, and the addresses that it resolves to.
    pub(crate) listen: (String, Vec<SocketAddr>),
    pub(crate) unix: Option<PathBuf>,
    pub(crate) token: Option<String>,
    /// Other names of this machine.
    pub(crate) hosts: Vec<String>,
    pub(crate) places: usize,
    pub(crate) otlp: Option<String>,
}

/// Serves until the process ends.
pub(crate) fn serve(options: Options) -> Result<Infallible, Failure> {
    let Options { listen, unix, token, hosts, places, otlp } = options;
    let push = otlp.map(otlp::pusher).transpose()?;
    let names =
        unix.is_none().then(|| Names::with([host::without_port(&listen.0).to_owned()].into_iter().chain(hosts)));
    let (listener, address) = match &unix {
        Some(path) => (http::Listener::unix(path), path.display().to_string()),
        None => (http::Listener::tcp(&listen.1), listen.0),
    };
    let next = match unix {
        Some(_) => "use another --unix SOCKET",
        None => "another process may listen there; use another --listen ADDRESS:PORT",
    };
    let listener = listener.map_err(|error| Failure::new(format!("cannot listen on {address}"), error, next))?;
    let exporter = Arc::new(Mutex::new(Exporter::new(places)));
    let hidden = {
        let mut exporter = lock(&exporter);
        let (sample, collector) = exporter.collect("");
        exporter.forget(collector);
        sample.hidden
    };
    let lines: Vec<_> =
        std::iter::once(format!("serving {}", listener.address(&address))).chain(in_words(hidden)).collect();
    terminal::print(|out| lines.iter().try_for_each(|line| writeln!(out, "gpumem export: {line}")))?;
    if let Some(push) = push {
        push(Arc::clone(&exporter))?;
    }
    let listening = Arc::clone(&exporter);
    // If this fails, the exporter misses only recordings that start and end between two looks.
    _ = endings::listen(move |ending| lock(&listening).endings.push(ending));
    let followed = Arc::clone(&exporter);
    let follow = move || {
        loop {
            let before = used_time();
            lock(&followed).follow();
            thread::sleep(EVERY.max(used_time().saturating_sub(before) * PART_OF_TIME));
        }
    };
    let failed = |error: io::Error| Failure::new("metrics cannot be served", error, "");
    thread::Builder::new().name("gpumem-follow".to_owned()).spawn(follow).map_err(failed)?;
    http::serve(listener, Server { exporter, token, names }).map_err(failed)
}

/// Returns how long this thread has used a processor. While it waits for a lock or for a processor, this does not grow.
fn used_time() -> Duration {
    rustix::time::clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap_or_default()
}

/// Describes in words the things that this process cannot see.
fn in_words(hidden: Hidden) -> Vec<String> {
    let Hidden { processes, unknown, dormant: _, recordings: _, readings } = hidden;
    let mut lines = Vec::new();
    // Process 1 belongs to another user, unless this is a container.
    if fs::read_dir("/proc/1/fd").is_err() {
        lines.push("recordings of other users cannot be seen; run as root, or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH, to see them".to_owned());
    }
    if processes > 0 {
        lines.push(format!("{processes} of the driver's processes cannot be seen here; in a container, share the PID namespace of the host"));
    }
    if unknown > 0 {
        let processes = counted(unknown as u64, "process is", "processes are");
        lines.push(format!("whether {processes} recorded is not known"));
    }
    if readings > 0 {
        let readings = counted(readings as u64, "reading of the driver has", "readings of the driver have");
        lines.push(format!("{readings} failed; `gpumem doctor` shows the reason"));
    }
    lines
}

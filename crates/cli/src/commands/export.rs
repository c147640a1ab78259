//! Serves metrics of the machine.

use std::{
    env,
    fmt::Display,
    fs::{self, File},
    io::{self, Read},
    net::{SocketAddr, ToSocketAddrs},
    path::{Path, PathBuf},
};

use clap::Args;
use gpumem_core::regular_file;

use crate::{
    exit::Exit,
    export::{self, Options},
    failure::Failure,
};

const EXAMPLES: &str = "\
Examples:
  gpumem export
  curl -s http://127.0.0.1:9837/metrics | grep interval_peak
  gpumem export --listen 0.0.0.0:9837 --token-file /etc/gpumem/token
  gpumem export --otlp http://127.0.0.1:4318";

/// Serves metrics for Prometheus: the memory of GPUs and processes, and peaks and places of recorded programs. Can also push them over OTLP.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ExportArguments {
    /// The address to listen on. One that other machines can reach needs --token-file.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9837")]
    listen: String,
    /// A Unix socket to listen on, instead of --listen. Its owner and its group may use it.
    #[arg(long, value_name = "SOCKET", conflicts_with = "listen")]
    unix: Option<PathBuf>,
    /// A file with the token that scrapers have to send: `Authorization: Bearer TOKEN`.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// A name by which scrapers reach this machine, such as `gpu.monitoring.svc`. It may be given several times. Requests to other names get
    /// no metrics, unless they use an address, `localhost`, this machine's name, or the host given to --listen.
    #[arg(long = "host", value_name = "NAME", conflicts_with = "unix", value_parser = host_name)]
    hosts: Vec<String>,
    /// How many places, scopes, libraries and pools to export by name for each process and GPU. The rest are summed up as `other`.
    #[arg(long, value_name = "NUMBER", default_value_t = 10, value_parser = clap::value_parser!(u8).range(1..=100))]
    places: u8,
    /// An OpenTelemetry collector to push to, over OTLP/HTTP without TLS, such as `http://127.0.0.1:4318`. The variable
    /// `OTEL_EXPORTER_OTLP_ENDPOINT` sets it as well; `OTEL_METRIC_EXPORT_INTERVAL` is the time between two pushes, in milliseconds.
    #[arg(long, value_name = "URL")]
    otlp: Option<String>,
}

pub(super) fn execute(arguments: ExportArguments) -> Result<Exit, Failure> {
    let ExportArguments { listen, unix, token_file, hosts, places, otlp } = arguments;
    let token = token_file.as_deref().map(token).transpose()?;
    let addresses = if unix.is_some() { Vec::new() } else { addresses(&listen, token.is_some())? };
    let otlp = otlp.or_else(|| env::var("OTEL_EXPORTER_OTLP_ENDPOINT").ok().filter(|url| !url.is_empty()));
    match export::serve(Options { listen: (listen, addresses), unix, token, hosts, places: usize::from(places), otlp })? {}
}

/// Accepts a host name as it appears in a `Host` header. Wildcards are rejected: they would let any web page read the metrics.
fn host_name(name: &str) -> Result<String, String> {
    let is_host_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let is_name = !name.is_empty() && name.bytes().all(is_host_byte);
    is_name.then(|| name.to_owned()).ok_or_else(|| "it must be a host name without a port or a wildcard".to_owned())
}

/// Resolves an address or a host name.
fn addresses(listen: &str, has_token: bool) -> Result<Vec<SocketAddr>, Failure> {
    let failed = |why: &dyn Display, next| Failure::new(format!("cannot listen on {listen}"), why, next);
    let found = listen.to_socket_addrs();
    let mut found: Vec<_> = found.map_err(|error| failed(&error, "use another --listen ADDRESS:PORT"))?.collect();
    if !has_token && !found.iter().all(|address| address.ip().is_loopback()) {
        let next = "pass --token-file FILE, or --unix SOCKET";
        return Err(failed(&"other machines can reach it, and there is no token", next));
    }
    // The exporter listens on the first address, so IPv4 comes first. Clients that look up `localhost` try both IPv4
    // and IPv6.
    found.sort_by_key(SocketAddr::is_ipv6);
    Ok(found)
}

fn token(file: &Path) -> Result<String, Failure> {
    let failed = |why: String| {
        let next = "pass a file that contains a token, such as the output of `openssl rand -hex 32`";
        Failure::new(format!("`{}` cannot be used", file.display()), why, next)
    };
    let read = || {
        // The token may come from `<(…)`, which is an unnamed pipe. A named pipe may never get a writer.
        let is_unnamed_pipe =
            fs::read_link(file).is_ok_and(|to| to.as_os_str().as_encoded_bytes().starts_with(b"pipe:"));
        let from = if is_unnamed_pipe { File::open(file)? } else { regular_file::open_to_read(file)? };
        let mut text = String::new();
        from.take(MAX_TOKEN_FILE_LEN + 1).read_to_string(&mut text)?;
        if text.len() as u64 > MAX_TOKEN_FILE_LEN {
            return Err(io::Error::other(format!("it has more than {MAX_TOKEN_FILE_LEN} bytes")));
        }
        Ok(text)
    };
    let text = read().map_err(|error: io::Error| failed(error.to_string()))?;
    let token = text.trim();
    if token.len() < MIN_TOKEN_LEN || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(failed(format!("it must contain one line of at least {MIN_TOKEN_LEN} characters")));
    }
    Ok(token.to_owned())
}

/// The shortest allowed token, in characters. A shorter one can be guessed.
const MIN_TOKEN_LEN: usize = 16;
/// The largest allowed token file, in bytes.
const MAX_TOKEN_FILE_LEN: u64 = 1 << 12;

//! Serves `/metrics`.

use std::{
    collections::VecDeque,
    convert::Infallible,
    fs, io,
    net::{IpAddr, SocketAddr},
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, WWW_AUTHENTICATE},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    sync::Semaphore,
    task::{self, AbortHandle},
    time,
};

use super::{
    exporter::{Exporter, lock},
    followed::Collector,
    host::{Names, without_port},
    metrics::Points,
    prometheus,
};

/// At most this many connections are open at once. To make room for a new one, the oldest connection without a request
/// is closed. If all have sent a request, the new one waits.
const MOST_CONNECTIONS: usize = 64;
/// A connection that has not sent a whole request is closed after this time.
const LONGEST_REQUEST: Duration = Duration::from_secs(10);
/// A connection is closed after this time, even if its client is still reading or writing slowly.
const LONGEST: Duration = Duration::from_secs(60);
/// Names of scrapers are cut to this many characters.
const LONGEST_NAME: usize = 64;

/// The address or the socket that the exporter listens on.
#[derive(Debug)]
pub(super) enum Listener {
    Tcp(std::net::TcpListener),
    Unix(std::os::unix::net::UnixListener),
}

impl Listener {
    pub(super) fn tcp(addresses: &[SocketAddr]) -> io::Result<Self> {
        let listener = std::net::TcpListener::bind(addresses)?;
        listener.set_nonblocking(true)?;
        Ok(Self::Tcp(listener))
    }

    /// Creates a socket that its group may use. A leftover socket on which no process listens is replaced.
    pub(super) fn unix(path: &Path) -> io::Result<Self> {
        let is_socket = fs::symlink_metadata(path).is_ok_and(|known| known.file_type().is_socket());
        if is_socket && std::os::unix::net::UnixStream::connect(path).is_err() {
            fs::remove_file(path)?;
        }
        let listener = std::os::unix::net::UnixListener::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o660))?;
        listener.set_nonblocking(true)?;
        Ok(Self::Unix(listener))
    }

    /// Returns the address as a user may type it. `given` is the address that the user asked for.
    pub(super) fn address(&self, given: &str) -> String {
        match self {
            Self::Tcp(listener) => {
                let at = listener.local_addr().map_or_else(|_| given.to_owned(), |at| at.to_string());
                format!("http://{at}/metrics")
            }
            Self::Unix(_) => format!("/metrics on {given}"),
        }
    }
}

/// The state that all connections share.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) exporter: Arc<Mutex<Exporter>>,
    /// The token that a scraper must send.
    pub(super) token: Option<String>,
    /// The names that the server answers to. `None` on a Unix socket, which web pages cannot reach.
    pub(super) names: Option<Names>,
}

/// Serves until the process ends.
pub(super) fn serve(listener: Listener, server: Server) -> io::Result<Infallible> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    let server = Arc::new(server);
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    runtime.block_on(async {
        let socket = Socket::of(listener)?;
        // Open connections, oldest first, each with a flag for "request received".
        let mut open: VecDeque<(AbortHandle, Arc<AtomicBool>)> = VecDeque::new();
        loop {
            open.retain(|(task, has_request)| !task.is_finished() && !has_request.load(Ordering::Relaxed));
            if places.available_permits() == 0
                && let Some((oldest, _)) = open.pop_front()
            {
                oldest.abort();
            }
            let place = Arc::clone(&places).acquire_owned().await.map_err(io::Error::other)?;
            // There may be too many open files. Open connections end soon.
            let Ok((stream, from)) = socket.accept().await else {
                time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let (server, has_request) = (Arc::clone(&server), Arc::new(AtomicBool::new(false)));
            let has_come = Arc::clone(&has_request);
            let task = tokio::spawn(async move {
                _ = time::timeout(LONGEST, connection(stream, from, server, &has_come)).await;
                drop(place);
            });
            open.push_back((task.abort_handle(), has_request));
            // The task can read its request now, if it has arrived. A connection with a request is not closed to make
            // room for a new one.
            task::yield_now().await;
        }
    })
}

enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

impl Socket {
    fn of(listener: Listener) -> io::Result<Self> {
        match listener {
            Listener::Tcp(listener) => TcpListener::from_std(listener).map(Self::Tcp),
            Listener::Unix(listener) => UnixListener::from_std(listener).map(Self::Unix),
        }
    }

    async fn accept(&self) -> io::Result<(Box<dyn Stream>, Option<IpAddr>)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, from) = listener.accept().await?;
                Ok((Box::new(stream), Some(from.ip())))
            }
            Self::Unix(listener) => Ok((Box::new(listener.accept().await?.0), None)),
        }
    }
}

/// Answers one request.
async fn connection(stream: Box<dyn Stream>, from: Option<IpAddr>, server: Arc<Server>, has_request: &AtomicBool) {
    let collected = Mutex::new(None);
    let answer = service_fn(|request| {
        has_request.store(true, Ordering::Relaxed);
        answer(request, from, &server, &collected)
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(LONGEST_REQUEST);
    // If the connection ended without an error, the answer was written.
    let is_written = http.keep_alive(false).serve_connection(TokioIo::new(stream), answer).await.is_ok();
    let collected = collected.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(collector) = collected.filter(|_| is_written) {
        lock(&server.exporter).confirm(collector);
    }
}

async fn answer(
    request: Request<Incoming>,
    from: Option<IpAddr>,
    server: &Server,
    collected: &Mutex<Option<Collector>>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    if let Some(host) = server.names.as_ref().and_then(|names| names.foreign_host(&request)) {
        // The name comes from the request and may be of any length.
        let name: String = without_port(&host).chars().take(LONGEST_NAME).collect();
        let text = format!("gpumem export does not answer to the name `{name}`: start it with --host {name}");
        return Ok(plain(StatusCode::FORBIDDEN, &text));
    }
    if let Some(token) = &server.token
        && !is_authorised(&request, token)
    {
        let mut rejected = plain(StatusCode::UNAUTHORIZED, "a token is needed: Authorization: Bearer TOKEN");
        rejected.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        return Ok(rejected);
    }
    match (request.uri().path(), request.method()) {
        ("/metrics", &Method::GET) => {}
        // Nothing is collected, so the next scrape still gets all peaks.
        ("/metrics", &Method::HEAD) => return Ok(metrics(Bytes::new())),
        _ => return Ok(plain(StatusCode::NOT_FOUND, "gpumem export: GET /metrics")),
    }
    let (exporter, name) = (Arc::clone(&server.exporter), scraper(request.uri().query(), from));
    // Reading takes time, so another thread does it.
    let made = tokio::task::spawn_blocking(move || {
        let (sample, collector) = lock(&exporter).collect(&name);
        (prometheus::text(&Points::of(&sample)), collector)
    });
    Ok(match made.await {
        Ok((Ok(text), collector)) => {
            *lock(collected) = Some(collector);
            metrics(text.into())
        }
        Ok((Err(error), _)) => plain(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
        Err(error) => plain(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    })
}

fn metrics(text: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(text));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(prometheus::CONTENT_TYPE));
    response
}

fn plain(status: StatusCode, text: &str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(format!("{text}\n")));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

/// Returns whether the request contains `Bearer TOKEN`. The comparison takes the same time wherever the two differ.
fn is_authorised(request: &Request<Incoming>, token: &str) -> bool {
    let given =
        request.headers().get(AUTHORIZATION).and_then(|value| value.as_bytes().split_at_checked(b"Bearer ".len()));
    given.is_some_and(|(scheme, given)| {
        let given = given.trim_ascii_start();
        let differs = given.iter().zip(token.as_bytes()).fold(0, |differs, (a, b)| differs | (a ^ b));
        scheme.eq_ignore_ascii_case(b"Bearer ") && given.len() == token.len() && differs == 0
    })
}

/// Returns the name of the scraper: the one in `?scraper=NAME`, else its address.
fn scraper(query: Option<&str>, from: Option<IpAddr>) -> String {
    let named = query.unwrap_or_default().split('&').find_map(|part| part.strip_prefix("scraper="));
    match (named, from) {
        (Some(name), _) => name.chars().take(LONGEST_NAME).collect(),
        (None, Some(from)) => from.to_string(),
        (None, None) => String::new(),
    }
}

//! Pushes to an OpenTelemetry collector through its SDK.

use std::{
    env,
    fmt::Display,
    future::{self, Future},
    pin::Pin,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use gpumem_metrics::instrument;
use opentelemetry::{KeyValue, metrics::MeterProvider};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{MetricExporter, Protocol, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::{
    Resource,
    metrics::{Instrument, PeriodicReader, SdkMeterProvider, Stream},
};

use super::{
    exporter::{Exporter, lock},
    metrics::{Attributes, METRICS, Points},
};
use crate::{failure::Failure, terminal};

/// The time between two pushes, in milliseconds.
const INTERVAL: &str = "OTEL_METRIC_EXPORT_INTERVAL";
const DEFAULT_INTERVAL: Duration = Duration::from_secs(60);
/// How long the exporter waits for a collector that does not answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// At most this many bytes of an answer are read.
const LONGEST_ANSWER: u64 = 1 << 16;
/// The SDK would push by itself at this interval. The exporter requests each push instead.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3_600);
/// The SDK drops attributes when there are more sets of them than this. The exporter limits them itself.
const MOST_SETS: usize = 1 << 20;
/// The name of the push among collectors. No scraper can have it.
const COLLECTOR: &str = " OTLP";

/// Checks the URL and the interval. The returned function pushes on a separate thread.
pub(super) fn pusher(url: String) -> Result<impl FnOnce(Arc<Mutex<Exporter>>) -> Result<(), Failure>, Failure> {
    let failed = |why: &dyn Display, next: &str| Failure::new(format!("cannot push to `{url}`"), why, next);
    if !url.starts_with("http://") {
        let next = "pass http://localhost:4318 of a collector on this machine, which may push on by TLS";
        return Err(failed(&"it does not start with http://, and there is no TLS", next));
    }
    let interval = match env::var(INTERVAL) {
        Err(_) => DEFAULT_INTERVAL,
        Ok(text) => match text.parse() {
            Ok(millis @ 1..) => Duration::from_millis(millis),
            _ => {
                return Err(failed(
                    &format!("{INTERVAL}={text} is not a number of milliseconds"),
                    "unset or correct it",
                ));
            }
        },
    };
    Ok(move |exporter| push(&url, interval, exporter))
}

fn push(url: &str, interval: Duration, exporter: Arc<Mutex<Exporter>>) -> Result<(), Failure> {
    let failed = |why: &dyn Display| Failure::new(format!("cannot push to `{url}`"), why, "");
    let config = ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(PATIENCE)).build();
    let failure = Arc::new(Mutex::new(None));
    let to = MetricExporter::builder()
        .with_http()
        .with_http_client(Client { agent: config.into(), failed: Arc::clone(&failure) })
        .with_protocol(Protocol::HttpBinary)
        .with_timeout(PATIENCE)
        .with_endpoint(format!("{}/v1/metrics", url.trim_end_matches('/').trim_end_matches("/v1/metrics")));
    let to = to.build().map_err(|error| failed(&error))?;
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let of_machine =
        Resource::builder().with_service_name("gpumem-export").with_attribute(KeyValue::new("host.name", host));
    let provider = SdkMeterProvider::builder()
        .with_reader(PeriodicReader::builder(to).with_interval(NEVER).build())
        .with_resource(of_machine.build())
        .with_view(|_: &Instrument| Stream::builder().with_cardinality_limit(MOST_SETS).build().ok())
        .build();
    let points = Arc::new(Mutex::new(Points::default()));
    let meter = provider.meter("gpumem");
    for metric in METRICS {
        let points = Arc::clone(&points);
        let values = move || -> Vec<_> {
            lock(&points).of_metric(metric).map(|(attributes, value)| (value, key_values(attributes))).collect()
        };
        instrument(&meter, metric, values);
    }
    let url = url.to_owned();
    let work = move || {
        let mut has_failed = false;
        loop {
            let (sample, collector) = lock(&exporter).collect(COLLECTOR);
            *lock(&points) = Points::of(&sample);
            match provider.force_flush() {
                Ok(()) => {
                    lock(&exporter).confirm(collector);
                    has_failed = false;
                }
                // The error is printed once until pushing works again, because a collector may be away for a day.
                Err(error) if !std::mem::replace(&mut has_failed, true) => {
                    let next = "start a collector there, or correct the URL; peaks are pushed again";
                    let why = lock(&failure).take().unwrap_or_else(|| error.to_string());
                    terminal::error(&Failure::new(format!("metrics cannot be pushed to `{url}`"), why, next));
                }
                Err(_) => {}
            }
            thread::sleep(interval);
        }
    };
    thread::Builder::new().name("gpumem-otlp".to_owned()).spawn(work).map_err(|error| failed(&error))?;
    Ok(())
}

fn key_values(attributes: &Attributes) -> Vec<KeyValue> {
    attributes.iter().map(|(name, value)| KeyValue::new(*name, value.clone())).collect()
}

/// Sends requests.
#[derive(Debug)]
struct Client {
    agent: ureq::Agent,
    /// Why the last request failed. The SDK does not report the reason.
    failed: Arc<Mutex<Option<String>>>,
}

impl HttpClient for Client {
    fn send_bytes<'me, 'future>(
        &'me self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'future>>
    where
        'me: 'future,
        Self: 'future,
    {
        // The thread may block here, because it has nothing else to do.
        let send = || -> Result<_, HttpError> {
            let (head, mut body) = self.agent.run(request.map(|body| body.to_vec()))?.into_parts();
            let body = body.with_config().limit(LONGEST_ANSWER).read_to_vec()?;
            Ok(Response::from_parts(head, body.into()))
        };
        let answer = send();
        *lock(&self.failed) = match &answer {
            Ok(answer) if answer.status().is_success() => None,
            Ok(answer) => Some(format!("the answer was {}", answer.status())),
            Err(error) => Some(error.to_string()),
        };
        Box::pin(future::ready(answer))
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn the_cause_of_a_failed_push_is_known() {
        let failed = Arc::new(Mutex::new(None));
        let client = Client { agent: ureq::Agent::new_with_defaults(), failed: Arc::clone(&failed) };
        // No process listens at this address any more.
        let at = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let request = Request::post(format!("http://{at}/v1/metrics")).body(Bytes::new()).unwrap();
        drop(client.send_bytes(request));
        let why = lock(&failed).take().expect("it has failed");
        assert!(why.contains("refused"), "{why}");
    }
}

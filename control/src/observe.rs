//! What the outside sees of the agent: metrics, health, logging.
//!
//! Counters are read where they stand, in the workers' own blocks, at each scrape; the control
//! loop leaves the rest in [`Shared`] after each round. Reading slows no worker.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use skein_dataplane::stats::{Counter, WorkerStats};
use skein_dataplane::verdict::DropReason;

use crate::config::{LogFormat, LogLevel};

/// A control loop that has not come round for this long is stuck.
const STUCK: Duration = Duration::from_secs(30);

/// A worker's counters, as the group hands them out.
pub trait Counters: Send + Sync {
    /// The block.
    fn stats(&self) -> &WorkerStats;
}

impl<T: std::ops::Deref<Target = WorkerStats> + Send + Sync> Counters for Arc<T> {
    fn stats(&self) -> &WorkerStats {
        self
    }
}

/// What the control loop leaves for readers.
#[derive(Clone, Debug)]
pub struct Facts {
    /// What keeps the node from being ready; empty: it is.
    pub not_ready: Vec<String>,
    /// When the control loop came round last.
    pub beat: Instant,
    /// Gauges by name, with their help.
    pub gauges: BTreeMap<&'static str, (&'static str, i64)>,
}

/// What readers and the control loop share.
pub struct Shared {
    facts: Mutex<Facts>,
    workers: Vec<Box<dyn Counters>>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("workers", &self.workers.len())
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// For these workers; not ready yet.
    #[must_use]
    pub fn new(workers: Vec<Box<dyn Counters>>) -> Arc<Self> {
        Arc::new(Self {
            facts: Mutex::new(Facts {
                not_ready: vec!["starting".into()],
                beat: Instant::now(),
                gauges: BTreeMap::new(),
            }),
            workers,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Facts> {
        // Facts are replaced whole: a panic elsewhere leaves none half-written.
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves new facts.
    pub fn set(&self, facts: Facts) {
        *self.lock() = facts;
    }

    /// The workers' counters, in order.
    pub fn workers(&self) -> impl Iterator<Item = &WorkerStats> {
        self.workers.iter().map(|worker| worker.stats())
    }

    /// Drops for a reason, over all workers.
    #[must_use]
    pub fn drops(&self, reason: DropReason) -> u64 {
        self.workers()
            .map(|stats| stats.drops(reason).value())
            .sum()
    }

    /// The page of `/metrics`.
    #[must_use]
    pub fn metrics(self: &Arc<Self>) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Scrape(self.clone())));
        let mut page = String::new();
        // Writing into a string does not fail.
        let _ = text::encode(&mut page, &registry);
        page
    }
}

#[derive(Debug)]
struct Scrape(Arc<Shared>);

type Field = fn(&WorkerStats) -> &Counter;

/// Counters of each worker: name, help, field.
const COUNTERS: &[(&str, &str, Field)] = &[
    ("skein_rx_packets", "Packets received", |s| &s.rx_packets),
    ("skein_rx_bytes", "Bytes received", |s| &s.rx_bytes),
    ("skein_tx_packets", "Packets sent", |s| &s.tx_packets),
    ("skein_tx_bytes", "Bytes sent", |s| &s.tx_bytes),
    (
        "skein_answered_packets",
        "Packets answered by the datapath itself",
        |s| &s.answered,
    ),
    (
        "skein_icmp_errors",
        "ICMP errors sent to pods about their packets",
        |s| &s.icmp_errors,
    ),
    (
        "skein_icmp_errors_limited",
        "ICMP errors that the rate limit kept back",
        |s| &s.icmp_errors_limited,
    ),
    (
        "skein_fragments",
        "Fragments cut from packets too large for their path",
        |s| &s.fragments,
    ),
    ("skein_flow_hits", "Packets whose flow was known", |s| {
        &s.flow_hits
    }),
    (
        "skein_flow_misses",
        "Packets whose flow was not known",
        |s| &s.flow_misses,
    ),
    ("skein_flow_stale", "Known flows decided anew", |s| {
        &s.flow_stale
    }),
    (
        "skein_flow_evictions",
        "Flows that gave way to others",
        |s| &s.flow_evictions,
    ),
    (
        "skein_handover_packets",
        "Packets handed to another worker",
        |s| &s.handovers,
    ),
    (
        "skein_worker_busy_rounds",
        "Rounds of the loop that found work",
        |s| &s.busy_rounds,
    ),
    (
        "skein_worker_sleeps",
        "Times that the worker went to sleep",
        |s| &s.sleeps,
    ),
];

/// Gauges of each worker.
const GAUGES: &[(&str, &str, Field)] = &[
    (
        "skein_worker_free_frames",
        "Free frames on the worker's own stack",
        |s| &s.free_frames,
    ),
    ("skein_flows", "Flows in the worker's table", |s| &s.flows),
];

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (name, help, field) in COUNTERS {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (number, stats) in self.0.workers().enumerate() {
                let labels = [("worker", number.to_string())];
                ConstCounter::new(field(stats).value()).encode(family.encode_family(&labels)?)?;
            }
        }
        for (name, help, field) in GAUGES {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (number, stats) in self.0.workers().enumerate() {
                let labels = [("worker", number.to_string())];
                let value = i64::try_from(field(stats).value()).unwrap_or(i64::MAX);
                ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
            }
        }
        let help = "Packets dropped, by reason";
        let mut family =
            encoder.encode_descriptor("skein_drops", help, None, MetricType::Counter)?;
        for &reason in DropReason::ALL {
            let labels = [("reason", reason.name())];
            ConstCounter::new(self.0.drops(reason)).encode(family.encode_family(&labels)?)?;
        }
        let facts = self.0.lock().clone();
        let ready = i64::from(facts.not_ready.is_empty());
        let own = [("skein_ready", ("Whether a pod can be added now", ready))];
        for (name, (help, value)) in own.into_iter().chain(facts.gauges) {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(value).encode(metric)?;
        }
        Ok(())
    }
}

/// Opens the address of metrics and health.
pub async fn listen(address: SocketAddr) -> Result<tokio::net::TcpListener, String> {
    tokio::net::TcpListener::bind(address)
        .await
        .map_err(|error| format!("metrics address {address}: {error}; see api.metrics"))
}

/// Serves `/metrics`, `/healthz` and `/readyz` until cancelled.
pub async fn serve(listener: tokio::net::TcpListener, shared: Arc<Shared>) {
    let routes = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(health))
        .route("/readyz", get(ready))
        .with_state(shared);
    if let Err(error) = axum::serve(listener, routes).await {
        tracing::error!(%error, "metrics and health are not served any more");
    }
}

async fn metrics(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], shared.metrics())
}

async fn health(State(shared): State<Arc<Shared>>) -> (StatusCode, String) {
    let since = shared.lock().beat.elapsed();
    if since > STUCK {
        let text = format!(
            "the control loop has not come round for {} s\n",
            since.as_secs()
        );
        return (StatusCode::SERVICE_UNAVAILABLE, text);
    }
    (StatusCode::OK, "ok\n".into())
}

async fn ready(State(shared): State<Arc<Shared>>) -> (StatusCode, String) {
    let reasons = shared.lock().not_ready.clone();
    if reasons.is_empty() {
        return (StatusCode::OK, "ok\n".into());
    }
    (StatusCode::SERVICE_UNAVAILABLE, reasons.join("\n") + "\n")
}

/// Starts logging, to standard error.
pub fn log(format: LogFormat, level: LogLevel) {
    // Ours at the level asked for; others' (netlink, HTTP) only what went wrong.
    let own = level.word();
    let filter = format!("warn,skein_control={own},skein_dataplane={own},skeind={own}");
    let builder = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(filter))
        .with_writer(std::io::stderr);
    let started = match format {
        LogFormat::Text => builder.with_target(false).with_ansi(false).try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
    if let Err(error) = started {
        eprintln!("skeind: logging was started before: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn get(address: SocketAddr, path: &str) -> String {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).await.unwrap();
        page
    }

    #[tokio::test]
    async fn pages_say_what_is() {
        let stats = Arc::new(WorkerStats::new());
        stats.rx_packets.add(7);
        stats.drops(DropReason::NoRoute).add(3);
        let shared = Shared::new(vec![Box::new(stats)]);
        // A port of loopback that the kernel chooses, for this test alone.
        let listener = listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(serve(listener, shared.clone()));

        let page = get(address, "/metrics").await;
        assert!(
            page.contains("skein_rx_packets_total{worker=\"0\"} 7"),
            "{page}"
        );
        assert!(
            page.contains("skein_drops_total{reason=\"no_route\"} 3"),
            "{page}"
        );
        assert!(page.contains("skein_ready 0"), "{page}");
        assert!(page.trim_end().ends_with("# EOF"), "{page}");
        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        let page = get(address, "/readyz").await;
        assert!(
            page.starts_with("HTTP/1.1 503") && page.contains("starting"),
            "{page}"
        );

        shared.set(Facts {
            not_ready: vec![],
            beat: Instant::now() - STUCK - Duration::from_secs(1),
            gauges: [("skein_endpoints", ("Endpoints", 2))].into(),
        });
        assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 200"));
        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 503"));
        assert!(get(address, "/metrics").await.contains("skein_endpoints 2"));
        assert!(get(address, "/nothing").await.starts_with("HTTP/1.1 404"));
        server.abort();
    }
}

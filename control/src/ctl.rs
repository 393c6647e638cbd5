//! `skeinctl`: asks the agent for a view and prints it.
//!
//! A view is a document; as JSON and YAML it is printed as it came, as a table for people.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde_json::Value;
use skein_cni::agent::{CallError, Client, Reply, Request};

use crate::connections::{self, ConnectionsView};
use crate::flows::{self, FlowsView};
use crate::views;

/// How long the agent may take.
const DEADLINE: Duration = Duration::from_secs(30);

/// How often `status --wait` asks.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// How a view is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// For people.
    Table,
    /// As it came.
    Json,
    /// As it came.
    Yaml,
}

/// A view that the agent has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// The node at a glance.
    Status,
    /// Interfaces of pods on this node.
    Endpoints,
    /// What each address is known as.
    Ipcache,
    /// Sets of labels and their numbers.
    Identities,
    /// What network policies let pods do.
    Policies,
    /// Where Services are reached and served.
    Services,
    /// Why packets were dropped.
    Drops,
    /// The threads that move packets.
    Workers,
    /// The configuration in force.
    Config,
    /// Connections.
    Conntrack,
    /// What became of flows.
    Flows,
    /// What would become of a packet.
    Trace,
    /// The page of `/metrics`.
    Metrics,
}

impl View {
    /// The name by which the agent knows it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Status => "status",
            Self::Endpoints => "endpoints",
            Self::Ipcache => "ipcache",
            Self::Identities => "identities",
            Self::Policies => "policies",
            Self::Services => "services",
            Self::Drops => "drops",
            Self::Workers => "workers",
            Self::Config => "config",
            Self::Conntrack => "conntrack",
            Self::Flows => "flows",
            Self::Trace => "trace",
            Self::Metrics => "metrics",
        }
    }
}

/// Why there is nothing to print.
#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    /// The agent did not answer.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The agent refused.
    #[error("the agent refused: {0}")]
    Refused(skein_cni::agent::AgentError),
    /// The agent answered something else.
    #[error("the agent's answer is none to this question: {0}; are both of one version?")]
    Unexpected(String),
}

/// Asks for a view.
pub fn ask(socket: &Path, view: View) -> Result<Value, CtlError> {
    let name = view.name().to_owned();
    call(socket, &Request::View { name })
}

/// Asks for a view that takes arguments.
pub fn ask_with(
    socket: &Path,
    view: View,
    arguments: BTreeMap<String, String>,
) -> Result<Value, CtlError> {
    let name = view.name().to_owned();
    call(socket, &Request::Ask { name, arguments })
}

fn call(socket: &Path, request: &Request) -> Result<Value, CtlError> {
    let reply = Client::connect(socket, DEADLINE)?.call(request)?;
    match reply {
        Reply::View { document } => Ok(document),
        Reply::Error(error) => Err(CtlError::Refused(error)),
        other => Err(CtlError::Unexpected(format!("{other:?}"))),
    }
}

/// Asks for the status until the node is healthy, or that long; the last answer.
pub fn wait_healthy(socket: &Path, limit: Duration) -> Result<Value, CtlError> {
    let start = Instant::now();
    loop {
        let answer = ask(socket, View::Status);
        let healthy = matches!(&answer, Ok(status) if is_healthy(status));
        if healthy || start.elapsed() >= limit {
            return answer;
        }
        std::thread::sleep(ASK_EVERY);
    }
}

/// Whether a status says that everything is well.
#[must_use]
pub fn is_healthy(status: &Value) -> bool {
    status["healthy"] == Value::Bool(true)
}

/// Prints a view.
pub fn render(view: View, document: &Value, output: Output) -> Result<String, CtlError> {
    let unexpected = |error: String| CtlError::Unexpected(error);
    match output {
        Output::Json => serde_json::to_string_pretty(document)
            .map(|text| text + "\n")
            .map_err(|error| unexpected(error.to_string())),
        Output::Yaml => {
            serde_saphyr::to_string(document).map_err(|error| unexpected(error.to_string()))
        }
        Output::Table => table(view, document),
    }
}

fn read<T: DeserializeOwned>(document: &Value) -> Result<T, CtlError> {
    T::deserialize(document).map_err(|error| CtlError::Unexpected(error.to_string()))
}

fn table(view: View, document: &Value) -> Result<String, CtlError> {
    Ok(match view {
        View::Status => status(&read(document)?),
        View::Endpoints => endpoints(&read(document)?),
        View::Ipcache => ipcache(&read(document)?),
        View::Identities => identities(&read(document)?),
        View::Policies => policies(&read(document)?),
        View::Services => services(&read(document)?),
        View::Drops => drops(&read(document)?),
        View::Workers => workers(&read(document)?),
        View::Config => config(document),
        View::Conntrack => conntrack(&read(document)?),
        View::Flows => flows(&read(document)?),
        View::Trace => trace(&read(document)?),
        View::Metrics => read::<views::Metrics>(document)?.text,
    })
}

fn trace(view: &views::TraceView) -> String {
    let rows: Vec<_> = (view.stages.iter())
        .map(|stage| vec![stage.stage.clone(), stage.decision.clone()])
        .collect();
    let verdict = match view.reason.as_str() {
        "" => "FORWARDED".to_owned(),
        reason => format!("DROPPED {reason}: {}", view.explanation),
    };
    let stages = columns(&["STAGE", "DECISION"], &rows);
    format!("{} -> {}\n{stages}{verdict}\n", view.from, view.to)
}

fn flows(view: &FlowsView) -> String {
    let lines = view.flows.iter().map(flows::line);
    lines.map(|line| line + "\n").collect()
}

fn conntrack(view: &ConnectionsView) -> String {
    let head = [
        "PROTOCOL",
        "STATE",
        "FROM",
        "TO",
        "ANSWERS FROM",
        "ANSWERS TO",
        "IDLE",
        "LEFT",
    ];
    let (rows, sum) = connections::lines(view);
    format!("{}{sum}\n", columns(&head, &rows))
}

/// Columns as wide as they must be.
fn columns(head: &[&str], rows: &[Vec<String>]) -> String {
    let widths: Vec<usize> = (0..head.len())
        .map(|column| {
            let cells = rows.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or(0).max(head[column].len())
        })
        .collect();
    let mut text = String::new();
    let head: Vec<String> = head.iter().map(|cell| (*cell).to_owned()).collect();
    for row in std::iter::once(&head).chain(rows) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            // Writing into a string does not fail.
            let _ = write!(line, "{cell:width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn or_dash(text: &str) -> String {
    if text.is_empty() {
        "-".into()
    } else {
        text.into()
    }
}

fn join<T: ToString>(items: &[T]) -> String {
    let items: Vec<_> = items.iter().map(ToString::to_string).collect();
    or_dash(&items.join(","))
}

fn status(status: &views::Status) -> String {
    let health = match (status.healthy, status.ready) {
        (true, _) => "healthy",
        (false, true) => "ready, with faults",
        (false, false) => "not ready",
    };
    let mut rows = vec![
        vec!["Node".to_owned(), status.node.clone()],
        vec!["Health".into(), health.into()],
        vec!["Version".into(), status.version.clone()],
        vec!["Uptime".into(), format!("{} s", status.uptime_seconds)],
        vec![
            "Source".into(),
            format!(
                "{}{}",
                status.source,
                if status.synced { "" } else { ", not read yet" }
            ),
        ],
        vec![
            "Tables".into(),
            format!(
                "{}, workers have {}",
                status.generation, status.acknowledged
            ),
        ],
        vec!["Kernel".into(), status.features.clone()],
        vec!["Workers".into(), status.workers.to_string()],
        vec!["Endpoints".into(), status.endpoints.to_string()],
    ];
    for (family, usage) in &status.addresses {
        let used = format!("{} of {} {family}", usage.used, usage.total);
        rows.push(vec!["Addresses".into(), used]);
    }
    let frames = format!(
        "{} of {} in the store",
        status.frames.free, status.frames.total
    );
    rows.push(vec!["Frames".into(), frames]);
    for uplink in &status.uplinks {
        let mut text = format!(
            "{}: {}, {} queues, MTU {}",
            uplink.name, uplink.mode, uplink.queues, uplink.mtu
        );
        if !uplink.fallback.is_empty() {
            let _ = write!(text, " (not native: {})", uplink.fallback);
        }
        rows.push(vec!["Uplink".into(), text]);
    }
    for peer in &status.peers {
        let address = peer.address.map_or_else(|| "-".into(), |ip| ip.to_string());
        let way = if peer.reachable {
            format!("by {}, MTU {}", peer.uplink, peer.mtu)
        } else {
            format!("unreachable: {}", peer.reason)
        };
        rows.push(vec![
            "Peer".into(),
            format!("{} {address}: {way}", peer.node),
        ]);
    }
    let lists = [
        ("Not ready", &status.not_ready),
        ("Fault", &status.faults),
        ("Note", &status.notes),
    ];
    for (name, faults) in lists {
        rows.extend(
            faults
                .iter()
                .map(|fault| vec![name.to_owned(), fault.clone()]),
        );
    }
    // No head: the first column names each line.
    let text = columns(&["", ""], &rows);
    text.split_once('\n')
        .map_or_else(String::new, |(_, rest)| rest.to_owned())
}

fn endpoints(view: &views::EndpointsView) -> String {
    let rows: Vec<_> = (view.endpoints.iter())
        .map(|endpoint| {
            let pod = match endpoint.pod.as_str() {
                "" => "-".to_owned(),
                pod => format!("{}/{pod}", endpoint.namespace),
            };
            vec![
                pod,
                endpoint.container_id.chars().take(12).collect(),
                endpoint.ifname.clone(),
                endpoint.state.clone(),
                endpoint.identity.to_string(),
                join(&endpoint.ips),
                endpoint.host_ifname.clone(),
                endpoint
                    .worker
                    .map_or_else(|| "-".into(), |worker| worker.to_string()),
                or_dash(&endpoint.mode),
                endpoint.rx_packets.to_string(),
                endpoint.tx_packets.to_string(),
            ]
        })
        .collect();
    let head = [
        "POD",
        "CONTAINER",
        "INTERFACE",
        "STATE",
        "IDENTITY",
        "ADDRESSES",
        "DEVICE",
        "WORKER",
        "XDP",
        "FROM POD",
        "TO POD",
    ];
    columns(&head, &rows)
}

fn ipcache(view: &views::Ipcache) -> String {
    let rows: Vec<_> = (view.entries.iter())
        .map(|entry| {
            let identity = match entry.kind.as_str() {
                "range" => "-".to_owned(),
                _ => entry.identity.to_string(),
            };
            vec![
                entry.prefix.clone(),
                entry.kind.clone(),
                identity,
                or_dash(&entry.node),
                entry.tunnel.map_or_else(|| "-".into(), |ip| ip.to_string()),
            ]
        })
        .collect();
    columns(&["PREFIX", "KIND", "IDENTITY", "NODE", "TUNNEL"], &rows)
}

fn identities(view: &views::Identities) -> String {
    let rows: Vec<_> = (view.identities.iter())
        .map(|identity| {
            let labels = (identity.labels.iter()).map(|(name, value)| format!("{name}={value}"));
            let labels: Vec<_> = labels.collect();
            let meaning = if identity.name.is_empty() {
                labels.join(",")
            } else {
                identity.name.clone()
            };
            vec![
                identity.identity.to_string(),
                identity.pods.to_string(),
                meaning,
            ]
        })
        .collect();
    columns(&["IDENTITY", "PODS", "LABELS"], &rows)
}

fn policies(view: &views::Policies) -> String {
    let mut rows = Vec::new();
    for pod in &view.pods {
        for (direction, applied) in [("ingress", &pod.ingress), ("egress", &pod.egress)] {
            let mut row = |policy: &str, allows: &str| {
                let name = format!("{}/{}", pod.namespace, pod.pod);
                rows.push(vec![name, direction.into(), policy.into(), allows.into()]);
            };
            if applied.is_empty() {
                row("-", "everything, since no policy applies");
            }
            for policy in applied {
                if policy.allows.is_empty() {
                    row(&policy.policy, "nothing");
                }
                for allows in &policy.allows {
                    row(&policy.policy, allows);
                }
            }
        }
    }
    let mut text = columns(&["POD", "DIRECTION", "POLICY", "ALLOWS"], &rows);
    for note in &view.notes {
        // Writing into a string does not fail.
        let _ = writeln!(text, "Note: policy {} {}", note.policy, note.note);
    }
    text
}

/// A line for each backend, and one for a port or a Service without any.
fn services(view: &views::ServicesView) -> String {
    let mut rows = Vec::new();
    for service in &view.services {
        let name = format!("{}/{}", service.namespace, service.name);
        let port = match service.port_name.as_str() {
            "" => service.protocol.clone(),
            port => format!("{port} {}", service.protocol),
        };
        let frontends: Vec<String> = (service.frontends.iter())
            .map(|frontend| match frontend.address {
                Some(address) => std::net::SocketAddr::new(address, frontend.port).to_string(),
                None => format!("node:{}", frontend.port),
            })
            .collect();
        let head = [name, or_dash(&port), join(&frontends)];
        let row = |tail: [String; 3]| head.iter().cloned().chain(tail).collect::<Vec<_>>();
        if service.backends.is_empty() {
            let why = match service.not_served.as_str() {
                "" => "it has no endpoints",
                why => why,
            };
            rows.push(row(["-".into(), "-".into(), why.into()]));
        }
        for backend in &service.backends {
            let at = std::net::SocketAddr::new(backend.address, backend.port).to_string();
            let at = match backend.pod.as_str() {
                "" => at,
                pod => format!("{at} ({pod})"),
            };
            rows.push(row([at, backend.state.clone(), or_dash(&backend.reason)]));
        }
    }
    columns(
        &[
            "SERVICE",
            "PORT",
            "REACHED AT",
            "BACKEND",
            "STATE",
            "NOT SELECTED BECAUSE",
        ],
        &rows,
    )
}

fn drops(view: &views::Drops) -> String {
    let happened = view.drops.iter().filter(|drop| drop.count > 0);
    let rows: Vec<_> = happened
        .map(|drop| {
            vec![
                drop.reason.clone(),
                drop.count.to_string(),
                drop.explanation.clone(),
            ]
        })
        .collect();
    columns(&["REASON", "PACKETS", "MEANING"], &rows)
}

fn workers(view: &views::Workers) -> String {
    let rows: Vec<_> = (view.workers.iter())
        .map(|worker| {
            [
                worker.worker as u64,
                worker.cpu as u64,
                worker.links as u64,
                worker.rx_packets,
                worker.tx_packets,
                worker.answered,
                worker.drops,
                worker.flows,
                worker.flow_hits,
                worker.flow_misses,
                worker.handovers,
                worker.sleeps,
            ]
            .iter()
            .map(u64::to_string)
            .collect()
        })
        .collect();
    let head = [
        "WORKER",
        "CPU",
        "LINKS",
        "RECEIVED",
        "SENT",
        "ANSWERED",
        "DROPPED",
        "FLOWS",
        "HITS",
        "MISSES",
        "HANDED OVER",
        "SLEEPS",
    ];
    columns(&head, &rows)
}

fn config(document: &Value) -> String {
    let mut rows = Vec::new();
    let sections = document.as_object().into_iter().flatten();
    for (section, keys) in sections {
        for (key, value) in keys.as_object().into_iter().flatten() {
            rows.push(vec![format!("{section}.{key}"), value.to_string()]);
        }
    }
    columns(&["KEY", "VALUE"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value<T: serde::Serialize>(view: &T) -> Value {
        serde_json::to_value(view).unwrap()
    }

    #[test]
    fn services_are_a_line_for_each_backend() {
        let web = views::ServiceView {
            namespace: "shop".into(),
            name: "web".into(),
            id: 1,
            protocol: "TCP".into(),
            frontends: vec![
                views::FrontendView {
                    kind: "cluster_ip".into(),
                    address: Some("fd96::1".parse().unwrap()),
                    port: 80,
                },
                views::FrontendView {
                    kind: "node_port".into(),
                    address: None,
                    port: 30080,
                },
            ],
            backends: vec![views::BackendView {
                address: "fd00::2".parse().unwrap(),
                port: 8080,
                pod: "shop/web0".into(),
                node: "n2".into(),
                zone: String::new(),
                local: false,
                state: "not ready".into(),
                selected: false,
                selected_local: false,
                reason: "it is not ready".into(),
            }],
            ..views::ServiceView::default()
        };
        let none = views::ServiceView {
            not_served: "it is headless".into(),
            backends: vec![],
            frontends: vec![],
            protocol: String::new(),
            name: "db".into(),
            ..web.clone()
        };
        let view = value(&views::ServicesView {
            services: vec![web, none],
        });
        let text = render(View::Services, &view, Output::Table).unwrap();
        let expected = "\
SERVICE   PORT  REACHED AT               BACKEND                     STATE      NOT SELECTED BECAUSE
shop/web  TCP   [fd96::1]:80,node:30080  [fd00::2]:8080 (shop/web0)  not ready  it is not ready
shop/db   -     -                        -                           -          it is headless
";
        assert_eq!(text, expected);
    }

    #[test]
    fn tables_are_for_people() {
        let view = value(&views::EndpointsView {
            endpoints: vec![views::EndpointView {
                container_id: "0123456789abcdef".into(),
                ifname: "eth0".into(),
                namespace: "shop".into(),
                pod: "web".into(),
                state: "ready".into(),
                identity: 4711,
                ips: vec!["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()],
                host_ifname: "sk0".into(),
                worker: Some(1),
                mode: "generic".into(),
                rx_packets: 5,
                ..views::EndpointView::default()
            }],
        });
        let text = render(View::Endpoints, &view, Output::Table).unwrap();
        let expected = "\
POD       CONTAINER     INTERFACE  STATE  IDENTITY  ADDRESSES         DEVICE  WORKER  XDP      FROM POD  TO POD
shop/web  0123456789ab  eth0       ready  4711      10.1.0.2,fd00::2  sk0     1       generic  5         0
";
        assert_eq!(text, expected);

        let view = value(&views::Drops {
            drops: vec![
                views::DropView {
                    reason: "no_route".into(),
                    count: 2,
                    explanation: "None.".into(),
                },
                views::DropView {
                    reason: "too_big".into(),
                    ..views::DropView::default()
                },
            ],
        });
        let text = render(View::Drops, &view, Output::Table).unwrap();
        assert_eq!(
            text,
            "REASON    PACKETS  MEANING\nno_route  2        None.\n"
        );
    }

    #[test]
    fn policies_are_told_in_words() {
        let applied = |policy: &str, allows: &[&str]| views::AppliedPolicy {
            policy: policy.into(),
            allows: allows.iter().map(|&text| text.to_owned()).collect(),
        };
        let view = value(&views::Policies {
            pods: vec![views::PodPolicies {
                namespace: "shop".into(),
                pod: "web".into(),
                ingress: vec![
                    applied("shop/deny", &[]),
                    applied("shop/web", &["TCP 80 from anyone"]),
                ],
                egress: Vec::new(),
            }],
            notes: vec![views::PolicyNote {
                policy: "shop/old".into(),
                note: "selects no pod".into(),
            }],
        });
        let text = render(View::Policies, &view, Output::Table).unwrap();
        let expected = "\
POD       DIRECTION  POLICY     ALLOWS
shop/web  ingress    shop/deny  nothing
shop/web  ingress    shop/web   TCP 80 from anyone
shop/web  egress     -          everything, since no policy applies
Note: policy shop/old selects no pod
";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_status_says_what_is_wrong() {
        let mut view = views::Status {
            node: "n1".into(),
            ready: true,
            faults: vec!["x.yaml:3: bad".into()],
            ..views::Status::default()
        };
        let text = render(View::Status, &value(&view), Output::Table).unwrap();
        assert!(text.starts_with("Node       n1\n"), "{text}");
        assert!(text.contains("Health     ready, with faults\n"), "{text}");
        assert!(text.contains("Fault      x.yaml:3: bad\n"), "{text}");
        assert!(!is_healthy(&value(&view)));
        view.healthy = true;
        assert!(is_healthy(&value(&view)));
    }

    #[test]
    fn documents_are_printed_as_they_came() {
        let view = value(&views::Metrics {
            text: "a 1\nb \"2\"\n".into(),
        });
        let json = render(View::Metrics, &view, Output::Json).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), view);
        let yaml = render(View::Metrics, &view, Output::Yaml).unwrap();
        assert_eq!(serde_saphyr::from_str::<Value>(&yaml).unwrap(), view);
        let table = render(View::Metrics, &view, Output::Table).unwrap();
        assert_eq!(table, "a 1\nb \"2\"\n");
        assert!(render(View::Workers, &view, Output::Table).is_err());
    }
}

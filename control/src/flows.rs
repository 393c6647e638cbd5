//! `skeinctl flows`: what workers tell of flows, with the names that people know them by.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use skein_dataplane::conntrack::Direction;
use skein_dataplane::events::FlowEvent;
use skein_dataplane::ids::IdentityId;
use skein_dataplane::parse::TcpFlags;
use skein_dataplane::snapshot::Snapshot;
use skein_dataplane::verdict::DropReason;
use skein_dataplane::wire::{ipv6, protocol};

use crate::connections::protocol_name;
use crate::state::{ClusterState, PodKey};

/// Events that are kept for whoever asks later.
const KEPT: usize = 16_384;

/// Flow events, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FlowsView {
    /// The number of the next event: `since` of the next question.
    pub next: u64,
    /// Events that workers had no room for, since the start.
    pub lost: u64,
    /// The events.
    pub flows: Vec<FlowView>,
}

/// What became of a flow's packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowView {
    /// Counts up; a gap is events that nobody asked for in time.
    pub number: u64,
    /// When, RFC 3339 in UTC with milliseconds.
    pub time: String,
    /// Who sent it.
    pub source: EndView,
    /// For whom it is: behind a Service, the backend.
    pub destination: EndView,
    /// The address and port of a Service that it was sent to; empty where it is the destination.
    pub service: String,
    /// `tcp`, `udp`, `sctp`, `icmp`, `icmpv6`, or the IP protocol's number.
    pub protocol: String,
    /// Whether it is an answer of its connection.
    pub reply: bool,
    /// Where it was decided: `classify`, `conntrack`, `service`, `policy-egress`,
    /// `policy-ingress`, `route`; of what goes on, where to: `to-endpoint`, `to-host`,
    /// `to-overlay`, `to-world`.
    pub stage: String,
    /// `forwarded` or `dropped`.
    pub verdict: String,
    /// Why it was dropped: a name of `skeinctl drops`.
    pub reason: String,
    /// Flags of TCP, type and code of ICMP, bytes.
    pub summary: String,
}

/// One end of a flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndView {
    /// The pod's namespace; empty where it is no pod that is known.
    pub namespace: String,
    /// The pod.
    pub pod: String,
    /// Its identity: `host`, `world-ipv4`, a number.
    pub identity: String,
    /// Its address.
    pub address: IpAddr,
    /// Its port, or the identifier of an echo.
    pub port: u16,
}

impl EndView {
    fn name(&self, port: bool) -> String {
        let who = if self.pod.is_empty() {
            match self.address {
                IpAddr::V6(v6) if port => format!("[{v6}]"),
                address => address.to_string(),
            }
        } else {
            format!("{}/{}", self.namespace, self.pod)
        };
        let port = if port && self.port != 0 {
            format!(":{}", self.port)
        } else {
            String::new()
        };
        format!("{who}{port} ({})", self.identity)
    }

    fn is(&self, pod: &str) -> bool {
        let (namespace, name) = pod.split_once('/').unwrap_or(("default", pod));
        self.namespace == namespace && self.pod == name
    }
}

/// One line for people.
#[must_use]
pub fn line(flow: &FlowView) -> String {
    let service = match flow.service.as_str() {
        "" => String::new(),
        service => format!(" by {service}"),
    };
    let verdict = match flow.reason.as_str() {
        "" => "FORWARDED".to_owned(),
        reason => format!("DROPPED {reason}"),
    };
    format!(
        "{} {} -> {}{service} {} {verdict} ({} {})",
        flow.time,
        flow.source.name(false),
        flow.destination.name(true),
        flow.stage,
        flow.protocol.to_uppercase(),
        flow.summary
    )
}

/// Which events are asked for: those that agree with all that is set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Question {
    /// Only from this number on.
    pub since: u64,
    /// At most so many, the newest.
    pub last: Option<usize>,
    pod: Option<String>,
    from_pod: Option<String>,
    to_pod: Option<String>,
    verdict: Option<String>,
    protocol: Option<String>,
    port: Option<u16>,
}

impl Question {
    /// Reads a question's arguments by their names.
    pub fn read(arguments: &BTreeMap<String, String>) -> Result<Self, String> {
        let mut question = Self::default();
        for (name, value) in arguments {
            let text = Some(value.clone());
            let fault = |what: &str| format!("{name}: '{value}' is no {what}");
            match name.as_str() {
                "since" => question.since = value.parse().map_err(|_| fault("number"))?,
                "last" => question.last = Some(value.parse().map_err(|_| fault("number"))?),
                "pod" => question.pod = text,
                "from-pod" => question.from_pod = text,
                "to-pod" => question.to_pod = text,
                "verdict" if ["forwarded", "dropped"].contains(&value.as_str()) => {
                    question.verdict = text;
                }
                "verdict" => return Err(fault("verdict: forwarded or dropped")),
                "protocol" => question.protocol = Some(value.to_lowercase()),
                "port" => question.port = Some(value.parse().map_err(|_| fault("port"))?),
                _ => return Err(format!("there is no filter {name}")),
            }
        }
        Ok(question)
    }

    fn admits(&self, flow: &FlowView) -> bool {
        let ends = [&flow.source, &flow.destination];
        (self.pod.as_ref()).is_none_or(|pod| ends.iter().any(|end| end.is(pod)))
            && (self.from_pod.as_ref()).is_none_or(|pod| flow.source.is(pod))
            && (self.to_pod.as_ref()).is_none_or(|pod| flow.destination.is(pod))
            && (self.verdict.as_ref()).is_none_or(|verdict| *verdict == flow.verdict)
            && (self.protocol.as_ref()).is_none_or(|protocol| *protocol == flow.protocol)
            && (self.port).is_none_or(|port| ends.iter().any(|end| end.port == port))
    }
}

/// The events that workers told of lately.
#[derive(Debug)]
pub struct History {
    events: VecDeque<FlowEvent>,
    /// The number of the oldest.
    first: u64,
    /// Where the workers' clock began.
    origin: SystemTime,
}

impl History {
    /// None yet, of workers whose clock began then.
    #[must_use]
    pub fn new(origin: SystemTime) -> Self {
        Self {
            events: VecDeque::new(),
            first: 0,
            origin,
        }
    }

    /// Keeps an event.
    pub fn keep(&mut self, event: FlowEvent) {
        if self.events.len() == KEPT {
            self.events.pop_front();
            self.first += 1;
        }
        self.events.push_back(event);
    }

    /// The events that a question is about, named by these tables and objects.
    #[must_use]
    pub fn view(&self, question: &Question, tables: &Snapshot, state: &ClusterState) -> FlowsView {
        let skip = question.since.saturating_sub(self.first);
        let skip = usize::try_from(skip).unwrap_or(usize::MAX);
        let numbered = (self.first..).zip(&self.events).skip(skip);
        let names = Names::of(self.events.iter().skip(skip), state);
        let mut flows: Vec<FlowView> = numbered
            .map(|(number, event)| self.show(number, event, &names, tables))
            .filter(|flow| question.admits(flow))
            .collect();
        let beyond = flows
            .len()
            .saturating_sub(question.last.unwrap_or(usize::MAX));
        flows.drain(..beyond);
        FlowsView {
            next: self.first + self.events.len() as u64,
            lost: 0,
            flows,
        }
    }

    fn show(&self, number: u64, event: &FlowEvent, names: &Names, tables: &Snapshot) -> FlowView {
        let (from, to) = (&event.tuple, &event.translated);
        let destination = ipv6::ip_of_mapped(to.dst);
        let reply = event.direction == Some(Direction::Reply);
        // An answer is translated where it comes from, anything else where it goes.
        let service = if to.dst != from.dst && !reply {
            end_text(ipv6::ip_of_mapped(from.dst), from.dst_port)
        } else {
            String::new()
        };
        FlowView {
            number,
            time: utc(self.origin + Duration::from_nanos(event.at.nanos())),
            source: names.end(ipv6::ip_of_mapped(from.src), from.src_port, tables),
            destination: names.end(destination, to.dst_port, tables),
            service,
            protocol: protocol_name(from.protocol),
            reply,
            stage: stage(event, tables).to_owned(),
            verdict: if event.dropped.is_some() {
                "dropped"
            } else {
                "forwarded"
            }
            .to_owned(),
            reason: event.dropped.map_or("", DropReason::name).to_owned(),
            summary: summary(event),
        }
    }
}

/// Pods by the addresses that events name.
struct Names(BTreeMap<IpAddr, PodKey>);

impl Names {
    fn of<'a>(events: impl Iterator<Item = &'a FlowEvent>, state: &ClusterState) -> Self {
        let wanted: BTreeSet<IpAddr> = events
            .flat_map(|event| [event.tuple.src, event.translated.dst])
            .map(ipv6::ip_of_mapped)
            .collect();
        let mut names = BTreeMap::new();
        for pod in state.pods().filter(|pod| !pod.host_network) {
            for ip in pod.ips.iter().filter(|ip| wanted.contains(ip)) {
                names.insert(*ip, pod.key.clone());
            }
        }
        // A pod of this node is known before its object says its address.
        for endpoint in state.endpoints() {
            let Some(pod) = &endpoint.pod else { continue };
            for ip in endpoint.ips.iter().filter(|ip| wanted.contains(ip)) {
                let key = PodKey {
                    namespace: pod.namespace.clone(),
                    name: pod.name.clone(),
                };
                names.insert(*ip, key);
            }
        }
        Self(names)
    }

    fn end(&self, address: IpAddr, port: u16, tables: &Snapshot) -> EndView {
        let pod = self.0.get(&address);
        EndView {
            namespace: pod.map(|pod| pod.namespace.clone()).unwrap_or_default(),
            pod: pod.map(|pod| pod.name.clone()).unwrap_or_default(),
            identity: identity(address, tables).to_string(),
            address,
            port,
        }
    }
}

fn identity(address: IpAddr, tables: &Snapshot) -> IdentityId {
    if let Some(pod) = tables.local(address) {
        return pod.identity;
    }
    if tables.node().addresses.contains(&address) {
        return IdentityId::HOST;
    }
    if tables.peer_by_address(address).is_some() {
        return IdentityId::REMOTE_NODE;
    }
    match (tables.remote_pod(address), address) {
        (Some(pod), _) => pod.identity,
        (None, _) if tables.peer_of(address).is_some() => IdentityId::UNMANAGED,
        (None, IpAddr::V4(_)) => IdentityId::WORLD_IPV4,
        (None, IpAddr::V6(_)) => IdentityId::WORLD_IPV6,
    }
}

fn stage(event: &FlowEvent, tables: &Snapshot) -> &'static str {
    let Some(reason) = event.dropped else {
        let to = ipv6::ip_of_mapped(event.translated.dst);
        return if tables.local(to).is_some() {
            "to-endpoint"
        } else if tables.node().addresses.contains(&to) {
            "to-host"
        } else if tables
            .peer_by_address(to)
            .or_else(|| tables.peer_of(to))
            .is_some()
        {
            "to-overlay"
        } else {
            "to-world"
        };
    };
    match reason {
        DropReason::PolicyDeniedEgress => "policy-egress",
        DropReason::PolicyDeniedIngress => "policy-ingress",
        DropReason::NoEndpoints
        | DropReason::NoLocalEndpoints
        | DropReason::SourceRangeDenied
        | DropReason::NoServicePort => "service",
        DropReason::IcmpErrorUnrelated
        | DropReason::FragmentWithoutFirst
        | DropReason::ConnectionsFull
        | DropReason::ConnectionShareUsed
        | DropReason::NoFreePort
        | DropReason::NoNodeAddress => "conntrack",
        DropReason::SpoofedMac
        | DropReason::SpoofedAddress
        | DropReason::Multicast
        | DropReason::Broadcast
        | DropReason::ForeignInnerSource
        | DropReason::ForeignPlainSource
        | DropReason::ForwardedClusterSource
        | DropReason::BadIdentity
        | DropReason::OverlayPort => "classify",
        _ => "route",
    }
}

fn summary(event: &FlowEvent) -> String {
    let what = match (event.tuple.protocol, event.icmp) {
        (protocol::TCP, _) => flags(event.tcp_flags),
        (_, Some((kind, code))) => format!("type {kind} code {code}"),
        _ => String::new(),
    };
    let length = format!("{} B", event.len);
    if what.is_empty() {
        length
    } else {
        format!("{what} {length}")
    }
}

fn flags(flags: TcpFlags) -> String {
    let names = [
        (TcpFlags::SYN, "SYN"),
        (TcpFlags::FIN, "FIN"),
        (TcpFlags::RST, "RST"),
        (TcpFlags::PSH, "PSH"),
        (TcpFlags::ACK, "ACK"),
    ];
    let set: Vec<_> = (names.iter())
        .filter(|(flag, _)| flags.contains(*flag))
        .map(|(_, name)| *name)
        .collect();
    set.join(",")
}

fn end_text(address: IpAddr, port: u16) -> String {
    std::net::SocketAddr::new(address, port).to_string()
}

/// RFC 3339, in UTC, with milliseconds.
fn utc(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = since.as_secs();
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(days);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:03}Z",
        rest / 3600,
        rest / 60 % 60,
        rest % 60,
        since.subsec_millis()
    )
}

/// The Gregorian date of a day since 1970: years begin in March, so that leap days come last.
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let era = days / 146_097;
    let of_era = days % 146_097;
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use skein_dataplane::conntrack::Tuple;
    use skein_dataplane::snapshot::Node;
    use skein_dataplane::time::Instant;
    use skein_dataplane::wire::ethernet::MacAddr;

    use super::*;

    fn event(port: u16, dropped: Option<DropReason>) -> FlowEvent {
        let tuple = Tuple {
            src: ipv6::v4_mapped([10, 244, 1, 2]),
            dst: ipv6::v4_mapped([10, 96, 0, 10]),
            src_port: 40_000,
            dst_port: port,
            protocol: protocol::TCP,
        };
        FlowEvent {
            at: Instant::from_nanos(1_500_000_000),
            tuple,
            translated: Tuple {
                dst: ipv6::v4_mapped([10, 244, 2, 9]),
                ..tuple
            },
            direction: Some(Direction::Original),
            tcp_flags: TcpFlags::SYN,
            icmp: None,
            len: 60,
            dropped,
        }
    }

    fn tables() -> Snapshot {
        Snapshot::empty(Node {
            router_mac: MacAddr::ZERO,
            overlay_port: 8472,
            addresses: vec![],
            pod_prefixes: vec![],
        })
    }

    #[test]
    fn a_flow_is_one_line_with_names_verdict_and_reason() {
        let mut history = History::new(UNIX_EPOCH + Duration::from_secs(1_709_164_800));
        history.keep(event(53, None));
        history.keep(event(80, Some(DropReason::PolicyDeniedIngress)));
        let view = history.view(&Question::default(), &tables(), &ClusterState::default());
        assert_eq!(
            line(&view.flows[0]),
            "2024-02-29T00:00:01.500Z 10.244.1.2 (world-ipv4) -> 10.244.2.9:53 (world-ipv4) \
             by 10.96.0.10:53 to-world FORWARDED (TCP SYN 60 B)"
        );
        assert!(line(&view.flows[1]).contains("policy-ingress DROPPED policy_denied_ingress"));
    }

    #[test]
    fn a_question_chooses_and_goes_on_where_the_last_ended() {
        let mut history = History::new(UNIX_EPOCH);
        for port in 0..10 {
            history.keep(event(port, (port % 2 == 0).then_some(DropReason::NoRoute)));
        }
        let ask = |arguments: &[(&str, &str)]| {
            let pairs = arguments.iter();
            let question =
                Question::read(&pairs.map(|(k, v)| ((*k).into(), (*v).into())).collect());
            history.view(&question.unwrap(), &tables(), &ClusterState::default())
        };
        assert_eq!(ask(&[("verdict", "dropped")]).flows.len(), 5);
        assert_eq!(ask(&[("port", "3")]).flows.len(), 1);
        let last = ask(&[("last", "2")]);
        assert_eq!((last.next, last.flows[0].number), (10, 8));
        assert_eq!(ask(&[("since", "10")]).flows.len(), 0);
        assert!(Question::read(&BTreeMap::from([("verdict".into(), "lost".into())])).is_err());
    }

    #[test]
    fn old_events_give_way_and_numbers_go_on() {
        let mut history = History::new(UNIX_EPOCH);
        for _ in 0..KEPT + 5 {
            history.keep(event(1, None));
        }
        let view = history.view(&Question::default(), &tables(), &ClusterState::default());
        assert_eq!((view.flows.len(), view.flows[0].number), (KEPT, 5));
    }
}

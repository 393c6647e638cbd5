//! `skeinctl conntrack`: connections as documents, chosen by filters; and their flush.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use skein_dataplane::conntrack::{Entry, Tuple};
use skein_dataplane::slow::Shared;
use skein_dataplane::wire::{ipv6, protocol};

/// The most connections in one answer; a filter shows others.
const MOST_SHOWN: usize = 100_000;

/// The connection table, and those of its connections that were asked for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ConnectionsView {
    /// How many there are.
    pub total: usize,
    /// How many there may be (`conntrack.max`).
    pub capacity: usize,
    /// How many the filters chose.
    pub matched: usize,
    /// How many of those a flush removed.
    pub removed: usize,
    /// Put in since the start.
    pub created: u64,
    /// Ended by silence.
    pub expired: u64,
    /// Given up for others when room was short.
    pub evicted: u64,
    /// Refused since there was no room.
    pub refused_full: u64,
    /// Refused since an endpoint's share was used.
    pub refused_share: u64,
    /// Ports of masquerade that could not be had.
    pub ports_exhausted: u64,
    /// The chosen, at most 100 000.
    pub connections: Vec<ConnectionView>,
}

/// A connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionView {
    /// `tcp`, `udp`, `sctp`, `icmp`, `icmpv6`, or the IP protocol's number.
    pub protocol: String,
    /// Its state, as the kernel's connection tracking calls it.
    pub state: String,
    /// Who began it, as the packet was sent.
    pub source: IpAddr,
    /// Its port, or the identifier of an echo.
    pub source_port: u16,
    /// To whom, as the packet was sent.
    pub destination: IpAddr,
    /// The port.
    pub destination_port: u16,
    /// Who answers: the destination, or the backend of a Service.
    pub reply_source: IpAddr,
    /// Its port.
    pub reply_source_port: u16,
    /// To whom it answers: the source, or the address that stands for it.
    pub reply_destination: IpAddr,
    /// The port.
    pub reply_destination_port: u16,
    /// Whether a port of the node stands for the source's.
    pub masqueraded: bool,
    /// Seconds since a packet prolonged it.
    pub idle_seconds: u64,
    /// Seconds until it ends without another packet.
    pub remaining_seconds: u64,
    /// Seconds since it began.
    pub age_seconds: u64,
}

/// Which connections are meant: those that agree with all that is set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// One of its addresses.
    pub address: Option<IpAddr>,
    /// One of its ports.
    pub port: Option<u16>,
    /// Its protocol, by name or number.
    pub protocol: Option<String>,
    /// Its state.
    pub state: Option<String>,
    /// Whether its source is translated to a port of the node.
    pub masqueraded: Option<bool>,
    /// Addresses of which it has one: a pod's.
    pub addresses: Option<Vec<IpAddr>>,
}

impl Filter {
    /// Reads filters by their names.
    pub fn read(arguments: &BTreeMap<String, String>) -> Result<Self, String> {
        let mut filter = Self::default();
        for (name, value) in arguments {
            let fault = |what: &str| format!("{name}: '{value}' is no {what}");
            match name.as_str() {
                "address" => {
                    filter.address = Some(value.parse().map_err(|_| fault("IP address"))?);
                }
                "port" => filter.port = Some(value.parse().map_err(|_| fault("port"))?),
                "protocol" => filter.protocol = Some(value.to_lowercase()),
                "state" => filter.state = Some(value.to_uppercase()),
                "masqueraded" => {
                    filter.masqueraded = Some(value.parse().map_err(|_| fault("true or false"))?);
                }
                // Whoever calls knows the pods, and what to do.
                "pod" | "do" => {}
                _ => return Err(format!("there is no filter {name}")),
            }
        }
        Ok(filter)
    }

    fn admits(&self, view: &ConnectionView) -> bool {
        let addresses = [
            view.source,
            view.destination,
            view.reply_source,
            view.reply_destination,
        ];
        let ports = [
            view.source_port,
            view.destination_port,
            view.reply_source_port,
            view.reply_destination_port,
        ];
        self.address
            .is_none_or(|wanted| addresses.contains(&wanted))
            && self.port.is_none_or(|wanted| ports.contains(&wanted))
            && (self.protocol.as_ref()).is_none_or(|wanted| *wanted == view.protocol)
            && self
                .state
                .as_ref()
                .is_none_or(|wanted| *wanted == view.state)
            && self
                .masqueraded
                .is_none_or(|wanted| wanted == view.masqueraded)
            && (self.addresses.as_ref())
                .is_none_or(|own| own.iter().any(|ip| addresses.contains(ip)))
    }
}

/// The table with the connections that the filter admits; `flush` removes them, `count` leaves
/// them out of the document.
#[must_use]
pub fn view(shared: &Shared, filter: &Filter, what: What) -> ConnectionsView {
    let table = &shared.connections;
    let mut view = ConnectionsView {
        total: table.len(),
        capacity: table.capacity(),
        ports_exhausted: shared.ports.exhausted(),
        ..ConnectionsView::default()
    };
    let mut matched = 0;
    let mut shown = Vec::new();
    let mut look = |entry: &Entry| {
        let connection = show(entry);
        let admitted = filter.admits(&connection);
        if admitted {
            matched += 1;
            if what != What::Count && shown.len() < MOST_SHOWN {
                shown.push(connection);
            }
        }
        admitted
    };
    if what == What::Flush {
        view.removed = table.remove_where(&mut look);
    } else {
        table.for_each(|entry| {
            look(entry);
        });
    }
    (view.matched, view.connections) = (matched, shown);
    let stats = table.stats();
    view.created = stats.created;
    view.expired = stats.expired;
    view.evicted = stats.evicted;
    view.refused_full = stats.refused_full;
    view.refused_share = stats.refused_share;
    view
}

/// What to do with the connections that a filter admits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Show them.
    List,
    /// Say how many.
    Count,
    /// Remove them: their next packets begin anew.
    Flush,
}

impl What {
    /// By its name.
    pub fn read(name: &str) -> Result<Self, String> {
        match name {
            "list" => Ok(Self::List),
            "count" => Ok(Self::Count),
            "flush" => Ok(Self::Flush),
            _ => Err(format!("{name}: not list, count or flush")),
        }
    }
}

fn show(entry: &Entry) -> ConnectionView {
    let Tuple {
        src,
        dst,
        src_port,
        dst_port,
        protocol,
    } = entry.original;
    ConnectionView {
        protocol: protocol_name(protocol),
        state: entry.state_name.to_owned(),
        source: ipv6::ip_of_mapped(src),
        source_port: src_port,
        destination: ipv6::ip_of_mapped(dst),
        destination_port: dst_port,
        reply_source: ipv6::ip_of_mapped(entry.reply.src),
        reply_source_port: entry.reply.src_port,
        reply_destination: ipv6::ip_of_mapped(entry.reply.dst),
        reply_destination_port: entry.reply.dst_port,
        masqueraded: entry.masquerade.is_some(),
        idle_seconds: entry.idle.as_secs(),
        remaining_seconds: entry.remaining.as_secs(),
        age_seconds: entry.age.as_secs(),
    }
}

/// The table in numbers, for metrics: name, help, value.
#[must_use]
pub fn gauges(shared: &Shared) -> [(&'static str, &'static str, u64); 10] {
    let stats = shared.connections.stats();
    let in_use = |v4: bool| -> usize {
        let icmp = if v4 { protocol::ICMP } else { protocol::ICMPV6 };
        [protocol::TCP, protocol::UDP, protocol::SCTP, icmp]
            .map(|protocol| shared.ports.in_use(v4, protocol))
            .iter()
            .sum()
    };
    [
        (
            "skein_connections",
            "Connections that are followed",
            shared.connections.len() as u64,
        ),
        (
            "skein_connections_possible",
            "Connections that there may be",
            shared.connections.capacity() as u64,
        ),
        (
            "skein_connections_created",
            "Connections put in since the start",
            stats.created,
        ),
        (
            "skein_connections_expired",
            "Connections ended by silence since the start",
            stats.expired,
        ),
        (
            "skein_connections_evicted",
            "Connections given up for others since the start",
            stats.evicted,
        ),
        (
            "skein_connections_refused",
            "Connections refused for want of room or share since the start",
            stats.refused_full + stats.refused_share,
        ),
        (
            "skein_masquerade_ports_ipv4",
            "Ports of masquerade in use, over all protocols",
            in_use(true) as u64,
        ),
        (
            "skein_masquerade_ports_ipv6",
            "Ports of masquerade in use, over all protocols",
            in_use(false) as u64,
        ),
        (
            "skein_masquerade_ports_exhausted",
            "Ports of masquerade that could not be had since the start",
            shared.ports.exhausted(),
        ),
        (
            "skein_flow_events_lost",
            "Flow events that workers had no room for since the start",
            (shared.events.iter())
                .map(skein_dataplane::events::FlowEvents::lost)
                .sum(),
        ),
    ]
}

/// A protocol's name, as filters and documents have it.
#[must_use]
pub fn protocol_name(number: u8) -> String {
    match number {
        protocol::TCP => "tcp".into(),
        protocol::UDP => "udp".into(),
        protocol::SCTP => "sctp".into(),
        protocol::ICMP => "icmp".into(),
        protocol::ICMPV6 => "icmpv6".into(),
        other => other.to_string(),
    }
}

/// Lines for people: the connections, then a sum.
#[must_use]
pub fn lines(view: &ConnectionsView) -> (Vec<Vec<String>>, String) {
    let rows = (view.connections.iter())
        .map(|one| {
            vec![
                one.protocol.clone(),
                one.state.clone(),
                end(one.source, one.source_port),
                end(one.destination, one.destination_port),
                end(one.reply_source, one.reply_source_port),
                end(one.reply_destination, one.reply_destination_port),
                one.idle_seconds.to_string(),
                one.remaining_seconds.to_string(),
            ]
        })
        .collect();
    let mut sum = format!(
        "{} of {} connections, {} possible",
        view.matched, view.total, view.capacity
    );
    if view.removed > 0 {
        sum = format!("{} removed; there were {sum}", view.removed);
    }
    (rows, sum)
}

fn end(address: IpAddr, port: u16) -> String {
    match address {
        IpAddr::V4(v4) => format!("{v4}:{port}"),
        IpAddr::V6(v6) => format!("[{v6}]:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use skein_dataplane::conntrack::{Limits, NewConnection, PortPool, Segment};
    use skein_dataplane::ids::EndpointId;
    use skein_dataplane::time::Instant;

    use super::*;

    fn shared() -> Shared {
        let shared = Shared::new(Limits::new(64), PortPool::new(61_000..=61_100), 1, || {});
        for last in 1..=4_u8 {
            let original = Tuple {
                src: ipv6::v4_mapped([10, 244, 1, last]),
                dst: ipv6::v4_mapped([10, 244, 2, 1]),
                src_port: 4000,
                dst_port: 53,
                protocol: if last == 1 {
                    protocol::TCP
                } else {
                    protocol::UDP
                },
            };
            let new = NewConnection {
                original,
                reply: original.reversed(),
                owner: EndpointId(1),
                masquerade: None,
                picked_up: false,
                service: 0,
            };
            let created = (shared.connections).create(new, Segment::default(), Instant::default());
            created.unwrap();
        }
        shared
    }

    fn filter(arguments: &[(&str, &str)]) -> Result<Filter, String> {
        let pairs = arguments.iter();
        Filter::read(&pairs.map(|(k, v)| ((*k).into(), (*v).into())).collect())
    }

    #[test]
    fn filters_choose_what_agrees_with_all_of_them() {
        let shared = shared();
        let count = |arguments: &[(&str, &str)]| {
            view(&shared, &filter(arguments).unwrap(), What::Count).matched
        };
        assert_eq!(count(&[]), 4);
        assert_eq!(count(&[("address", "10.244.1.2")]), 1);
        assert_eq!(count(&[("protocol", "UDP"), ("port", "53")]), 3);
        assert_eq!(count(&[("protocol", "tcp"), ("address", "10.244.1.2")]), 0);
        assert_eq!(count(&[("masqueraded", "true")]), 0);
        assert!(filter(&[("address", "there")]).is_err());
        assert!(filter(&[("colour", "red")]).is_err());
    }

    #[test]
    fn a_flush_removes_what_it_shows() {
        let shared = shared();
        let udp = filter(&[("protocol", "udp")]).unwrap();
        let flushed = view(&shared, &udp, What::Flush);
        assert_eq!((flushed.removed, flushed.connections.len()), (3, 3));
        assert_eq!(view(&shared, &Filter::default(), What::List).matched, 1);
        let (rows, sum) = lines(&flushed);
        assert_eq!(rows.len(), 3);
        assert!(sum.starts_with("3 removed"), "{sum}");
    }
}

//! The kernel's messages → what control asks about.

use std::net::IpAddr;

use netlink_packet_route::link::{LinkAttribute, LinkFlags};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourExtFlags, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteMetric, RouteType, RouteVia,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::mac::MacAddr;

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its index.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its MAC; zero where it has none.
    pub mac: MacAddr,
    /// Its MTU, in bytes.
    pub mtu: u32,
    /// Whether it is up and has a carrier.
    pub running: bool,
    /// How many receive queues it was made with; fewer may be switched on.
    pub queues: u32,
}

/// What the kernel would do with a packet to an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Index of the device by which it leaves; zero for one that does not leave.
    pub device: u32,
    /// The next hop: the gateway, or the destination itself.
    pub next_hop: IpAddr,
    /// The source address that the kernel would choose.
    pub source: Option<IpAddr>,
    /// The route's own MTU, in bytes, where it has one.
    pub mtu: Option<u32>,
    /// Whether it is for another machine at all: neither local, nor refused.
    pub unicast: bool,
}

/// A route of the main table, which is also one that refuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableRoute {
    /// First address of the destinations.
    pub destination: IpAddr,
    /// Length of their prefix, in bits.
    pub prefix: u8,
    /// Index of the device by which they are reached; zero where they are not.
    pub device: u32,
    /// The next hop; `None` where they are on the link itself.
    pub gateway: Option<IpAddr>,
    /// The route's own MTU, in bytes, where it has one.
    pub mtu: Option<u32>,
    /// Of two routes to the same destinations, the one with the smaller metric counts.
    pub metric: u32,
}

/// An entry of the neighbour tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// Index of its device.
    pub device: u32,
    /// Its address.
    pub address: IpAddr,
    /// Its MAC, while the kernel holds it good.
    pub mac: Option<MacAddr>,
    /// Whether the MAC is good but unconfirmed: the kernel forgets it if nobody asks for it.
    pub stale: bool,
    /// Whether the kernel keeps it resolved by itself (Linux 5.16).
    pub managed: bool,
}

pub(super) fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

fn mac(bytes: &[u8]) -> Option<MacAddr> {
    Some(MacAddr(<[u8; 6]>::try_from(bytes).ok()?))
}

pub(super) fn device(answer: RouteNetlinkMessage) -> Option<Device> {
    let RouteNetlinkMessage::NewLink(message) = answer else {
        return None;
    };
    let mut device = Device {
        index: message.header.index,
        name: String::new(),
        mac: MacAddr::ZERO,
        mtu: 0,
        running: message
            .header
            .flags
            .contains(LinkFlags::Up | LinkFlags::LowerUp),
        queues: 1,
    };
    for attribute in message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => device.name = name,
            LinkAttribute::Address(bytes) => device.mac = mac(&bytes).unwrap_or_default(),
            LinkAttribute::Mtu(mtu) => device.mtu = mtu,
            LinkAttribute::NumRxQueues(queues) => device.queues = queues,
            _ => {}
        }
    }
    Some(device)
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(v4) => Some(IpAddr::V4(*v4)),
        RouteAddress::Inet6(v6) => Some(IpAddr::V6(*v6)),
        _ => None,
    }
}

pub(super) fn route(message: &RouteMessage, destination: IpAddr) -> Route {
    let mut route = Route {
        device: 0,
        next_hop: destination,
        source: None,
        mtu: None,
        unicast: message.header.kind == RouteType::Unicast,
    };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Oif(index) => route.device = *index,
            RouteAttribute::Gateway(gateway) => route.next_hop = ip(gateway).unwrap_or(destination),
            // An IPv4 route by an IPv6 gateway.
            RouteAttribute::Via(RouteVia::Inet6(gateway)) => route.next_hop = (*gateway).into(),
            RouteAttribute::Via(RouteVia::Inet(gateway)) => route.next_hop = (*gateway).into(),
            RouteAttribute::PrefSource(source) => route.source = ip(source),
            RouteAttribute::Metrics(metrics) => {
                route.mtu = metrics.iter().find_map(|metric| match metric {
                    RouteMetric::Mtu(mtu) if *mtu > 0 => Some(*mtu),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    route
}

/// A route of the main table. Of several next hops the first is taken.
pub(super) fn table_route(answer: &RouteNetlinkMessage) -> Option<TableRoute> {
    let RouteNetlinkMessage::NewRoute(message) = answer else {
        return None;
    };
    let header = &message.header;
    let any: IpAddr = match header.address_family {
        AddressFamily::Inet => std::net::Ipv4Addr::UNSPECIFIED.into(),
        AddressFamily::Inet6 => std::net::Ipv6Addr::UNSPECIFIED.into(),
        _ => return None,
    };
    let counts = matches!(
        header.kind,
        RouteType::Unicast | RouteType::BlackHole | RouteType::Unreachable | RouteType::Prohibit
    );
    if !counts || header.table != RouteHeader::RT_TABLE_MAIN {
        return None;
    }
    let by = route(message, any);
    let mut found = TableRoute {
        destination: any,
        prefix: header.destination_prefix_length,
        device: if by.unicast { by.device } else { 0 },
        gateway: Some(by.next_hop).filter(|hop| *hop != any),
        mtu: by.mtu,
        metric: 0,
    };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(address) => found.destination = ip(address)?,
            RouteAttribute::Priority(metric) => found.metric = *metric,
            RouteAttribute::MultiPath(hops) => {
                let hop = hops.first()?;
                found.device = hop.interface_index;
                found.gateway = hop.attributes.iter().find_map(|attribute| match attribute {
                    RouteAttribute::Gateway(gateway) => ip(gateway),
                    RouteAttribute::Via(RouteVia::Inet6(gateway)) => Some((*gateway).into()),
                    RouteAttribute::Via(RouteVia::Inet(gateway)) => Some((*gateway).into()),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    Some(found)
}

pub(super) fn neighbour(answer: &RouteNetlinkMessage) -> Option<Neighbour> {
    let RouteNetlinkMessage::NewNeighbour(message) = answer else {
        return None;
    };
    let good = matches!(
        message.header.state,
        NeighbourState::Reachable
            | NeighbourState::Stale
            | NeighbourState::Delay
            | NeighbourState::Probe
            | NeighbourState::Permanent
    );
    let mut address = None;
    let mut found = None;
    let mut managed = false;
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => {
                address = Some(IpAddr::V4(*v4));
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => {
                address = Some(IpAddr::V6(*v6));
            }
            NeighbourAttribute::LinkLocalAddress(bytes) => found = mac(bytes),
            NeighbourAttribute::ExtFlags(flags) => {
                managed = flags.contains(NeighbourExtFlags::Managed);
            }
            _ => {}
        }
    }
    Some(Neighbour {
        device: message.header.ifindex,
        address: address?,
        mac: found.filter(|_| good),
        stale: message.header.state == NeighbourState::Stale,
        managed,
    })
}

//! Routes: unicast, one next hop.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, Parseable};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMessageBuffer,
    RouteMetric, RouteProtocol, RouteScope as WireScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::{Netlink, NetlinkError};

/// Table `main` of `linux/rtnetlink.h`.
const MAIN: u32 = 254;

/// How far away a route's destination is; IPv6 knows only the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RouteScope {
    /// Beyond a gateway.
    #[default]
    Universe,
    /// On the link itself.
    Link,
    /// On this host.
    Host,
}

/// A unicast route with one next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Destination prefix's address; unspecified with length 0 for the default route.
    pub destination: IpAddr,
    /// Destination prefix's length, up to 32 or 128.
    pub prefix_len: u8,
    /// Next hop; `None`: the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// Index of the outgoing interface.
    pub ifindex: u32,
    /// Scope, IPv4 only.
    pub scope: RouteScope,
    /// The gateway is on the link although no address of ours says so.
    pub onlink: bool,
    /// Path MTU in bytes; `None`: the device's.
    pub mtu: Option<u32>,
    /// Metric; `None`: the kernel's default (0 for IPv4, 1024 for IPv6).
    pub priority: Option<u32>,
    /// Preferred source address.
    pub source: Option<IpAddr>,
    /// Routing table.
    pub table: u32,
    /// Who made it (`rtm_protocol` of `linux/rtnetlink.h`).
    pub protocol: u8,
}

impl Route {
    /// A route to a prefix that is on the link.
    pub fn on_link(destination: IpAddr, prefix_len: u8, ifindex: u32) -> Self {
        Self {
            destination,
            prefix_len,
            gateway: None,
            ifindex,
            scope: if destination.is_ipv4() {
                RouteScope::Link
            } else {
                RouteScope::Universe
            },
            onlink: false,
            mtu: None,
            priority: None,
            source: None,
            table: MAIN,
            protocol: RouteProtocol::Static.into(),
        }
    }

    /// A route to a prefix behind a gateway.
    pub fn via(destination: IpAddr, prefix_len: u8, gateway: IpAddr, ifindex: u32) -> Self {
        Self {
            gateway: Some(gateway),
            scope: RouteScope::Universe,
            ..Self::on_link(destination, prefix_len, ifindex)
        }
    }

    /// The default route of the gateway's family.
    pub fn default_via(gateway: IpAddr, ifindex: u32) -> Self {
        let anywhere = if gateway.is_ipv4() {
            IpAddr::V4(Ipv4Addr::UNSPECIFIED)
        } else {
            IpAddr::V6(Ipv6Addr::UNSPECIFIED)
        };
        Self::via(anywhere, 0, gateway, ifindex)
    }

    /// Whether it is a default route.
    pub fn is_default(&self) -> bool {
        self.prefix_len == 0
    }
}

impl Netlink {
    /// Adds a route; one to the same prefix with the same metric is an error.
    pub fn add_route(&mut self, route: &Route) -> Result<(), NetlinkError> {
        self.write_route("add", route, NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Adds a route, or replaces the one to the same prefix with the same metric.
    pub fn replace_route(&mut self, route: &Route) -> Result<(), NetlinkError> {
        self.write_route("replace", route, NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// Removes a route.
    pub fn delete_route(&mut self, route: &Route) -> Result<(), NetlinkError> {
        self.change(
            &format!("delete {}", describe(route)),
            RouteNetlinkMessage::DelRoute(message(route)),
            0,
        )
    }

    /// Unicast routes of all tables with one next hop, IPv4 and IPv6.
    pub fn routes(&mut self) -> Result<Vec<Route>, NetlinkError> {
        let verb = "list routes";
        let mut routes = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut query = RouteMessage::default();
            query.header.address_family = family;
            for bytes in self.dump(verb, &RouteNetlinkMessage::GetRoute(query))? {
                let message = RouteMessageBuffer::new_checked(&bytes)
                    .and_then(|buffer| RouteMessage::parse(&buffer))
                    .map_err(|e| NetlinkError::Answer {
                        verb: verb.to_owned(),
                        reason: e.to_string(),
                    })?;
                routes.extend(read(&message));
            }
        }
        Ok(routes)
    }

    fn write_route(&mut self, verb: &str, route: &Route, flags: u16) -> Result<(), NetlinkError> {
        self.change(
            &format!("{verb} {}", describe(route)),
            RouteNetlinkMessage::NewRoute(message(route)),
            flags,
        )
    }
}

fn describe(route: &Route) -> String {
    let via = route
        .gateway
        .map(|gateway| format!(" via {gateway}"))
        .unwrap_or_default();
    format!(
        "route {}/{}{via} on link {}",
        route.destination, route.prefix_len, route.ifindex
    )
}

fn message(route: &Route) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header = RouteHeader {
        address_family: family(route.destination),
        destination_prefix_length: route.prefix_len,
        // Tables above 255 stand in the attribute alone.
        table: u8::try_from(route.table).unwrap_or(RouteHeader::RT_TABLE_UNSPEC),
        protocol: route.protocol.into(),
        scope: match route.scope {
            RouteScope::Universe => WireScope::Universe,
            RouteScope::Link => WireScope::Link,
            RouteScope::Host => WireScope::Host,
        },
        kind: RouteType::Unicast,
        flags: if route.onlink {
            RouteFlags::Onlink
        } else {
            RouteFlags::empty()
        },
        ..RouteHeader::default()
    };
    let attributes = &mut message.attributes;
    attributes.push(RouteAttribute::Oif(route.ifindex));
    attributes.push(RouteAttribute::Table(route.table));
    if route.prefix_len > 0 {
        attributes.push(RouteAttribute::Destination(route.destination.into()));
    }
    if let Some(gateway) = route.gateway {
        attributes.push(RouteAttribute::Gateway(gateway.into()));
    }
    if let Some(source) = route.source {
        attributes.push(RouteAttribute::PrefSource(source.into()));
    }
    if let Some(priority) = route.priority {
        attributes.push(RouteAttribute::Priority(priority));
    }
    if let Some(mtu) = route.mtu {
        attributes.push(RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu)]));
    }
    message
}

fn family(ip: IpAddr) -> AddressFamily {
    match ip {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

fn read(message: &RouteMessage) -> Option<Route> {
    let header = &message.header;
    if header.kind != RouteType::Unicast {
        return None;
    }
    let anywhere = match header.address_family {
        AddressFamily::Inet => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        _ => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let mut route = Route {
        scope: match header.scope {
            WireScope::Link => RouteScope::Link,
            WireScope::Host => RouteScope::Host,
            _ => RouteScope::Universe,
        },
        onlink: header.flags.contains(RouteFlags::Onlink),
        table: header.table.into(),
        protocol: header.protocol.into(),
        ..Route::on_link(anywhere, header.destination_prefix_length, 0)
    };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(address) => route.destination = ip(address)?,
            RouteAttribute::Gateway(address) => route.gateway = Some(ip(address)?),
            RouteAttribute::PrefSource(address) => route.source = Some(ip(address)?),
            RouteAttribute::Oif(index) => route.ifindex = *index,
            RouteAttribute::Table(table) => route.table = *table,
            RouteAttribute::Priority(priority) => route.priority = Some(*priority),
            RouteAttribute::Metrics(metrics) => {
                route.mtu = metrics.iter().find_map(|metric| match metric {
                    RouteMetric::Mtu(mtu) => Some(*mtu),
                    _ => None,
                });
            }
            RouteAttribute::MultiPath(_) => return None,
            _ => {}
        }
    }
    Some(route)
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some(IpAddr::V4(*ip)),
        RouteAddress::Inet6(ip) => Some(IpAddr::V6(*ip)),
        _ => None,
    }
}

//! Neighbours: which Ethernet address an on-link IP address has.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE, Parseable};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourMessageBuffer, NeighbourState,
};
use netlink_packet_route::route::RouteType;
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::{Netlink, NetlinkError};
use crate::mac::MacAddr;

/// An entry of the ARP or NDP table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// Index of the interface.
    pub ifindex: u32,
    /// The neighbour's address.
    pub ip: IpAddr,
    /// Its Ethernet address; `None` while it is not resolved.
    pub mac: Option<MacAddr>,
    /// Never expires and is never probed.
    pub is_permanent: bool,
}

impl Netlink {
    /// Adds an entry that never expires, or replaces the one for the same address.
    pub fn add_permanent_neighbour(
        &mut self,
        ifindex: u32,
        ip: IpAddr,
        mac: MacAddr,
    ) -> Result<(), NetlinkError> {
        let mut message = message(ifindex, ip);
        message.header.state = NeighbourState::Permanent;
        message.header.kind = RouteType::Unicast;
        message
            .attributes
            .push(NeighbourAttribute::LinkLocalAddress(mac.octets().to_vec()));
        self.change(
            &format!("add neighbour {ip} at {mac} on link {ifindex}"),
            RouteNetlinkMessage::NewNeighbour(message),
            NLM_F_CREATE | NLM_F_REPLACE,
        )
    }

    /// Removes an entry.
    pub fn delete_neighbour(&mut self, ifindex: u32, ip: IpAddr) -> Result<(), NetlinkError> {
        self.change(
            &format!("delete neighbour {ip} on link {ifindex}"),
            RouteNetlinkMessage::DelNeighbour(message(ifindex, ip)),
            0,
        )
    }

    /// All IPv4 and IPv6 neighbours of the namespace.
    pub fn neighbours(&mut self) -> Result<Vec<Neighbour>, NetlinkError> {
        let verb = "list neighbours";
        let query = RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default());
        let mut neighbours = Vec::new();
        for bytes in self.dump(verb, &query)? {
            let message = NeighbourMessageBuffer::new_checked(&bytes)
                .and_then(|buffer| NeighbourMessage::parse(&buffer))
                .map_err(|e| NetlinkError::Answer {
                    verb: verb.to_owned(),
                    reason: e.to_string(),
                })?;
            neighbours.extend(read(&message));
        }
        Ok(neighbours)
    }
}

fn message(ifindex: u32, ip: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    let (family, address) = match ip {
        IpAddr::V4(ip) => (AddressFamily::Inet, NeighbourAddress::Inet(ip)),
        IpAddr::V6(ip) => (AddressFamily::Inet6, NeighbourAddress::Inet6(ip)),
    };
    message.header.family = family;
    message.header.ifindex = ifindex;
    message
        .attributes
        .push(NeighbourAttribute::Destination(address));
    message
}

/// Bridge forwarding entries come in the same dump and have no IP address: `None`.
fn read(message: &NeighbourMessage) -> Option<Neighbour> {
    let (mut ip, mut mac) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => {
                ip = Some(IpAddr::V4(*v4));
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => {
                ip = Some(IpAddr::V6(*v6));
            }
            NeighbourAttribute::LinkLocalAddress(bytes) => {
                mac = MacAddr::try_from(bytes.as_slice()).ok();
            }
            _ => {}
        }
    }
    Some(Neighbour {
        ifindex: message.header.ifindex,
        ip: ip?,
        mac,
        is_permanent: message.header.state == NeighbourState::Permanent,
    })
}

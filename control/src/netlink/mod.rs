//! The kernel's routing socket: a few verbs over typed messages, and a watch.
//!
//! Requests block for the microseconds that the kernel takes to answer. The watch runs on a
//! thread of its own and says only *that* something changed; whoever hears it asks anew, so a
//! lost notice (the socket's buffer overflowed) is no worse than one more question.

mod message;
mod watch;

use std::io;
use std::net::IpAddr;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkHeader,
    NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkHeader, LinkMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourExtFlags, NeighbourFlags, NeighbourMessage,
    NeighbourState,
};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteType};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

pub use self::message::{Device, Neighbour, Route, TableRoute};
use self::message::{device, family, neighbour, route, table_route};
pub use self::watch::{Notice, watch};
use crate::config::Machine;

/// A connection to the kernel, in the network namespace of the thread that made it.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    /// Connects.
    pub fn new() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self {
            socket,
            sequence: 0,
        })
    }

    /// Sends a request and collects its answers, to the acknowledgement or the end of a dump.
    fn request(
        &mut self,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> io::Result<Vec<RouteNetlinkMessage>> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;
        let mut answers = Vec::new();
        loop {
            let (datagram, _) = self.socket.recv_from_full()?;
            let mut rest = datagram.as_slice();
            while !rest.is_empty() {
                let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest)
                    .map_err(io::Error::other)?;
                let length = (answer.header.length as usize).next_multiple_of(4);
                rest = rest.get(length..).unwrap_or_default();
                if answer.header.sequence_number != self.sequence {
                    continue;
                }
                match answer.payload {
                    NetlinkPayload::Done(_) => return Ok(answers),
                    NetlinkPayload::Error(error) if error.code.is_none() => return Ok(answers),
                    NetlinkPayload::Error(error) => return Err(error.to_io()),
                    NetlinkPayload::InnerMessage(inner) => answers.push(inner),
                    _ => {}
                }
                // Neither a dump nor acknowledged: this one answer is all.
                if flags & (NLM_F_DUMP | NLM_F_ACK) == 0 {
                    return Ok(answers);
                }
            }
        }
    }

    /// All devices.
    pub fn devices(&mut self) -> io::Result<Vec<Device>> {
        let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
        let answers = self.request(request, NLM_F_DUMP)?;
        Ok(answers.into_iter().filter_map(device).collect())
    }

    /// All addresses of a device.
    pub fn addresses(&mut self, device: u32) -> io::Result<Vec<IpAddr>> {
        use netlink_packet_route::address::{AddressAttribute, AddressMessage};
        let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        let mut addresses = Vec::new();
        for answer in self.request(request, NLM_F_DUMP)? {
            let RouteNetlinkMessage::NewAddress(message) = answer else {
                continue;
            };
            if message.header.index != device {
                continue;
            }
            // IFA_LOCAL is the device's own on a point-to-point link, where IFA_ADDRESS is the
            // peer's; IPv6 has IFA_ADDRESS alone.
            let local = message
                .attributes
                .iter()
                .find_map(|attribute| match attribute {
                    AddressAttribute::Local(address) => Some(*address),
                    _ => None,
                });
            let address = message
                .attributes
                .iter()
                .find_map(|attribute| match attribute {
                    AddressAttribute::Address(address) => Some(*address),
                    _ => None,
                });
            addresses.extend(local.or(address));
        }
        Ok(addresses)
    }

    /// What the kernel would do with a packet to that address; `None` without a route.
    pub fn route(&mut self, destination: IpAddr) -> io::Result<Option<Route>> {
        let mut message = RouteMessage::default();
        message.header.address_family = family(destination);
        message.header.destination_prefix_length = if destination.is_ipv4() { 32 } else { 128 };
        let address = RouteAddress::from(destination);
        message
            .attributes
            .push(RouteAttribute::Destination(address));
        match self.request(RouteNetlinkMessage::GetRoute(message), 0) {
            Ok(answers) => Ok(answers.into_iter().find_map(|answer| match answer {
                RouteNetlinkMessage::NewRoute(message) => Some(route(&message, destination)),
                _ => None,
            })),
            // ENETUNREACH, EHOSTUNREACH, EACCES, EINVAL: no route, or one that refuses.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NetworkUnreachable
                        | io::ErrorKind::HostUnreachable
                        | io::ErrorKind::PermissionDenied
                        | io::ErrorKind::InvalidInput
                ) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The main table's routes, IPv4 and IPv6, of every device, and those that refuse.
    pub fn main_routes(&mut self) -> io::Result<Vec<TableRoute>> {
        let request = RouteNetlinkMessage::GetRoute(RouteMessage::default());
        let answers = self.request(request, NLM_F_DUMP)?;
        Ok(answers.iter().filter_map(table_route).collect())
    }

    /// The neighbour tables, IPv4 and IPv6.
    pub fn neighbours(&mut self) -> io::Result<Vec<Neighbour>> {
        let request = RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default());
        let answers = self.request(request, NLM_F_DUMP)?;
        Ok(answers.iter().filter_map(neighbour).collect())
    }

    /// Has the kernel resolve a neighbour: for good where it can (`managed`), else once.
    pub fn resolve(&mut self, device: u32, address: IpAddr, managed: bool) -> io::Result<()> {
        let mut message = NeighbourMessage::default();
        message.header.family = family(address);
        message.header.ifindex = device;
        message.header.state = NeighbourState::None;
        message
            .attributes
            .push(NeighbourAttribute::Destination(match address {
                IpAddr::V4(v4) => NeighbourAddress::Inet(v4),
                IpAddr::V6(v6) => NeighbourAddress::Inet6(v6),
            }));
        if managed {
            let flags = NeighbourExtFlags::Managed;
            message.attributes.push(NeighbourAttribute::ExtFlags(flags));
        } else {
            message.header.flags = NeighbourFlags::Use;
        }
        let request = RouteNetlinkMessage::NewNeighbour(message);
        self.request(request, NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE)?;
        Ok(())
    }

    /// Forgets a neighbour that was resolved for us; one that is not there is no fault.
    pub fn forget(&mut self, device: u32, address: IpAddr) -> io::Result<()> {
        let mut message = NeighbourMessage::default();
        message.header.family = family(address);
        message.header.ifindex = device;
        message
            .attributes
            .push(NeighbourAttribute::Destination(match address {
                IpAddr::V4(v4) => NeighbourAddress::Inet(v4),
                IpAddr::V6(v6) => NeighbourAddress::Inet6(v6),
            }));
        match self.request(RouteNetlinkMessage::DelNeighbour(message), NLM_F_ACK) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map(drop),
        }
    }

    /// Takes a device up.
    pub fn set_up(&mut self, device: u32) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header = LinkHeader {
            index: device,
            flags: LinkFlags::Up,
            change_mask: LinkFlags::Up,
            ..LinkHeader::default()
        };
        self.request(RouteNetlinkMessage::SetLink(message), NLM_F_ACK)?;
        Ok(())
    }

    /// Sets a device's MTU.
    pub fn set_mtu(&mut self, device: u32, mtu: u32) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = device;
        message.attributes.push(LinkAttribute::Mtu(mtu));
        self.request(RouteNetlinkMessage::SetLink(message), NLM_F_ACK)?;
        Ok(())
    }

    /// Removes a device; one that is not there is no fault.
    pub fn delete(&mut self, device: u32) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = device;
        match self.request(RouteNetlinkMessage::DelLink(message), NLM_F_ACK) {
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error()) => {
                Ok(())
            }
            other => other.map(drop),
        }
    }

    /// Devices of the default routes, IPv4 before IPv6, the smallest metric first.
    fn default_routes(&mut self) -> io::Result<Vec<u32>> {
        let request = RouteNetlinkMessage::GetRoute(RouteMessage::default());
        let mut found = Vec::new();
        for answer in self.request(request, NLM_F_DUMP)? {
            let RouteNetlinkMessage::NewRoute(message) = answer else {
                continue;
            };
            if message.header.destination_prefix_length != 0
                || message.header.kind != RouteType::Unicast
            {
                continue;
            }
            let mut metric = 0;
            let mut device = None;
            for attribute in &message.attributes {
                match attribute {
                    RouteAttribute::Priority(priority) => metric = *priority,
                    RouteAttribute::Oif(index) => device = Some(*index),
                    RouteAttribute::MultiPath(hops) => {
                        device = hops.first().map(|hop| hop.interface_index);
                    }
                    _ => {}
                }
            }
            let later = message.header.address_family != AddressFamily::Inet;
            found.extend(device.map(|device| (later, metric, device)));
        }
        found.sort_unstable();
        let mut devices: Vec<u32> = found.into_iter().map(|(_, _, device)| device).collect();
        devices.dedup();
        Ok(devices)
    }
}

/// The machine as the configuration asks it.
#[derive(Debug)]
pub struct ThisMachine;

impl Machine for ThisMachine {
    fn hostname(&self) -> io::Result<String> {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname")?;
        Ok(name.trim().to_lowercase())
    }

    fn default_route_interfaces(&self) -> io::Result<Vec<String>> {
        let mut netlink = Netlink::new()?;
        let devices = netlink.devices()?;
        let name_of = |index| {
            let device = devices.iter().find(|device| device.index == index);
            device.map(|device| device.name.clone())
        };
        Ok(netlink
            .default_routes()?
            .into_iter()
            .filter_map(name_of)
            .collect())
    }
}

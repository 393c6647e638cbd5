//! The kernel's routing socket: a few verbs over typed messages, and a watch.
//!
//! Requests block for the microseconds that the kernel takes to answer. The watch runs on a
//! thread of its own and says only *that* something changed; whoever hears it asks anew, so a
//! lost notice (the socket's buffer overflowed) is no worse than one more question.

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
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteType, RouteVia,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::mpsc;

use crate::config::Machine;
use crate::mac::MacAddr;

/// Multicast groups of rtnetlink (`enum rtnetlink_groups`).
const GROUPS_NEIGHBOURS: &[u32] = &[3];
const GROUPS_ROUTES: &[u32] = &[1, 5, 7, 9, 11];

/// A connection to the kernel, in the network namespace of the thread that made it.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
    sequence: u32,
}

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

/// An entry of the neighbour tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// Index of its device.
    pub device: u32,
    /// Its address.
    pub address: IpAddr,
    /// Its MAC, while the kernel holds it good.
    pub mac: Option<MacAddr>,
    /// Whether the kernel keeps it resolved by itself (Linux 5.16).
    pub managed: bool,
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

fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

fn mac(bytes: &[u8]) -> Option<MacAddr> {
    Some(MacAddr(<[u8; 6]>::try_from(bytes).ok()?))
}

fn device(answer: RouteNetlinkMessage) -> Option<Device> {
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

fn route(message: &RouteMessage, destination: IpAddr) -> Route {
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

fn neighbour(answer: &RouteNetlinkMessage) -> Option<Neighbour> {
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
        managed,
    })
}

/// What changed in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Neighbours alone.
    Neighbours,
    /// Devices, addresses or routes, and perhaps neighbours.
    Routes,
}

/// Starts to watch the network namespace of the calling thread. Ends when the receiver is gone.
pub fn watch(notices: mpsc::Sender<Notice>) -> io::Result<()> {
    let open = |groups: &[u32]| -> io::Result<Socket> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.set_non_blocking(true)?;
        for &group in groups {
            socket.add_membership(group)?;
        }
        Ok(socket)
    };
    let sockets = [
        (Notice::Routes, open(GROUPS_ROUTES)?),
        (Notice::Neighbours, open(GROUPS_NEIGHBOURS)?),
    ];
    std::thread::Builder::new()
        .name("skein-netlink".into())
        .spawn(move || {
            while !notices.is_closed() {
                for notice in heard(&sockets) {
                    // Full: notices wait already, and a notice only says to ask anew. But a
                    // question about neighbours alone must not stand for one about routes.
                    if notice == Notice::Routes {
                        if notices.blocking_send(notice).is_err() {
                            return;
                        }
                    } else {
                        let _ = notices.try_send(notice);
                    }
                }
            }
        })?;
    Ok(())
}

/// Waits up to a second; which sockets had something.
fn heard(sockets: &[(Notice, Socket); 2]) -> Vec<Notice> {
    let mut waiting: Vec<_> = (sockets.iter())
        .map(|(_, socket)| PollFd::new(socket, PollFlags::IN))
        .collect();
    let second = Timespec {
        tv_sec: 1,
        tv_nsec: 0,
    };
    if !poll(&mut waiting, Some(&second)).is_ok_and(|ready| ready > 0) {
        return Vec::new();
    }
    let mut notices = Vec::new();
    for ((notice, socket), waiting) in sockets.iter().zip(&waiting) {
        if waiting.revents().is_empty() {
            continue;
        }
        notices.push(*notice);
        let mut buffer = Vec::with_capacity(64 << 10);
        loop {
            buffer.clear();
            match socket.recv(&mut buffer, 0) {
                Ok(_) => {}
                // ENOBUFS: some were lost, which the notice makes good.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error)
                    if error.raw_os_error() == Some(rustix::io::Errno::NOBUFS.raw_os_error()) => {}
                Err(_) => break,
            }
        }
    }
    notices
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

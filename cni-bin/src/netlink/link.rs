//! Links: veth pairs, lookups, and what can be set on a device.

use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, Parseable, ParseableParametrized};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, InfoVeth, LinkAttribute,
    LinkExtentMask, LinkFlags, LinkHeader, LinkInfo, LinkMessage, LinkMessageBuffer, State,
};

use super::{Netlink, NetlinkError};
use crate::mac::MacAddr;

/// One end of a veth pair to create; both ends start administratively down.
#[derive(Clone, Copy, Debug)]
pub struct VethEnd<'a> {
    /// Interface name, at most 15 bytes.
    pub name: &'a str,
    /// Ethernet address; `None`: the kernel draws one.
    pub mac: Option<MacAddr>,
    /// The namespace that it appears in; `None`: the socket's own.
    pub netns: Option<BorrowedFd<'a>>,
}

/// A veth pair to create in one message, so that no end is ever seen under another name,
/// in another namespace or with another address.
#[derive(Clone, Copy, Debug)]
pub struct Veth<'a> {
    /// The first end.
    pub end: VethEnd<'a>,
    /// The other end.
    pub peer: VethEnd<'a>,
    /// Device MTU of both ends, bytes; up to 65535.
    pub mtu: u32,
    /// Receive queues, and transmit queues, of each end.
    pub queues: u32,
}

/// A device as the kernel reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Interface index in its namespace.
    pub index: u32,
    /// Interface name.
    pub name: String,
    /// `veth`, `bridge`, `vxlan`, …; empty for hardware and the loopback.
    pub kind: String,
    /// Ethernet address, where the device has one of six bytes.
    pub mac: Option<MacAddr>,
    /// Device MTU in bytes.
    pub mtu: u32,
    /// Administratively up (`IFF_UP`).
    pub is_up: bool,
    /// Up with carrier and a working queue (RFC 2863 operational state `up`).
    pub is_running: bool,
    /// Index of the other end of a veth, in the namespace of that end.
    pub peer_index: Option<u32>,
    /// Whether that other end is in another namespace.
    pub peer_is_elsewhere: bool,
    /// Index of the bridge or other controller that it is a port of.
    pub controller: Option<u32>,
    /// Transmit queues.
    pub tx_queues: u32,
    /// Receive queues.
    pub rx_queues: u32,
    /// Largest super-packet that the stack hands to the device, bytes.
    pub gso_max_size: u32,
    /// Free text that an administrator or a program attached; empty for none.
    pub alias: String,
}

impl Netlink {
    /// Creates a veth pair.
    pub fn add_veth(&mut self, veth: &Veth<'_>) -> Result<(), NetlinkError> {
        let mut peer = LinkMessage::default();
        peer.attributes = end_attributes(&veth.peer, veth);
        let mut message = LinkMessage::default();
        message.attributes = end_attributes(&veth.end, veth);
        message.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
        ]));
        self.change(
            &format!("create veth {} with peer {}", veth.end.name, veth.peer.name),
            RouteNetlinkMessage::NewLink(message),
            NLM_F_CREATE | NLM_F_EXCL,
        )
    }

    /// Deletes a device; of a veth the other end goes too.
    pub fn delete_link(&mut self, index: u32) -> Result<(), NetlinkError> {
        self.change(
            &format!("delete link {index}"),
            RouteNetlinkMessage::DelLink(by_index(index)),
            0,
        )
    }

    /// The device of that name, `None` where there is none.
    pub fn link_by_name(&mut self, name: &str) -> Result<Option<Link>, NetlinkError> {
        let mut message = LinkMessage::default();
        message
            .attributes
            .push(LinkAttribute::IfName(name.to_owned()));
        self.one_link(&format!("look up link {name}"), message)
    }

    /// The device of that index, `None` where there is none.
    pub fn link_by_index(&mut self, index: u32) -> Result<Option<Link>, NetlinkError> {
        self.one_link(&format!("look up link {index}"), by_index(index))
    }

    /// All devices of the namespace.
    pub fn links(&mut self) -> Result<Vec<Link>, NetlinkError> {
        let verb = "list links";
        let mut message = LinkMessage::default();
        message.attributes.push(skip_statistics());
        self.dump(verb, &RouteNetlinkMessage::GetLink(message))?
            .iter()
            .map(|bytes| read(verb, bytes))
            .collect()
    }

    /// Sets a device administratively up or down.
    pub fn set_link_up(&mut self, index: u32, up: bool) -> Result<(), NetlinkError> {
        let mut message = by_index(index);
        message.header.change_mask = LinkFlags::Up;
        message.header.flags = if up {
            LinkFlags::Up
        } else {
            LinkFlags::empty()
        };
        let verb = if up { "up" } else { "down" };
        self.change(
            &format!("set link {index} {verb}"),
            RouteNetlinkMessage::SetLink(message),
            0,
        )
    }

    /// Sets a device's MTU, bytes.
    pub fn set_link_mtu(&mut self, index: u32, mtu: u32) -> Result<(), NetlinkError> {
        self.set(index, &format!("mtu {mtu}"), LinkAttribute::Mtu(mtu))
    }

    /// Sets a device's Ethernet address.
    pub fn set_link_mac(&mut self, index: u32, mac: MacAddr) -> Result<(), NetlinkError> {
        let address = LinkAttribute::Address(mac.octets().to_vec());
        self.set(index, &format!("address {mac}"), address)
    }

    /// Renames a device; before Linux 6.2 it must be down.
    pub fn rename_link(&mut self, index: u32, name: &str) -> Result<(), NetlinkError> {
        let attribute = LinkAttribute::IfName(name.to_owned());
        self.set(index, &format!("name {name}"), attribute)
    }

    /// Attaches free text to a device, at most 255 bytes; it shows in `ip link`.
    pub fn set_link_alias(&mut self, index: u32, alias: &str) -> Result<(), NetlinkError> {
        let attribute = LinkAttribute::IfAlias(alias.to_owned());
        self.set(index, &format!("alias {alias}"), attribute)
    }

    /// Makes a device a port of a bridge or another controller; `None` releases it.
    pub fn set_link_controller(
        &mut self,
        index: u32,
        controller: Option<u32>,
    ) -> Result<(), NetlinkError> {
        let controller = controller.unwrap_or(0);
        let attribute = LinkAttribute::Controller(controller);
        self.set(index, &format!("controller {controller}"), attribute)
    }

    /// Moves a device into another namespace; it arrives down and without addresses.
    pub fn move_link(&mut self, index: u32, netns: BorrowedFd<'_>) -> Result<(), NetlinkError> {
        let attribute = LinkAttribute::NetNsFd(netns.as_raw_fd());
        self.set(index, "namespace", attribute)
    }

    /// Keeps the kernel from giving a device an IPv6 link-local address by itself.
    pub fn disable_address_generation(&mut self, index: u32) -> Result<(), NetlinkError> {
        let mode = vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)];
        let attribute = LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(mode)]);
        self.set(index, "addrgenmode none", attribute)
    }

    fn set(
        &mut self,
        index: u32,
        what: &str,
        attribute: LinkAttribute,
    ) -> Result<(), NetlinkError> {
        let mut message = by_index(index);
        message.attributes.push(attribute);
        self.change(
            &format!("set link {index} {what}"),
            RouteNetlinkMessage::SetLink(message),
            0,
        )
    }

    fn one_link(
        &mut self,
        verb: &str,
        mut message: LinkMessage,
    ) -> Result<Option<Link>, NetlinkError> {
        message.attributes.push(skip_statistics());
        match self.query(verb, RouteNetlinkMessage::GetLink(message)) {
            Ok(answers) => answers.first().map(|bytes| read(verb, bytes)).transpose(),
            Err(error) if error.is_missing() => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn by_index(index: u32) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message
}

fn skip_statistics() -> LinkAttribute {
    LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats])
}

fn end_attributes(end: &VethEnd<'_>, veth: &Veth<'_>) -> Vec<LinkAttribute> {
    let mut attributes = vec![
        LinkAttribute::IfName(end.name.to_owned()),
        LinkAttribute::Mtu(veth.mtu),
        LinkAttribute::NumTxQueues(veth.queues),
        LinkAttribute::NumRxQueues(veth.queues),
    ];
    if let Some(mac) = end.mac {
        attributes.push(LinkAttribute::Address(mac.octets().to_vec()));
    }
    if let Some(netns) = end.netns {
        attributes.push(LinkAttribute::NetNsFd(netns.as_raw_fd()));
    }
    attributes
}

/// Reads one link. An attribute that the decoder does not understand is passed over: a
/// device of a kind that nobody here has heard of must not hide all others.
fn read(verb: &str, bytes: &[u8]) -> Result<Link, NetlinkError> {
    let not_understood = |e: netlink_packet_core::DecodeError| NetlinkError::Answer {
        verb: verb.to_owned(),
        reason: e.to_string(),
    };
    let buffer = LinkMessageBuffer::new_checked(bytes).map_err(not_understood)?;
    let header = LinkHeader::parse(&buffer).map_err(not_understood)?;
    let mut link = Link {
        index: header.index,
        name: String::new(),
        kind: String::new(),
        mac: None,
        mtu: 0,
        is_up: header.flags.contains(LinkFlags::Up),
        is_running: false,
        peer_index: None,
        peer_is_elsewhere: false,
        controller: None,
        tx_queues: 0,
        rx_queues: 0,
        gso_max_size: 0,
        alias: String::new(),
    };
    for attribute in buffer.attributes() {
        let attribute = attribute.map_err(not_understood)?;
        if let Ok(known) = LinkAttribute::parse_with_param(&attribute, header.interface_family) {
            apply(&mut link, known);
        }
    }
    Ok(link)
}

fn apply(link: &mut Link, attribute: LinkAttribute) {
    match attribute {
        LinkAttribute::IfName(name) => link.name = name,
        LinkAttribute::IfAlias(alias) => link.alias = alias,
        LinkAttribute::Mtu(mtu) => link.mtu = mtu,
        LinkAttribute::Address(bytes) => link.mac = MacAddr::try_from(bytes.as_slice()).ok(),
        LinkAttribute::OperState(state) => link.is_running = link.is_up && state == State::Up,
        LinkAttribute::Link(index) => link.peer_index = Some(index),
        LinkAttribute::LinkNetNsId(_) => link.peer_is_elsewhere = true,
        LinkAttribute::Controller(index) => link.controller = Some(index),
        LinkAttribute::NumTxQueues(queues) => link.tx_queues = queues,
        LinkAttribute::NumRxQueues(queues) => link.rx_queues = queues,
        LinkAttribute::GsoMaxSize(bytes) => link.gso_max_size = bytes,
        LinkAttribute::LinkInfo(infos) => {
            for info in infos {
                if let LinkInfo::Kind(kind) = info {
                    link.kind = kind.to_string();
                }
            }
        }
        _ => {}
    }
}

//! Addresses of an interface.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, Parseable};
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressMessageBuffer,
    AddressScope,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::{Netlink, NetlinkError};

/// An address on an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// Index of the interface.
    pub ifindex: u32,
    /// The address.
    pub ip: IpAddr,
    /// Prefix length, up to 32 or 128.
    pub prefix_len: u8,
    /// IPv6: usable at once, without duplicate address detection (RFC 4862 §5.4).
    pub nodad: bool,
    /// No route to the prefix comes with it.
    pub noprefixroute: bool,
    /// IPv6: duplicate address detection is still running. Ignored on adding.
    pub tentative: bool,
}

impl Address {
    /// A host address (/32 or /128) that brings no route and needs no detection.
    pub fn host(ifindex: u32, ip: IpAddr) -> Self {
        Self {
            ifindex,
            ip,
            prefix_len: if ip.is_ipv4() { 32 } else { 128 },
            nodad: true,
            noprefixroute: true,
            tentative: false,
        }
    }

    /// An address within a prefix, as `ip address add` gives it.
    pub fn within(ifindex: u32, ip: IpAddr, prefix_len: u8) -> Self {
        Self {
            prefix_len,
            nodad: false,
            noprefixroute: false,
            ..Self::host(ifindex, ip)
        }
    }
}

impl Netlink {
    /// Adds an address to an interface.
    pub fn add_address(&mut self, address: &Address) -> Result<(), NetlinkError> {
        let mut flags = AddressFlags::empty();
        // IPv4 has no detection, and some kernels store the flag without a meaning.
        flags.set(AddressFlags::Nodad, address.nodad && address.ip.is_ipv6());
        flags.set(AddressFlags::Noprefixroute, address.noprefixroute);
        let mut message = message(address);
        message.header.flags =
            AddressHeaderFlags::from_bits_truncate(flags.bits().to_le_bytes()[0]);
        message.attributes.push(AddressAttribute::Flags(flags));
        self.change(
            &format!(
                "add address {}/{} to link {}",
                address.ip, address.prefix_len, address.ifindex
            ),
            RouteNetlinkMessage::NewAddress(message),
            NLM_F_CREATE | NLM_F_EXCL,
        )
    }

    /// Removes an address from an interface.
    pub fn delete_address(&mut self, address: &Address) -> Result<(), NetlinkError> {
        self.change(
            &format!(
                "delete address {}/{} of link {}",
                address.ip, address.prefix_len, address.ifindex
            ),
            RouteNetlinkMessage::DelAddress(message(address)),
            0,
        )
    }

    /// All addresses of the namespace, IPv4 and IPv6.
    pub fn addresses(&mut self) -> Result<Vec<Address>, NetlinkError> {
        let verb = "list addresses";
        let query = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        let mut addresses = Vec::new();
        for bytes in self.dump(verb, &query)? {
            let message = AddressMessageBuffer::new_checked(&bytes)
                .and_then(|buffer| AddressMessage::parse(&buffer))
                .map_err(|e| NetlinkError::Answer {
                    verb: verb.to_owned(),
                    reason: e.to_string(),
                })?;
            addresses.extend(read(&message));
        }
        Ok(addresses)
    }
}

fn message(address: &Address) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = if address.ip.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    message.header.prefix_len = address.prefix_len;
    message.header.scope = AddressScope::Universe;
    message.header.index = address.ifindex;
    message.attributes = vec![
        AddressAttribute::Local(address.ip),
        AddressAttribute::Address(address.ip),
    ];
    message
}

/// `IFA_LOCAL` is the interface's own address where there is one (IPv4; IPv6 only with a
/// peer), `IFA_ADDRESS` otherwise.
fn read(message: &AddressMessage) -> Option<Address> {
    let mut flags = AddressFlags::from_bits_retain(message.header.flags.bits().into());
    let (mut local, mut plain) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(ip) => local = Some(*ip),
            AddressAttribute::Address(ip) => plain = Some(*ip),
            AddressAttribute::Flags(all) => flags = *all,
            _ => {}
        }
    }
    Some(Address {
        ifindex: message.header.index,
        ip: local.or(plain)?,
        prefix_len: message.header.prefix_len,
        nodad: flags.contains(AddressFlags::Nodad),
        noprefixroute: flags.contains(AddressFlags::Noprefixroute),
        tentative: flags.contains(AddressFlags::Tentative),
    })
}

//! Tells the link who we are: a gratuitous ARP for each IPv4 address, an unsolicited
//! neighbour advertisement for each IPv6 address, sent from the calling thread's network
//! namespace through an `AF_PACKET` socket. Nobody has to answer.
#![expect(unsafe_code, reason = "AF_PACKET sockets have no wrapper in std")]

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::mac::MacAddr;

const ETHERTYPE_ARP: u16 = 0x0806;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const PROTOCOL_ICMPV6: u8 = 58;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// All nodes on the link, RFC 4291 §2.7.1.
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// Announces each address as being at `mac`, on the interface of that index.
pub fn announce(ifindex: u32, mac: MacAddr, ips: &[IpAddr]) -> io::Result<()> {
    // SAFETY: socket(2) takes three numbers and touches no memory of ours. Protocol 0: the
    // socket only sends.
    let raw = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, valid (checked above) and owned by nobody else.
    let socket = unsafe { OwnedFd::from_raw_fd(raw) };
    for ip in ips {
        match ip {
            IpAddr::V4(ip) => send(&socket, ifindex, &gratuitous_arp(mac, *ip))?,
            IpAddr::V6(ip) => send(&socket, ifindex, &neighbour_advertisement(mac, *ip))?,
        }
    }
    Ok(())
}

fn send(socket: &OwnedFd, ifindex: u32, frame: &[u8]) -> io::Result<()> {
    let ifindex = i32::try_from(ifindex).map_err(|_| io::Error::from_raw_os_error(libc::ENODEV))?;
    let family = u16::try_from(libc::AF_PACKET)
        .map_err(|_| io::Error::from_raw_os_error(libc::EAFNOSUPPORT))?;
    let address = libc::sockaddr_ll {
        sll_family: family,
        // In network order already: the two bytes as they stand in the frame.
        sll_protocol: u16::from_ne_bytes([frame[12], frame[13]]),
        sll_ifindex: ifindex,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let length = libc::socklen_t::try_from(size_of_val(&address))
        .map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: the descriptor is open; `frame` and `address` are live for the call and each
    // is passed with its own length.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            frame.as_ptr().cast(),
            frame.len(),
            0,
            (&raw const address).cast(),
            length,
        )
    };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// An ARP announcement (RFC 5227 §3): a request for one's own address.
///
/// ```text
///  0 destination ff:…   6 source      12 0806
/// 14 0001 (Ethernet)   16 0800       18 6  19 4  20 0001 (request)
/// 22 sender MAC        28 sender IP  32 target MAC, zero  38 target IP = sender IP
/// ```
fn gratuitous_arp(mac: MacAddr, ip: Ipv4Addr) -> Vec<u8> {
    let mut frame = ethernet(MacAddr::BROADCAST, mac, ETHERTYPE_ARP);
    frame.extend([0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(mac.octets());
    frame.extend(ip.octets());
    frame.extend([0; 6]);
    frame.extend(ip.octets());
    frame
}

/// An unsolicited neighbour advertisement (RFC 4861 §7.2.6): override set, to all nodes.
///
/// ```text
///  0 Ethernet  14 IPv6, hop limit 255
/// 54 136 0 checksum  58 flags (O)  62 target address  78 option 2, length 1, MAC
/// ```
fn neighbour_advertisement(mac: MacAddr, ip: Ipv6Addr) -> Vec<u8> {
    const OVERRIDE: u8 = 0x20;
    const TARGET_LINK_LAYER_ADDRESS: u8 = 2;
    let mut body = vec![NEIGHBOUR_ADVERTISEMENT, 0, 0, 0, OVERRIDE, 0, 0, 0];
    body.extend(ip.octets());
    body.extend([TARGET_LINK_LAYER_ADDRESS, 1]);
    body.extend(mac.octets());
    let sum = checksum(ip, ALL_NODES, &body);
    body[2..4].copy_from_slice(&sum.to_be_bytes());

    let all_nodes = MacAddr::new([0x33, 0x33, 0, 0, 0, 1]);
    let mut frame = ethernet(all_nodes, mac, ETHERTYPE_IPV6);
    frame.extend([0x60, 0, 0, 0, 0, 32, PROTOCOL_ICMPV6, 255]);
    frame.extend(ip.octets());
    frame.extend(ALL_NODES.octets());
    frame.extend(body);
    frame
}

fn ethernet(destination: MacAddr, source: MacAddr, ethertype: u16) -> Vec<u8> {
    let mut frame = Vec::with_capacity(86);
    frame.extend(destination.octets());
    frame.extend(source.octets());
    frame.extend(ethertype.to_be_bytes());
    frame
}

/// The ICMPv6 checksum with its pseudo-header (RFC 4443 §2.3); `body` is of even length.
fn checksum(source: Ipv6Addr, destination: Ipv6Addr, body: &[u8]) -> u16 {
    let words = |bytes: &[u8]| -> u32 {
        bytes
            .chunks_exact(2)
            .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
            .sum()
    };
    let length = u32::try_from(body.len()).unwrap_or_default();
    let mut sum = words(&source.octets())
        + words(&destination.octets())
        + length
        + u32::from(PROTOCOL_ICMPV6)
        + words(body);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: MacAddr = MacAddr::new([2, 0, 0, 0, 0, 7]);

    #[test]
    fn golden_arp() {
        assert_eq!(
            gratuitous_arp(MAC, Ipv4Addr::new(10, 0, 0, 2)),
            [
                0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 7, 8, 6, // Ethernet
                0, 1, 8, 0, 6, 4, 0, 1, // request, Ethernet, IPv4
                2, 0, 0, 0, 0, 7, 10, 0, 0, 2, // sender
                0, 0, 0, 0, 0, 0, 10, 0, 0, 2, // target
            ]
        );
    }

    #[test]
    fn golden_advertisement() {
        let ip: Ipv6Addr = "fd00::2".parse().unwrap();
        let frame = neighbour_advertisement(MAC, ip);
        assert_eq!(frame.len(), 86);
        assert_eq!(
            frame[..14],
            [0x33, 0x33, 0, 0, 0, 1, 2, 0, 0, 0, 0, 7, 0x86, 0xdd]
        );
        assert_eq!(frame[14..22], [0x60, 0, 0, 0, 0, 32, 58, 255]);
        assert_eq!(frame[22..38], ip.octets());
        assert_eq!(frame[38..54], ALL_NODES.octets());
        assert_eq!(frame[54..56], [136, 0]);
        assert_eq!(frame[58..62], [0x20, 0, 0, 0]);
        assert_eq!(frame[62..78], ip.octets());
        assert_eq!(frame[78..], [2, 1, 2, 0, 0, 0, 0, 7]);
        // fd00 + 2 (source), ff02 + 1 (destination), 32, 58, then the body: 8800 + 2000
        // + fd00 + 2 + 0201 + 0200 + 0 + 0007 = 3a569 + 1 carry… summed by hand: 0xa56c.
        assert_eq!(frame[56..58], (!0xa56c_u16).to_be_bytes());
    }
}

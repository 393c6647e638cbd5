//! Header views: bytes on the wire and what they mean.
//!
//! Each module knows one header: its layout as the RFC draws it, lengths and field offsets,
//! a read view whose constructor checks what the getters rely on, and the few writes that
//! the datapath makes. Views borrow fixed-size arrays, so a getter cannot go out of bounds.
//!
//! Deliberately absent: I/O, allocation, clocks, and any decision about a packet. Nothing
//! here panics, whatever the bytes.

pub mod arp;
pub mod checksum;
pub mod error;
pub mod ethernet;
pub mod geneve;
pub mod gre;
pub mod gtpu;
pub mod icmp;
pub mod icmpv6;
pub mod ipv4;
pub mod ipv6;
pub mod ndp;
pub mod sctp;
pub mod tcp;
pub mod udp;
pub mod vxlan;

pub use error::ParseError;
pub use ethernet::MacAddr;

/// IP protocol numbers (IANA "Assigned Internet Protocol Numbers") that the datapath knows.
pub mod protocol {
    /// IPv6 hop-by-hop options.
    pub const HOP_BY_HOP: u8 = 0;
    /// ICMP for IPv4.
    pub const ICMP: u8 = 1;
    /// IPv4 inside IP (RFC 2003).
    pub const IPV4: u8 = 4;
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
    /// IPv6 inside IP (RFC 4213, RFC 2473).
    pub const IPV6: u8 = 41;
    /// IPv6 routing header.
    pub const ROUTING: u8 = 43;
    /// IPv6 fragment header.
    pub const FRAGMENT: u8 = 44;
    /// Generic Routing Encapsulation.
    pub const GRE: u8 = 47;
    /// Encapsulating Security Payload.
    pub const ESP: u8 = 50;
    /// Authentication Header.
    pub const AH: u8 = 51;
    /// ICMP for IPv6.
    pub const ICMPV6: u8 = 58;
    /// IPv6 "no next header".
    pub const NO_NEXT_HEADER: u8 = 59;
    /// IPv6 destination options.
    pub const DESTINATION_OPTIONS: u8 = 60;
    /// SCTP.
    pub const SCTP: u8 = 132;
}

/// What a tunnel's header is followed by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload {
    /// An Ethernet frame.
    Ethernet,
    /// An IPv4 or IPv6 packet.
    Ip,
}

impl Payload {
    /// By the EtherType that Geneve and GRE name it with; `None` if neither.
    #[must_use]
    pub const fn of_ether_type(ether_type: u16) -> Option<Self> {
        match ether_type {
            ethernet::ETHER_TYPE_BRIDGED => Some(Self::Ethernet),
            ethernet::ETHER_TYPE_IPV4 | ethernet::ETHER_TYPE_IPV6 => Some(Self::Ip),
            _ => None,
        }
    }
}

/// Reads the big-endian `u16` at `at`. Callers pass constants within `N`.
#[inline]
pub(crate) const fn u16_at<const N: usize>(bytes: &[u8; N], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Reads the big-endian `u32` at `at`. Callers pass constants within `N`.
#[inline]
pub(crate) const fn u32_at<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Copies the `M` bytes at `at`. Callers pass constants within `N`.
#[inline]
pub(crate) fn array_at<const M: usize, const N: usize>(bytes: &[u8; N], at: usize) -> [u8; M] {
    let mut out = [0; M];
    out.copy_from_slice(&bytes[at..at + M]);
    out
}

/// Writes `value` big-endian at `at`. Callers pass constants within `N`.
#[inline]
pub(crate) const fn put_u16<const N: usize>(bytes: &mut [u8; N], at: usize, value: u16) {
    let [high, low] = value.to_be_bytes();
    bytes[at] = high;
    bytes[at + 1] = low;
}

//! Who talks to whom: the five-tuple, and which of a connection's two it is.

use std::hash::{Hash, Hasher};

use crate::parse::Headers;
use crate::wire::{icmp, icmpv6, protocol};

/// A five-tuple. Addresses are IPv4-mapped where they are IPv4.
///
/// An ICMP echo request has its identifier as source port and zero as destination port, a
/// reply the other way round, so that one is the reverse of the other as it is for ports.
/// Other ICMP queries and protocols without ports have zeroes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Tuple {
    /// Source address.
    pub src: [u8; 16],
    /// Destination address.
    pub dst: [u8; 16],
    /// Source port, or the identifier of an echo request.
    pub src_port: u16,
    /// Destination port, or the identifier of an echo reply.
    pub dst_port: u16,
    /// IP protocol.
    pub protocol: u8,
}

impl Tuple {
    /// The tuple of a packet with these headers. A fragment other than the first has no ports,
    /// and so not its connection's tuple.
    #[must_use]
    pub fn of(headers: &Headers) -> Self {
        let tuple = Self {
            src: headers.src_bytes,
            dst: headers.dst_bytes,
            src_port: headers.src_port,
            dst_port: headers.dst_port,
            protocol: headers.protocol,
        };
        let is_echo_reply = match (headers.protocol, headers.icmp) {
            (protocol::ICMP, Some((kind, _))) => kind == icmp::ECHO_REPLY,
            (protocol::ICMPV6, Some((kind, _))) => kind == icmpv6::ECHO_REPLY,
            _ => false,
        };
        if is_echo_reply {
            Self {
                src_port: 0,
                dst_port: headers.src_port,
                ..tuple
            }
        } else {
            tuple
        }
    }

    /// The tuple of the answer, where nothing is translated.
    #[must_use]
    pub fn reversed(&self) -> Self {
        Self {
            src: self.dst,
            dst: self.src,
            src_port: self.dst_port,
            dst_port: self.src_port,
            protocol: self.protocol,
        }
    }
}

/// Whole words at a time: a hasher takes them several times faster than byte by byte.
impl Hash for Tuple {
    fn hash<H: Hasher>(&self, state: &mut H) {
        for word in address_words(self.src)
            .into_iter()
            .chain(address_words(self.dst))
        {
            state.write_u64(word);
        }
        let ports = u64::from(self.src_port) << 16 | u64::from(self.dst_port);
        state.write_u64(ports << 8 | u64::from(self.protocol));
    }
}

/// An address as two words, for blocks and hashes.
pub(super) fn address_words(address: [u8; 16]) -> [u64; 2] {
    let value = u128::from_be_bytes(address);
    [(value >> 64) as u64, value as u64]
}

/// Undoes [`address_words`].
pub(super) fn address_of([high, low]: [u64; 2]) -> [u8; 16] {
    (u128::from(high) << 64 | u128::from(low)).to_be_bytes()
}

/// Which way a packet of a connection goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// As the packet that began it.
    Original,
    /// As the answers to that.
    Reply,
}

impl Direction {
    /// The other one.
    #[must_use]
    pub fn opposite(self) -> Self {
        match self {
            Self::Original => Self::Reply,
            Self::Reply => Self::Original,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::parse;
    use crate::wire::checksum;

    /// An IPv4 frame from 10.0.0.1 to 10.0.0.2.
    fn frame(protocol: u8, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x02; 12];
        bytes.extend([0x08, 0x00, 0x45, 0]);
        bytes.extend((20 + payload.len() as u16).to_be_bytes());
        bytes.extend([0, 0, 0, 0, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        let sum = checksum::complete([&bytes[14..34]]);
        bytes[24..26].copy_from_slice(&sum.to_be_bytes());
        bytes.extend(payload);
        bytes
    }

    fn tuple(protocol: u8, payload: &[u8]) -> Tuple {
        let frame = frame(protocol, payload);
        Tuple::of(&parse(&frame, frame.len()).unwrap())
    }

    #[test]
    fn an_echo_reply_is_the_reverse_of_its_request() {
        let request = tuple(protocol::ICMP, &[8, 0, 0, 0, 0x12, 0x34, 0, 1]);
        assert_eq!((request.src_port, request.dst_port), (0x1234, 0));
        let reply = tuple(protocol::ICMP, &[0, 0, 0, 0, 0x12, 0x34, 0, 1]);
        assert_eq!((reply.src_port, reply.dst_port), (0, 0x1234));
        assert_eq!(
            (reply.src_port, reply.dst_port),
            (request.reversed().src_port, request.reversed().dst_port)
        );
        assert_eq!(request.reversed().reversed(), request);
    }

    #[test]
    fn what_has_no_ports_has_zeroes() {
        let timestamp = tuple(protocol::ICMP, &[13, 0, 0, 0, 0x12, 0x34, 0, 1]);
        assert_eq!((timestamp.src_port, timestamp.dst_port), (0, 0));
        let other = tuple(99, &[1, 2, 3, 4]);
        assert_eq!((other.src_port, other.dst_port), (0, 0));
        assert_eq!(other.protocol, 99);
    }

    #[test]
    fn an_address_survives_its_words() {
        let address: [u8; 16] = std::array::from_fn(|at| at as u8 + 1);
        assert_eq!(address_of(address_words(address)), address);
    }
}

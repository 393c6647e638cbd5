//! ARP for IPv4 over Ethernet (RFC 826).
//!
//! ```text
//! +-------------------+-------------------+
//! | hardware type: 1  | protocol: 0x0800  |
//! +---------+---------+-------------------+
//! | hlen: 6 | plen: 4 |     operation     |
//! +---------+---------+-------------------+
//! | sender MAC (6), sender IPv4 (4)       |
//! | target MAC (6), target IPv4 (4)       |
//! +---------------------------------------+
//! ```
//!
//! No other hardware or protocol, no reverse ARP.

use super::ethernet::{self, ETHER_TYPE_ARP, ETHER_TYPE_IPV4, EthernetHeader};
use super::{MacAddr, ParseError, array_at, put_u16, u16_at};

/// Bytes in an ARP packet for IPv4 over Ethernet.
pub const PACKET_LEN: usize = 28;
/// Bytes in a frame with one, before padding.
pub const FRAME_LEN: usize = ethernet::HEADER_LEN + PACKET_LEN;
/// Offset of the operation.
pub const OPERATION_OFFSET: usize = 6;
/// Offset of the sender's MAC address.
pub const SENDER_MAC_OFFSET: usize = 8;
/// Offset of the sender's IPv4 address.
pub const SENDER_IP_OFFSET: usize = 14;
/// Offset of the target's MAC address.
pub const TARGET_MAC_OFFSET: usize = 18;
/// Offset of the target's IPv4 address.
pub const TARGET_IP_OFFSET: usize = 24;

/// Operation: who has the target address?
pub const REQUEST: u16 = 1;
/// Operation: the sender has it.
pub const REPLY: u16 = 2;

/// Hardware type, protocol type and both lengths, as they must be.
const PREFIX: [u8; 6] = {
    let [high, low] = ETHER_TYPE_IPV4.to_be_bytes();
    [0, 1, high, low, 6, 4]
};

/// Read view of an ARP packet.
#[derive(Debug, Clone, Copy)]
pub struct Arp<'a>(&'a [u8; PACKET_LEN]);

impl<'a> Arp<'a> {
    /// The packet at the start of `bytes`.
    ///
    /// # Errors
    /// [`ParseError::TruncatedArp`]; [`ParseError::BadArp`] unless for IPv4 over Ethernet.
    #[inline]
    pub fn new(bytes: &'a [u8]) -> Result<Self, ParseError> {
        let packet = bytes
            .first_chunk::<PACKET_LEN>()
            .ok_or(ParseError::TruncatedArp)?;
        if packet[..OPERATION_OFFSET] != PREFIX {
            return Err(ParseError::BadArp);
        }
        Ok(Self(packet))
    }

    /// [`REQUEST`], [`REPLY`] or something else.
    #[must_use]
    pub const fn operation(self) -> u16 {
        u16_at(self.0, OPERATION_OFFSET)
    }

    /// Who speaks.
    #[must_use]
    pub fn sender_mac(self) -> MacAddr {
        MacAddr(array_at(self.0, SENDER_MAC_OFFSET))
    }

    /// The speaker's address; zero in a probe for duplicates (RFC 5227).
    #[must_use]
    pub fn sender_ip(self) -> [u8; 4] {
        array_at(self.0, SENDER_IP_OFFSET)
    }

    /// Whom it is for; meaningless in a request.
    #[must_use]
    pub fn target_mac(self) -> MacAddr {
        MacAddr(array_at(self.0, TARGET_MAC_OFFSET))
    }

    /// The address asked for, or answered.
    #[must_use]
    pub fn target_ip(self) -> [u8; 4] {
        array_at(self.0, TARGET_IP_OFFSET)
    }
}

/// Writes the whole frame with which `own` answers `request`: the request's target address
/// is at `own`. Returns its length, [`FRAME_LEN`], or `None` if `out` is shorter.
#[must_use]
pub fn build_reply(out: &mut [u8], request: Arp<'_>, own: MacAddr) -> Option<usize> {
    let (header, rest) = out.split_first_chunk_mut()?;
    let packet = rest.first_chunk_mut::<PACKET_LEN>()?;
    let asker = request.sender_mac();
    ethernet::write_header(
        header,
        EthernetHeader {
            dst: asker,
            src: own,
        },
        ETHER_TYPE_ARP,
    );
    packet[..OPERATION_OFFSET].copy_from_slice(&PREFIX);
    put_u16(packet, OPERATION_OFFSET, REPLY);
    packet[SENDER_MAC_OFFSET..SENDER_IP_OFFSET].copy_from_slice(&own.0);
    packet[SENDER_IP_OFFSET..TARGET_MAC_OFFSET].copy_from_slice(&request.target_ip());
    packet[TARGET_MAC_OFFSET..TARGET_IP_OFFSET].copy_from_slice(&asker.0);
    packet[TARGET_IP_OFFSET..].copy_from_slice(&request.sender_ip());
    Some(FRAME_LEN)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST_BYTES: [u8; PACKET_LEN] = [
        0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1, 0, 0, 0, 0, 0, 0, 169, 254, 1, 1,
    ];

    #[test]
    fn golden_request_is_answered() {
        let request = Arp::new(&REQUEST_BYTES).unwrap();
        assert_eq!(request.operation(), REQUEST);
        assert_eq!(request.sender_mac(), MacAddr([2, 0, 0, 0, 0, 1]));
        assert_eq!(request.sender_ip(), [10, 0, 0, 1]);
        assert_eq!(request.target_mac(), MacAddr::ZERO);
        assert_eq!(request.target_ip(), [169, 254, 1, 1]);

        let mut out = [0xff; 64];
        let own = MacAddr([2, 0, 0, 0, 0, 2]);
        assert_eq!(build_reply(&mut out, request, own), Some(FRAME_LEN));
        assert_eq!(
            out[..FRAME_LEN],
            [
                2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 6, 0, 1, 8, 0, 6, 4, 0, 2, 2, 0, 0, 0, 0, 2,
                169, 254, 1, 1, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1,
            ]
        );
        assert!(out[FRAME_LEN..].iter().all(|&byte| byte == 0xff));
        assert_eq!(build_reply(&mut out[..FRAME_LEN - 1], request, own), None);

        let theirs = etherparse::ArpPacketSlice::from_slice(&out[14..FRAME_LEN]).unwrap();
        assert_eq!(theirs.operation(), etherparse::ArpOperation::REPLY);
        assert_eq!(theirs.sender_protocol_addr(), [169, 254, 1, 1]);
    }

    #[test]
    fn other_kinds_and_short_packets_are_refused() {
        assert_eq!(
            Arp::new(&REQUEST_BYTES[..27]).unwrap_err(),
            ParseError::TruncatedArp
        );
        for at in 0..OPERATION_OFFSET {
            let mut bytes = REQUEST_BYTES;
            bytes[at] ^= 1;
            assert_eq!(Arp::new(&bytes).unwrap_err(), ParseError::BadArp);
        }
    }
}

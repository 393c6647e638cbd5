//! Every size of packet on every path: it arrives whole, or its fragments make it whole, or its
//! sender is told the MTU. Never silence.

use std::cell::RefCell;

use proptest::prelude::*;

use crate::common::frames::{self, Kind, Pod, frame};
use crate::common::{Cluster, naive};
use crate::{FAR, FROM, NEAR};

/// What is sent.
#[derive(Clone, Debug)]
struct Case {
    /// TCP, UDP, ICMP echo or SCTP.
    kind: Option<Kind>,
    v4: bool,
    dont_fragment: bool,
    unfinished: bool,
    to: Pod,
}

impl Case {
    fn frame(&self, ttl: u8, payload: &[u8]) -> Vec<u8> {
        let mut whole = match self.kind {
            Some(kind) => frame(kind, FROM, self.to, ttl, payload),
            None => {
                let message = [&[0x0b, 0x59, 0x0b, 0x5a, 1, 2, 3, 4, 9, 9, 9, 9], payload].concat();
                let mut packet = if self.v4 {
                    naive::ipv4(FROM, self.to, 132, &[], &message)
                } else {
                    naive::ipv6(FROM, self.to, 132, &message)
                };
                if self.v4 {
                    (packet[6], packet[8]) = (0x40, ttl);
                    naive::fix_header(&mut packet);
                } else {
                    packet[7] = ttl;
                }
                naive::framed(FROM, &packet)
            }
        };
        if self.v4 && !self.dont_fragment {
            whole = naive::may_be_cut(whole, payload.len() as u16);
        }
        whole
    }

    fn can_be_unfinished(&self) -> bool {
        use Kind::{TcpV4, TcpV6, UdpV4, UdpV6};
        matches!(self.kind, Some(TcpV4 | TcpV6 | UdpV4 | UdpV6))
    }

    /// Sends it and checks what became of it; `mtu` is the path's.
    fn check(&self, cluster: &mut Cluster, payload: &[u8], mtu: usize) {
        let whole = self.frame(64, payload);
        let partial = self.unfinished && self.can_be_unfinished();
        let sent = if partial {
            frames::unfinish(whole)
        } else {
            whole
        };
        let (arrived, back) = cluster.exchange(FROM, self.to, sent.clone());
        let size = sent.len() - naive::IP;
        let expected = self.frame(63, payload);
        let case = format!("{self:?}, {size} bytes at {mtu}");
        if size <= mtu {
            assert!(back.is_empty(), "{case}");
            assert_eq!(arrived.len(), 1, "{case}");
            let announced = arrived[0].partial_checksum.is_some();
            let expected = if announced {
                frames::unfinish(expected)
            } else {
                expected
            };
            assert_eq!(arrived[0].bytes[12..], expected[12..], "{case}");
        } else if self.v4 && !self.dont_fragment {
            assert!(back.is_empty(), "{case}");
            let arrived: Vec<_> = arrived.into_iter().map(|sent| sent.bytes).collect();
            let whole = naive::reassemble(&arrived, mtu);
            assert_eq!(whole, expected[naive::IP..], "{case}");
        } else {
            assert!(arrived.is_empty(), "{case}");
            assert_eq!(back.len(), 1, "{case}");
            let (kind, code, word, quote) = naive::icmp_error(&back[0], FROM);
            let expected = if self.v4 { (3, 4) } else { (2, 0) };
            assert_eq!(
                (kind, code, word as usize),
                (expected.0, expected.1, mtu),
                "{case}"
            );
            assert_eq!(quote, sent[naive::IP..][..quote.len()], "{case}");
        }
    }
}

fn case() -> impl Strategy<Value = Case> {
    (
        0..4,
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(|(protocol, v4, dont_fragment, unfinished, near)| Case {
            kind: match (protocol, v4) {
                (0, true) => Some(Kind::TcpV4),
                (0, false) => Some(Kind::TcpV6),
                (1, true) => Some(Kind::UdpV4),
                (1, false) => Some(Kind::UdpV6),
                (2, true) => Some(Kind::EchoV4),
                (2, false) => Some(Kind::EchoV6),
                _ => None,
            },
            v4,
            dont_fragment,
            unfinished,
            to: if near { NEAR } else { FAR },
        })
}

#[test]
fn any_packet_arrives_or_is_answered() {
    // Over an underlay of each family: the tunnel takes 50 bytes or 70.
    let clusters = [
        (RefCell::new(Cluster::new(2)), 1450),
        (RefCell::new(Cluster::over_ipv6(1)), 1430),
    ];
    let sizes = prop_oneof![0_usize..9000, 1360_usize..1460];
    proptest!(ProptestConfig::with_cases(1500), |(
        case in case(),
        len in sizes,
        seed: u8,
        which in 0_usize..2,
    )| {
        let payload: Vec<u8> = (0..len).map(|i| (i * 7 + i / 251) as u8 ^ seed).collect();
        let (cluster, far_mtu) = &clusters[which];
        let mtu = if case.to == FAR { *far_mtu } else { 1450 };
        case.check(&mut cluster.borrow_mut(), &payload, mtu);
    });
    for (cluster, _) in clusters {
        cluster.into_inner().finish();
    }
}

/// Pings of every size, one by one.
#[test]
fn echo_requests_of_every_size_up_to_9000() {
    let mut cluster = Cluster::new(1);
    let payload = vec![0x5a; 9000];
    for (v4, dont_fragment) in [(true, true), (true, false), (false, true)] {
        for to in [NEAR, FAR] {
            let case = Case {
                kind: Some(if v4 { Kind::EchoV4 } else { Kind::EchoV6 }),
                v4,
                dont_fragment,
                unfinished: false,
                to,
            };
            for len in 0..=payload.len() {
                case.check(&mut cluster, &payload[..len], 1450);
            }
        }
    }
    cluster.finish();
}

//! What the slow path would decide about a packet, stage by stage, with nothing kept: no
//! connection, no port, no client's place at a backend.

use std::net::IpAddr;

use super::party::{self, Party, Place};
use super::{Ask, Depends, connect, route};
use crate::classify;
use crate::conntrack::{Direction, Limits, PortPool, Tuple};
use crate::flow::Delivery;
use crate::ids::{EndpointId, IdentityId, LinkId, PeerId, WorkerId};
use crate::parse::{EthernetHeader, Headers, parse};
use crate::policy::{Judgement, PeerOf, Side};
use crate::service::Backend;
use crate::slow::Shared;
use crate::snapshot::{Endpoint, Snapshot};
use crate::time::Instant;
use crate::verdict::DropReason;
use crate::wire::ethernet::{ETHER_TYPE_IPV4, ETHER_TYPE_IPV6};
use crate::wire::ipv6::{ip_of_mapped, ip_to_mapped};
use crate::wire::{ethernet, icmp, icmpv6, ipv4, ipv6, protocol, sctp, tcp, udp};

/// The packet to ask about: the first of a connection that a pod begins.
#[derive(Clone, Copy, Debug)]
pub struct Probe {
    /// The pod.
    pub from: EndpointId,
    /// To whom.
    pub to: IpAddr,
    /// IP protocol: TCP, UDP, SCTP, or ICMP for an echo.
    pub protocol: u8,
    /// Destination port, where the protocol has one.
    pub port: u16,
}

/// Where a packet would leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// To a pod on this node.
    Endpoint(EndpointId),
    /// To this node itself.
    Host,
    /// Through the tunnel to another node.
    Peer(PeerId),
    /// Out of the cluster.
    World,
}

/// What each stage decided; a stage behind one that dropped the packet was not asked.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// Who sends.
    pub sender: IdentityId,
    /// The connection that the packet would belong to already.
    pub known: Option<Direction>,
    /// The backend, where the address is a Service's.
    pub backend: Option<Backend>,
    /// For whom the packet is, behind a Service.
    pub receiver: Option<(IpAddr, u16, IdentityId)>,
    /// What the sender's policies say.
    pub egress: Option<Judgement>,
    /// What the receiver's policies say, where it is on this node.
    pub ingress: Option<Judgement>,
    /// The address that the packet would come from instead of the sender's.
    pub source: Option<IpAddr>,
    /// Where it leaves, the largest packet that fits in bytes, and by which link.
    pub exit: Option<(Exit, u32, LinkId)>,
    /// Why it is dropped.
    pub dropped: Option<DropReason>,
}

/// Walks a packet through the stages that decide about it, with these tables and connections.
/// `None`: the pod is not there, or has no address of that IP version.
#[must_use]
pub fn explain(
    tables: &Snapshot,
    shared: &Shared,
    probe: &Probe,
    now: Instant,
) -> Option<Explanation> {
    let pod = tables.endpoint(probe.from)?;
    let frame = frame(pod, probe)?;
    let headers = parse(&frame, frame.len()).ok()?;
    let mut explanation = Explanation {
        sender: pod.identity,
        known: None,
        backend: None,
        receiver: None,
        egress: None,
        ingress: None,
        source: None,
        exit: None,
        dropped: None,
    };
    // What the stages would leave behind goes here, and with it.
    let scratch = Shared::new(Limits::new(8), PortPool::new(1..=1), 0, || {});
    let source = match classify::pod(tables, pod, &headers) {
        Ok(source) => source,
        Err(reason) => {
            explanation.dropped = Some(reason);
            return Some(explanation);
        }
    };
    let ask = Ask {
        source: &source,
        headers: &headers,
        tables,
        shared: &scratch,
        worker: WorkerId(0),
        hash: u64::from(probe.port).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        now,
    };
    let found = shared.connections.find(&Tuple::of(&headers), now);
    explanation.known = found.map(|found| found.direction);
    explanation.dropped = walk(&ask, &headers, &mut explanation).err();
    Some(explanation)
}

fn walk(ask: &Ask<'_>, headers: &Headers, explanation: &mut Explanation) -> Result<(), DropReason> {
    let mut depends = Depends::new(ask.tables);
    let sender = party::sender(ask, &mut depends)?;
    let tuple = Tuple::of(headers);
    explanation.backend = connect::backend(ask, &sender, &tuple, &mut depends)?;
    let mut forward = tuple;
    if let Some(backend) = &explanation.backend {
        forward.dst = ip_to_mapped(backend.address);
        forward.dst_port = backend.port;
    }
    let receiver = party::at(ask.tables, ip_of_mapped(forward.dst), &mut depends);
    explanation.receiver = Some((receiver.address, forward.dst_port, receiver.identity));
    let (protocol, port) = (tuple.protocol, forward.dst_port);
    explanation.egress = judgement(ask.tables, &sender, Side::Egress, &receiver, protocol, port);
    explanation.ingress = judgement(
        ask.tables,
        &receiver,
        Side::Ingress,
        &sender,
        protocol,
        port,
    );
    super::judge(ask.tables, &sender, &receiver, port, protocol)?;
    let backend = explanation.backend.as_ref();
    explanation.source = connect::source(ask, &sender, &receiver, backend)?;
    let speaker = route::Speaker {
        identity: (explanation.source).map_or(sender.identity, |_| IdentityId::HOST),
        through_here: explanation.source.is_some(),
        is_answer: false,
    };
    let action = route::to(ask, &sender, speaker, &receiver, &mut depends)?;
    let exit = match (receiver.place, &action.delivery) {
        (Place::Pod(pod), _) => Exit::Endpoint(pod.id),
        (Place::Host, _) => Exit::Host,
        (Place::Peer(peer) | Place::PeerNode(peer), Delivery::Tunnel(_)) => Exit::Peer(peer.id),
        (Place::Peer(_) | Place::PeerNode(_) | Place::Outside | Place::Nobody, _) => Exit::World,
    };
    explanation.exit = Some((exit, action.mtu, action.egress));
    Ok(())
}

/// What a party's policies say; `None` where it is no pod of this node.
fn judgement(
    tables: &Snapshot,
    party: &Party<'_>,
    side: Side,
    other: &Party<'_>,
    protocol: u8,
    port: u16,
) -> Option<Judgement> {
    let Place::Pod(pod) = party.place else {
        return None;
    };
    let peer = PeerOf {
        identity: other.identity,
        address: other.address,
    };
    Some(tables.policy(pod.id).judge(side, peer, protocol, port))
}

/// The port that a probe comes from.
const SOURCE_PORT: u16 = 40_000;

const TTL: u8 = 64;

/// The probe as the pod would send it.
fn frame(pod: &Endpoint, probe: &Probe) -> Option<Vec<u8>> {
    let own = pod.addresses.iter().copied();
    let from = own
        .into_iter()
        .find(|ip| ip.is_ipv4() == probe.to.is_ipv4())?;
    let l4 = transport(probe);
    let mut frame = vec![0; ethernet::HEADER_LEN];
    let l2 = EthernetHeader {
        dst: pod.gateway_mac,
        src: pod.mac,
    };
    match (from, probe.to) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            ethernet::write_header(frame.first_chunk_mut()?, l2, ETHER_TYPE_IPV4);
            let mut header = [0; ipv4::HEADER_LEN];
            let fields = ipv4::Ipv4Fields {
                tos: 0,
                total_len: (ipv4::HEADER_LEN + l4.len()) as u16,
                id: 0,
                dont_fragment: true,
                ttl: TTL,
                protocol: probe.protocol,
                src: src.octets(),
                dst: dst.octets(),
            };
            ipv4::write_header(&mut header, &fields);
            frame.extend_from_slice(&header);
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            ethernet::write_header(frame.first_chunk_mut()?, l2, ETHER_TYPE_IPV6);
            let mut header = [0; ipv6::HEADER_LEN];
            let fields = ipv6::Ipv6Fields {
                traffic_class: 0,
                flow_label: 0,
                payload_len: l4.len() as u16,
                next_header: probe.protocol,
                hop_limit: TTL,
                src: src.octets(),
                dst: dst.octets(),
            };
            ipv6::write_header(&mut header, &fields);
            frame.extend_from_slice(&header);
        }
        _ => return None,
    }
    frame.extend_from_slice(&l4);
    Some(frame)
}

/// The transport header of a first packet, without a checksum, which no stage looks at.
fn transport(probe: &Probe) -> Vec<u8> {
    let [s0, s1] = SOURCE_PORT.to_be_bytes();
    let [d0, d1] = probe.port.to_be_bytes();
    let mut header = vec![s0, s1, d0, d1];
    match probe.protocol {
        protocol::TCP => {
            header.resize(tcp::HEADER_LEN, 0);
            header[tcp::DATA_OFFSET_OFFSET] = (tcp::HEADER_LEN as u8 / 4) << 4;
            header[tcp::FLAGS_OFFSET] = tcp::TcpFlags::SYN.0;
        }
        protocol::UDP => header.extend([0, udp::HEADER_LEN as u8, 0, 0]),
        protocol::SCTP => header.resize(sctp::HEADER_LEN, 0),
        protocol::ICMP => header = vec![icmp::ECHO_REQUEST, 0, 0, 0, 0, 1, 0, 1],
        protocol::ICMPV6 => header = vec![icmpv6::ECHO_REQUEST, 0, 0, 0, 0, 1, 0, 1],
        _ => header.resize(8, 0),
    }
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{UPLINK, endpoint, node, peer, pod_v4, pod_v6, remote, shared};
    use crate::snapshot::SnapshotBuilder;

    fn tables() -> Snapshot {
        let mut builder = SnapshotBuilder::new(&Snapshot::empty(node(1)));
        builder.add_uplink_link(UPLINK, WorkerId(0), 0).unwrap();
        builder.set_endpoint(endpoint(1, 1), WorkerId(0)).unwrap();
        builder.set_endpoint(endpoint(1, 2), WorkerId(0)).unwrap();
        builder.set_peer(peer(1, 2)).unwrap();
        let (address, pod) = remote(2, 1);
        builder.set_remote_pod(address, pod).unwrap();
        builder.finish()
    }

    fn asked(to: IpAddr, protocol: u8) -> Explanation {
        let shared = shared();
        let probe = Probe {
            from: EndpointId(1),
            to,
            protocol,
            port: 80,
        };
        let explanation = explain(&tables(), &shared, &probe, Instant::default()).unwrap();
        assert!(shared.connections.is_empty(), "nothing is kept");
        explanation
    }

    #[test]
    fn each_way_out_is_told() {
        for protocol in [protocol::TCP, protocol::UDP, protocol::SCTP] {
            let near = asked(pod_v4(1, 2).into(), protocol);
            assert_eq!(
                near.exit,
                Some((Exit::Endpoint(EndpointId(2)), 1450, LinkId(2)))
            );
            assert_eq!(near.ingress, Some(Judgement::NotIsolated));
            let far = asked(pod_v6(2, 1).into(), protocol);
            assert!(matches!(far.exit, Some((Exit::Peer(PeerId(2)), _, UPLINK))));
            assert_eq!(far.ingress, None);
        }
        let echo = asked(pod_v4(2, 1).into(), protocol::ICMP);
        assert!(echo.exit.is_some() && echo.dropped.is_none());
    }

    #[test]
    fn a_drop_has_its_reason_and_no_exit() {
        let nowhere = asked([9, 9, 9, 9].into(), protocol::TCP);
        assert_eq!(nowhere.dropped, Some(DropReason::NoRoute));
        assert_eq!(nowhere.exit, None);
        let group = asked([224, 0, 0, 1].into(), protocol::UDP);
        assert_eq!(group.dropped, Some(DropReason::Multicast));
    }
}

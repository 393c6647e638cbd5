//! Two pods over a wire of two links, in each XDP mode, with and without each feature.

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use skein_dataplane::ids::{LinkId, QueueId};
use skein_dataplane::io::link::XskCounters;
use skein_dataplane::io::open::{OpenOptions, open_links};
use skein_dataplane::io::program::{AttachedMode, LinkKind, XdpMode};
use skein_dataplane::io::{Link, LinkStatistics};

use crate::forwarder::Forwarder;
use crate::lab::in_lab;
use crate::{Memory, traffic};

fn assert_clean(counts: &[(XskCounters, LinkStatistics); 2]) {
    for (counters, statistics) in counts {
        assert_eq!(counters.bad_descriptors, 0);
        assert_eq!(counters.rx_broken, 0);
        assert_eq!(statistics.tx_invalid, 0, "{counters:?}");
    }
}

/// Ping, UDP and TCP pass, and every frame comes back.
fn check(mode: XdpMode, disable: &[&str]) {
    in_lab(|lab| {
        let memory = Memory::new(disable);
        let (a, b) = (lab.pod("ha", 1, 1500), lab.pod("hb", 2, 1500));
        for pod in [&a, &b] {
            // A device MTU of 1500 takes no super-packets.
            pod.run("ethtool -K eth0 tso off gso off");
        }
        let (link_a, _a) = memory.open_pod(lab, &a, mode);
        let (link_b, handle) = memory.open_pod(lab, &b, mode);
        let expected = match mode {
            XdpMode::Native => AttachedMode::Native,
            XdpMode::Auto | XdpMode::Generic => AttachedMode::Generic,
        };
        assert_eq!(handle.mode(), expected);
        let forwarder = Forwarder::start([link_a, link_b], &memory.store);
        traffic::ping(&a, "10.1.1.2", 56);
        traffic::ping(&b, "fd00::1", 1400);
        traffic::udp(&a, &b, 64);
        traffic::tcp(&a, &b, 8 << 20);
        traffic::tcp(&b, &a, 1 << 20);
        let partial = forwarder.seen.partial_checksums.load(Ordering::Relaxed);
        assert!(partial > 100, "TCP of a veth comes with partial checksums");
        assert_clean(&forwarder.stop());
        memory.assert_balanced();
    });
}

#[test]
fn generic() {
    check(XdpMode::Generic, &[]);
}

#[test]
fn generic_without_multi_buffer() {
    check(XdpMode::Generic, &["multi-buffer"]);
}

#[test]
fn generic_without_tx_metadata() {
    check(XdpMode::Generic, &["tx-metadata"]);
}

#[test]
fn generic_without_both() {
    check(XdpMode::Generic, &["multi-buffer", "tx-metadata"]);
}

#[test]
fn native() {
    check(XdpMode::Native, &[]);
}

#[test]
fn native_without_multi_buffer() {
    check(XdpMode::Native, &["multi-buffer"]);
}

#[test]
fn native_without_tx_metadata() {
    check(XdpMode::Native, &["tx-metadata"]);
}

#[test]
fn native_without_both() {
    check(XdpMode::Native, &["multi-buffer", "tx-metadata"]);
}

/// Frames of 9000 bytes and more cross in several segments, in and out.
fn check_jumbo(mode: XdpMode) {
    in_lab(|lab| {
        let memory = Memory::new(&[]);
        if !memory.features.multi_buffer {
            eprintln!("this kernel has no AF_XDP multi-buffer (Linux 6.6): nothing to test");
            return;
        }
        let (a, b) = (lab.pod("ha", 1, 9000), lab.pod("hb", 2, 9000));
        for pod in [&a, &b] {
            pod.run("ethtool -K eth0 tso off gso off");
        }
        let (link_a, _a) = memory.open_pod(lab, &a, mode);
        let (link_b, _b) = memory.open_pod(lab, &b, mode);
        let forwarder = Forwarder::start([link_a, link_b], &memory.store);
        traffic::ping(&a, "10.1.1.2", 8972);
        traffic::udp(&a, &b, 8900);
        traffic::tcp(&a, &b, 8 << 20);
        let several = forwarder.seen.several_segments.load(Ordering::Relaxed);
        assert!(several > 100, "only {several} frames of several segments");
        assert_eq!(forwarder.seen.largest.load(Ordering::Relaxed), 9014);
        assert_clean(&forwarder.stop());
        memory.assert_balanced();
    });
}

#[test]
fn jumbo_frames_generic() {
    check_jumbo(XdpMode::Generic);
}

#[test]
fn jumbo_frames_native() {
    check_jumbo(XdpMode::Native);
}

/// In generic mode the pod keeps its TSO: super-packets of up to 64 KiB cross in one piece.
#[test]
fn super_packets_cross_whole() {
    in_lab(|lab| {
        let memory = Memory::new(&[]);
        if !memory.features.multi_buffer {
            eprintln!("this kernel has no AF_XDP multi-buffer (Linux 6.6): nothing to test");
            return;
        }
        let (a, b) = (lab.pod("ha", 1, 65535), lab.pod("hb", 2, 65535));
        for pod in [&a, &b] {
            pod.run("ip route change 10.1.1.0/24 dev eth0 mtu 1450");
        }
        let (link_a, _a) = memory.open_pod(lab, &a, XdpMode::Generic);
        let (link_b, _b) = memory.open_pod(lab, &b, XdpMode::Generic);
        let forwarder = Forwarder::start([link_a, link_b], &memory.store);
        traffic::tcp(&a, &b, 64 << 20);
        let largest = forwarder.seen.largest.load(Ordering::Relaxed);
        assert!(largest > 32_000, "the largest had {largest} bytes");
        assert_clean(&forwarder.stop());
        memory.assert_balanced();
    });
}

/// In native mode each queue of a device is a link of its own, and flows spread over them.
#[test]
fn two_queues_of_a_device_are_two_links() {
    in_lab(|lab| {
        let memory = Memory::new(&[]);
        let a = lab.pod_with_queues("ha", 1, 1500, 2);
        a.run("ip neigh replace 10.1.1.2 lladdr 02:00:00:00:00:09 dev eth0 nud permanent");
        let mut pool = memory.pool();
        let queues = [(QueueId(0), LinkId(10)), (QueueId(1), LinkId(11))];
        let bpffs = lab.bpffs();
        let options = OpenOptions::new(LinkKind::Pod, XdpMode::Native, &bpffs);
        let (mut links, _handle) =
            open_links(&a.device, &queues, &options, &memory.factory, &mut pool).unwrap();
        a.up();
        // Fewer than a link lends its device at first: nobody receives yet.
        const FLOWS: usize = 30;
        a.inside(|| {
            for _ in 0..FLOWS {
                let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
                socket.send_to(b"a flow", "10.1.1.2:9").unwrap();
            }
        })
        .join()
        .unwrap();
        let mut counts = [0; 2];
        let mut batch = Vec::new();
        let start = Instant::now();
        while counts.iter().sum::<usize>() < FLOWS && start.elapsed() < Duration::from_secs(5) {
            for ((link, count), (_, id)) in links.iter_mut().zip(&mut counts).zip(&queues) {
                link.receive(&mut pool, &mut batch);
                for packet in batch.drain(..) {
                    *count += usize::from(packet.to_vec(pool.umem()).ends_with(b"a flow"));
                    assert_eq!(packet.ingress, *id);
                    pool.give_packet(packet);
                }
            }
        }
        assert_eq!(counts.iter().sum::<usize>(), FLOWS);
        assert!(counts.iter().all(|&count| count > 0), "{counts:?}");
        for link in links {
            Box::new(link).close(&mut pool);
        }
        drop(pool);
        memory.assert_balanced();
    });
}

/// Without multi-buffer a frame larger than a chunk is lost on receipt, and only that.
#[test]
fn a_frame_that_does_not_fit_a_chunk_is_dropped_and_counted() {
    in_lab(|lab| {
        let memory = Memory::new(&["multi-buffer"]);
        let (a, b) = (lab.pod("ha", 1, 9000), lab.pod("hb", 2, 9000));
        let (link_a, _a) = memory.open_pod(lab, &a, XdpMode::Generic);
        let (link_b, _b) = memory.open_pod(lab, &b, XdpMode::Generic);
        let forwarder = Forwarder::start([link_a, link_b], &memory.store);
        traffic::ping(&a, "10.1.1.2", 3000);
        let (answered, output) = a.try_run("ping -n -c 2 -i 0.05 -W 1 -M do -s 8000 10.1.1.2");
        assert!(!answered, "{output}");
        traffic::ping(&a, "10.1.1.2", 56);
        let counts = forwarder.stop();
        assert!(counts[0].1.rx_dropped >= 2, "{:?}", counts[0].1);
        memory.assert_balanced();
    });
}

//! What goes wrong with sockets and devices: nothing leaks, nothing hangs, nothing passes that
//! should not.

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use skein_dataplane::ids::{LinkId, QueueId};
use skein_dataplane::io::features::Features;
use skein_dataplane::io::link::XskLink;
use skein_dataplane::io::packet::{MAX_SEGMENTS, Packet, PartialChecksum, Segment};
use skein_dataplane::io::program::XdpMode;
use skein_dataplane::io::xsk::{RingSizes, XskFactory};
use skein_dataplane::io::{Flush, Link};

use crate::forwarder::Forwarder;
use crate::lab::{Pod, in_lab};
use crate::{Memory, traffic};

/// Sends datagrams from the pod to nobody until the flag is set.
fn flood(pod: &Pod<'_>, target: Ipv4Addr) -> (Arc<AtomicBool>, JoinHandle<u64>) {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let thread = pod.inside(move || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let mut sent = 0;
        while !stopped.load(Ordering::Relaxed) {
            sent += u64::from(socket.send_to(&[0; 1000], (target, 9)).is_ok());
        }
        sent
    });
    (stop, thread)
}

/// The neighbour entry that lets a pod send without an answer.
fn know(pod: &Pod<'_>, address: &str) {
    pod.run(&format!(
        "ip neigh replace {address} lladdr 02:00:00:00:00:09 dev eth0 nud permanent"
    ));
}

fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "waited for {what}"
        );
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn closing_while_traffic_runs_returns_every_frame_and_the_queue_can_be_opened_again() {
    in_lab(|lab| {
        let memory = Memory::new(&[]);
        let (a, b) = (lab.pod("ha", 1, 1500), lab.pod("hb", 2, 1500));
        know(&a, "10.1.1.2");
        know(&b, "10.1.1.1");
        for round in 0..5 {
            let (link_a, _a) = memory.open_pod(lab, &a, XdpMode::Generic);
            let (link_b, handle) = memory.open_pod(lab, &b, XdpMode::Generic);
            assert_eq!(handle.taken_over(), round > 0);
            let floods = [flood(&a, b.address), flood(&b, a.address)];
            let forwarder = Forwarder::start([link_a, link_b], &memory.store);
            let seen = Arc::clone(&forwarder.seen);
            wait_for("packets", || seen.packets.load(Ordering::Relaxed) > 5000);
            forwarder.stop();
            memory.assert_balanced();
            for (stop, thread) in floods {
                stop.store(true, Ordering::Relaxed);
                assert!(thread.join().unwrap() > 0);
            }
        }
    });
}

#[test]
fn a_device_deleted_under_its_socket_is_dead_and_its_frames_come_back() {
    in_lab(|lab| {
        let memory = Memory::new(&[]);
        let (a, b) = (lab.pod("ha", 1, 1500), lab.pod("hb", 2, 1500));
        know(&a, "10.1.1.2");
        let (link_a, handle_a) = memory.open_pod(lab, &a, XdpMode::Generic);
        let (link_b, _b) = memory.open_pod(lab, &b, XdpMode::Generic);
        let (stop, thread) = flood(&a, b.address);
        let forwarder = Forwarder::start([link_a, link_b], &memory.store);
        let seen = Arc::clone(&forwarder.seen);
        wait_for("packets", || seen.packets.load(Ordering::Relaxed) > 1000);
        lab.run("ip link del hb");
        wait_for("a dead link", || seen.dead.load(Ordering::Relaxed));
        stop.store(true, Ordering::Relaxed);
        thread.join().unwrap();
        forwarder.stop();
        memory.assert_balanced();
        drop(handle_a);

        // A device of the same name is another device: its program is attached anew.
        let b = lab.pod("hb", 3, 1500);
        let (link_b, handle) = memory.open_pod(lab, &b, XdpMode::Generic);
        assert!(!handle.taken_over());
        Box::new(link_b).close(&mut memory.pool());
        memory.assert_balanced();
    });
}

#[test]
fn a_device_down_is_dead_and_works_again_when_up() {
    in_lab(|lab| {
        let memory = Memory::new(&[]);
        let (a, b) = (lab.pod("ha", 1, 1500), lab.pod("hb", 2, 1500));
        let (link_a, _a) = memory.open_pod(lab, &a, XdpMode::Generic);
        let (mut link_b, _b) = memory.open_pod(lab, &b, XdpMode::Generic);
        let mut pool = memory.pool();
        lab.run("ip link set hb down");
        let packet = Packet::from_bytes(&mut pool, LinkId(0), &[0xff; 60]).unwrap();
        link_b.send(&mut pool, packet).unwrap();
        assert_eq!(link_b.flush(&mut pool), Flush::Dead);
        lab.run("ip link set hb up");
        wait_for("the device", || link_b.flush(&mut pool) == Flush::Done);
        drop(pool);
        let forwarder = Forwarder::start([link_a, link_b], &memory.store);
        traffic::ping(&a, "10.1.1.2", 56);
        forwarder.stop();
        memory.assert_balanced();
    });
}

#[test]
fn without_its_socket_a_pods_frames_are_dropped_and_never_reach_the_kernel() {
    in_lab(|lab| {
        let memory = Memory::new(&[]);
        let a = lab.pod("ha", 1, 1500);
        lab.run("ip addr add 10.1.1.9/24 dev ha");
        let (link, handle) = memory.open_pod(lab, &a, XdpMode::Generic);
        let ping = "ping -n -c 2 -i 0.05 -W 1 10.1.1.9";
        Box::new(link).close(&mut memory.pool());
        let (answered, output) = a.try_run(ping);
        assert!(!answered, "the kernel answered past the program: {output}");
        // The program is what stood between.
        handle.detach().expect("the program taken away");
        a.run(ping);
        memory.assert_balanced();
    });
}

#[test]
fn what_a_socket_cannot_send_is_refused_and_its_frames_come_back() {
    in_lab(|lab| {
        let memory = Memory::new(&[]);
        let a = lab.pod("ha", 1, 1500);
        let (mut link, _a) = memory.open_pod(lab, &a, XdpMode::Generic);
        let mut pool = memory.pool();
        let beyond = PartialChecksum {
            start: 34,
            offset: 30,
        };
        let mut checksum = Packet::from_bytes(&mut pool, LinkId(0), &[0; 60]).unwrap();
        checksum.partial_checksum = Some(beyond);
        link.send(&mut pool, checksum).unwrap();
        let empty = Packet::from_bytes(&mut pool, LinkId(0), &[]).unwrap();
        link.send(&mut pool, empty).unwrap();
        let mut refused = 2;
        if memory.features.tx_metadata {
            let frame = pool.take().unwrap();
            let front = Packet::new(LinkId(0), Segment::new(frame, 8, 60).unwrap());
            link.send(&mut pool, front).unwrap();
            refused += 1;
        }
        assert_eq!(link.counters().tx_refused, refused);
        assert_eq!(link.lent().1, 0);
        // Larger than the device takes, in as many segments as there may be: dropped by the
        // kernel, and completed.
        let largest = vec![0xff; MAX_SEGMENTS * 3840];
        for _ in 0..10 {
            let packet = Packet::from_bytes(&mut pool, LinkId(0), &largest).unwrap();
            link.send(&mut pool, packet).unwrap();
        }
        wait_for("the kernel", || link.flush(&mut pool) == Flush::Done);
        wait_for("completions", || {
            link.flush(&mut pool);
            link.lent().1 == 0
        });
        Box::new(link).close(&mut pool);
        drop(pool);
        memory.assert_balanced();
    });
}

#[test]
fn a_link_that_the_empty_pool_left_without_frames_hears_again_once_there_are_some() {
    in_lab(|lab| {
        let memory = Memory::new(&[]);
        let a = lab.pod("ha", 1, 1500);
        know(&a, "10.1.1.2");
        let (mut link, _a) = memory.open_pod(lab, &a, XdpMode::Generic);
        let mut pool = memory.pool();
        let (stop, thread) = flood(&a, Ipv4Addr::new(10, 1, 1, 2));
        // Others have every frame, so what is received is not replaced.
        let mut taken: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        let mut received = Vec::new();
        wait_for("a device without frames", || {
            let mut batch = Vec::new();
            link.receive(&mut pool, &mut batch);
            received.append(&mut batch);
            link.lent().0 == 0
        });
        assert!(link.counters().pool_empty > 0);
        let readable = |link: &XskLink, milliseconds: i64| {
            let fd = link.poll_fd().unwrap();
            let limit = Timespec {
                tv_sec: 0,
                tv_nsec: milliseconds * 1_000_000,
            };
            poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)).unwrap() > 0
        };
        assert!(!readable(&link, 100), "packets without a frame to be in");
        taken.drain(..).for_each(|frame| pool.give(frame));
        received
            .drain(..)
            .for_each(|packet| pool.give_packet(packet));
        // A worker comes by now and then, be there anything to send or not.
        assert_eq!(link.flush(&mut pool), Flush::Done);
        wait_for("a packet", || readable(&link, 1));
        stop.store(true, Ordering::Relaxed);
        thread.join().unwrap();
        Box::new(link).close(&mut pool);
        drop(pool);
        memory.assert_balanced();
    });
}

#[test]
fn a_full_transmit_ring_hands_the_packet_back() {
    in_lab(|lab| {
        let memory = Memory::new(&[]);
        let a = lab.pod("ha", 1, 1500);
        let (mut link, _a) = memory.open_pod(lab, &a, XdpMode::Generic);
        let mut pool = memory.pool();
        let mut queued = 0;
        let packet = loop {
            let packet = Packet::from_bytes(&mut pool, LinkId(0), &[0xff; 60]).unwrap();
            match link.send(&mut pool, packet) {
                Ok(()) => queued += 1,
                Err(packet) => break packet,
            }
        };
        assert_eq!(queued, RingSizes::default().tx);
        pool.give_packet(packet);
        wait_for("the kernel", || link.flush(&mut pool) == Flush::Done);
        assert_eq!(link.statistics().tx_invalid, 0);
        Box::new(link).close(&mut pool);
        drop(pool);
        memory.assert_balanced();
    });
}

#[test]
fn a_second_agent_in_the_namespace_is_refused_with_what_to_do() {
    in_lab(|_lab| {
        let memory = Memory::new(&[]);
        let error = XskFactory::new(Arc::clone(memory.store.umem()), memory.features).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("lo queue 0: bind"), "{text}");
        assert!(text.contains("second agent"), "{text}");
    });
}

#[test]
fn a_queue_that_the_device_has_not_is_refused_with_what_to_do() {
    in_lab(|lab| {
        let memory = Memory::new(&[]);
        let a = lab.pod("ha", 1, 1500);
        let sizes = RingSizes::default();
        let opened = memory.factory.open(&a.device, QueueId(7), &sizes);
        let text = opened.unwrap_err().to_string();
        assert!(text.contains("ha queue 7: bind"), "{text}");
        assert!(text.contains("have this queue"), "{text}");
    });
}

#[test]
fn features_are_found_as_the_kernels_version_says_and_can_be_turned_off() {
    in_lab(|lab| {
        let release = lab.run("uname -r");
        let mut numbers = release
            .split(|c: char| !c.is_ascii_digit())
            .map(|number| number.parse::<u32>().unwrap_or(0));
        let version = (numbers.next().unwrap(), numbers.next().unwrap());
        let all = Features::probe(&[]).unwrap();
        assert_eq!(all.multi_buffer, version >= (6, 6), "{release}");
        assert_eq!(all.tx_metadata, version >= (6, 11), "{release}");
        let names = ["multi-buffer", "tx-metadata", "native-xdp"].map(String::from);
        assert_eq!(Features::probe(&names).unwrap(), Features::NONE);
    });
}

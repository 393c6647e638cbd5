//! The XDP programs: what they take, what they leave, and who may replace them.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use aya::programs::links::{FdLink, PinnedLink};
use skein_dataplane::ids::{LinkId, QueueId};
use skein_dataplane::io::Link;
use skein_dataplane::io::features::Features;
use skein_dataplane::io::link::XskLink;
use skein_dataplane::io::open::{OpenOptions, open_link};
use skein_dataplane::io::program::{AttachedMode, LinkKind, Overlay, XdpMode};

use crate::forwarder::Forwarder;
use crate::lab::{Pod, in_lab};
use crate::{Memory, traffic};

const PORT: u16 = 8472;
const OWN_V4: Ipv4Addr = Ipv4Addr::new(10, 1, 1, 9);
const OTHER_V4: Ipv4Addr = Ipv4Addr::new(10, 1, 1, 8);
const OWN_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 9);

/// Sends a datagram from the pod.
fn send(pod: &Pod<'_>, target: SocketAddr, payload: &[u8]) {
    let payload = payload.to_vec();
    let sent = pod.inside(move || {
        let local: SocketAddr = if target.is_ipv4() {
            (Ipv4Addr::UNSPECIFIED, 0).into()
        } else {
            (Ipv6Addr::UNSPECIFIED, 0).into()
        };
        let socket = UdpSocket::bind(local).unwrap();
        socket.send_to(&payload, target).unwrap();
    });
    sent.join().expect("the sender");
}

/// The packets that come in by the link within a while, or until there are `enough`.
fn received(memory: &Memory, link: &mut XskLink, enough: usize) -> Vec<Vec<u8>> {
    let mut pool = memory.pool();
    let (mut batch, mut packets) = (Vec::new(), Vec::new());
    let start = Instant::now();
    while packets.len() < enough && start.elapsed() < Duration::from_secs(5) {
        link.receive(&mut pool, &mut batch);
        for packet in batch.drain(..) {
            packets.push(packet.to_vec(pool.umem()));
            pool.give_packet(packet);
        }
        thread::sleep(Duration::from_millis(1));
    }
    packets
}

/// What the host's kernel hands to a socket at that address.
fn kernel_receives(at: SocketAddr, send: impl FnOnce()) -> Option<Vec<u8>> {
    let socket = UdpSocket::bind(at).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(2)))
        .unwrap();
    send();
    let mut buffer = [0; 2000];
    socket
        .recv(&mut buffer)
        .ok()
        .map(|len| buffer[..len].to_vec())
}

/// The kernel's number of the link that is pinned for the pod's device.
fn link_id(bpffs: &Path, pod: &Pod<'_>) -> u32 {
    let pin = format!("skein/ha/link-generic-{}", pod.device.index);
    let link = PinnedLink::from_pin(bpffs.join(pin)).expect("a pinned link");
    FdLink::from(link).info().expect("its number").id()
}

/// The kernel's number of the program, as `ip link show` tells it.
fn program_id(shown: &str) -> u32 {
    let mut words = shown.split_whitespace();
    words.find(|&word| word == "prog/xdp").expect("a program");
    let number = words.nth(1).expect("its number");
    number.parse().expect("a number")
}

fn check_uplink(mode: XdpMode) {
    in_lab(|lab| {
        let memory = Memory::new(&[]);
        // The pod plays the outside, its veth's host end the node's uplink.
        let outside = lab.pod("ha", 1, 1500);
        lab.run(&format!("ip addr add {OWN_V4}/24 dev ha"));
        lab.run(&format!("ip addr add {OTHER_V4}/24 dev ha"));
        lab.run(&format!("ip addr add {OWN_V6}/64 dev ha nodad"));
        let overlay = Overlay {
            port: PORT,
            ipv4: Some(OWN_V4),
            ipv6: Some(OWN_V6),
        };
        let (mut link, mut handle) = memory
            .open(lab, &outside, LinkKind::Uplink(overlay), mode)
            .expect("an open uplink");
        outside.up();
        traffic::ping(&outside, "10.1.1.9", 56);
        traffic::ping(&outside, "fd00::9", 56);

        for own in [OWN_V4.into(), OWN_V6.into()] {
            let at = SocketAddr::new(own, PORT);
            send(&outside, at, b"overlay");
            let packets = received(&memory, &mut link, 1);
            assert_eq!(packets.len(), 1, "from {own}");
            assert!(packets[0].ends_with(b"overlay"));
            // Another port, another address, a fragmented datagram: the kernel's.
            let next = SocketAddr::new(own, PORT + 1);
            let got = kernel_receives(next, || send(&outside, next, b"other port"));
            assert_eq!(got.as_deref(), Some(&b"other port"[..]));
        }
        let other = SocketAddr::new(OTHER_V4.into(), PORT);
        let got = kernel_receives(other, || send(&outside, other, b"other address"));
        assert_eq!(got.as_deref(), Some(&b"other address"[..]));
        let own = SocketAddr::new(OWN_V4.into(), PORT);
        let fragmented = [7; 1900];
        let got = kernel_receives(own, || send(&outside, own, &fragmented));
        assert_eq!(got.as_deref(), Some(&fragmented[..]));

        // The port moves; without a socket the overlay is dropped and all else passes.
        handle
            .set_overlay(Overlay {
                port: PORT + 1,
                ..overlay
            })
            .unwrap();
        let got = kernel_receives(own, || send(&outside, own, b"old port"));
        assert_eq!(got.as_deref(), Some(&b"old port"[..]));
        Box::new(link).close(&mut memory.pool());
        let now = SocketAddr::new(OWN_V4.into(), PORT + 1);
        let got = kernel_receives(now, || send(&outside, now, b"nobody"));
        assert_eq!(got, None, "the kernel got what was ours");
        traffic::ping(&outside, "10.1.1.9", 56);
        memory.assert_balanced();
    });
}

#[test]
fn an_uplink_keeps_all_but_the_overlay_generic() {
    check_uplink(XdpMode::Generic);
}

#[test]
fn an_uplink_keeps_all_but_the_overlay_native() {
    check_uplink(XdpMode::Native);
}

#[test]
fn a_second_instance_keeps_the_pinned_program() {
    in_lab(|lab| {
        let (a, b) = (lab.pod("ha", 1, 1500), lab.pod("hb", 2, 1500));
        lab.run("ip addr add 10.1.1.9/24 dev ha");
        let first = Memory::new(&[]);
        let (link, handle) = first.open_pod(lab, &a, XdpMode::Generic);
        assert!(!handle.taken_over());
        // The first instance ends: its sockets and descriptors close, the pins stay.
        Box::new(link).close(&mut first.pool());
        drop((handle, first));
        let (answered, output) = a.try_run("ping -n -c 1 -W 1 10.1.1.9");
        assert!(!answered, "the program is gone with its loader: {output}");
        let link_before = link_id(&lab.bpffs(), &a);
        let program_before = program_id(&lab.run("ip link show dev ha"));

        let second = Memory::new(&[]);
        let (link_a, handle) = second.open_pod(lab, &a, XdpMode::Auto);
        assert!(handle.taken_over());
        assert_eq!(
            handle.mode(),
            AttachedMode::Generic,
            "auto keeps what is there"
        );
        assert_eq!(
            link_id(&lab.bpffs(), &a),
            link_before,
            "the same attachment"
        );
        let program = program_id(&lab.run("ip link show dev ha"));
        assert_eq!(program, program_before, "the same code is not loaded again");
        let (link_b, _b) = second.open_pod(lab, &b, XdpMode::Generic);
        let forwarder = Forwarder::start([link_a, link_b], &second.store);
        traffic::ping(&a, "10.1.1.2", 56);
        forwarder.stop();
        second.assert_balanced();
    });
}

/// Opens and closes the pod's link with one set of features, then with another; returns the
/// programs' numbers.
fn opened_twice(disable: [&[&str]; 2], between: fn(&Path)) -> [u32; 2] {
    let mut programs = [0; 2];
    in_lab(|lab| {
        let a = lab.pod("ha", 1, 1500);
        let mut links = Vec::new();
        for (program, disable) in programs.iter_mut().zip(disable) {
            let memory = Memory::new(disable);
            let (link, _handle) = memory.open_pod(lab, &a, XdpMode::Generic);
            Box::new(link).close(&mut memory.pool());
            memory.assert_balanced();
            *program = program_id(&lab.run("ip link show dev ha"));
            links.push(link_id(&lab.bpffs(), &a));
            between(&lab.bpffs().join("skein/ha"));
        }
        assert_eq!(links[0], links[1], "swapped in place");
    });
    programs
}

#[test]
fn a_pinned_program_of_another_kind_is_swapped() {
    let [first, second] = opened_twice([&[], &["multi-buffer"]], |_| {});
    assert_ne!(first, second);
}

#[test]
fn a_pinned_program_whose_maps_are_not_beside_it_is_swapped() {
    let [first, second] = opened_twice([&[], &[]], |_| {});
    assert_eq!(first, second);
    let [first, second] = opened_twice([&[], &[]], |pins| {
        std::fs::remove_file(pins.join("xsks")).unwrap();
    });
    assert_ne!(first, second);
}

#[test]
fn a_pinned_program_in_another_mode_is_replaced_and_the_device_is_up_again() {
    in_lab(|lab| {
        let (a, b) = (lab.pod("ha", 1, 1500), lab.pod("hb", 2, 1500));
        let memory = Memory::new(&[]);
        let (link, _) = memory.open_pod(lab, &a, XdpMode::Generic);
        Box::new(link).close(&mut memory.pool());
        let (link_a, handle) = memory
            .open(lab, &a, LinkKind::Pod, XdpMode::Native)
            .expect("an open link");
        assert_eq!(handle.mode(), AttachedMode::Native);
        assert!(!handle.taken_over());
        let (link_b, _b) = memory.open_pod(lab, &b, XdpMode::Native);
        let forwarder = Forwarder::start([link_a, link_b], &memory.store);
        traffic::ping(&a, "10.1.1.2", 56);
        forwarder.stop();
        memory.assert_balanced();
    });
}

#[test]
fn where_the_driver_refuses_auto_falls_back_and_says_why() {
    in_lab(|lab| {
        // Without multi-buffer a veth's driver takes no program at this MTU.
        let memory = Memory::new(&["multi-buffer"]);
        let (a, b) = (lab.pod("ha", 1, 9000), lab.pod("hb", 2, 9000));
        let refused = memory.open(lab, &a, LinkKind::Pod, XdpMode::Native);
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("ha in native mode"), "{text}");
        assert!(text.contains("MTU"), "{text}");
        memory.assert_balanced();

        let (link_a, handle) = memory.open_pod(lab, &a, XdpMode::Auto);
        assert_eq!(handle.mode(), AttachedMode::Generic);
        assert!(handle.fallback().is_some_and(|why| why.contains("MTU")));
        let (link_b, _b) = memory.open_pod(lab, &b, XdpMode::Generic);
        let forwarder = Forwarder::start([link_a, link_b], &memory.store);
        traffic::ping(&a, "10.1.1.2", 56);
        forwarder.stop();
        memory.assert_balanced();
    });
}

#[test]
fn native_mode_turned_off_is_not_tried() {
    in_lab(|lab| {
        let memory = Memory::new(&["native-xdp"]);
        let a = lab.pod("ha", 1, 1500);
        let refused = memory.open(lab, &a, LinkKind::Pod, XdpMode::Native);
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("native-xdp is disabled"), "{text}");
        let (link, handle) = memory.open_pod(lab, &a, XdpMode::Auto);
        assert_eq!(handle.mode(), AttachedMode::Generic);
        assert_eq!(handle.fallback(), None);
        Box::new(link).close(&mut memory.pool());
        memory.assert_balanced();
    });
}

#[test]
fn another_program_on_the_device_is_left_alone_and_named() {
    in_lab(|lab| {
        let memory = Memory::new(&[]);
        let a = lab.pod("ha", 1, 1500);
        let (link, _theirs) = memory.open_pod(lab, &a, XdpMode::Generic);
        Box::new(link).close(&mut memory.pool());
        // Seen from another folder of pins, that program is somebody else's.
        for mode in [XdpMode::Generic, XdpMode::Native, XdpMode::Auto] {
            let elsewhere = lab.bpffs().join("elsewhere");
            let opened = open_link(
                &a.device,
                QueueId(0),
                LinkId(0),
                &OpenOptions::new(LinkKind::Pod, mode, &elsewhere),
                &memory.factory,
                &mut memory.pool(),
            );
            let text = opened.unwrap_err().to_string();
            assert!(text.contains("another XDP program is there"), "{text}");
            memory.assert_balanced();
        }
        assert!(lab.run("ip link show dev ha").contains("xdpgeneric"));
    });
}

#[test]
fn detaching_leaves_nothing_behind() {
    in_lab(|lab| {
        let memory = Memory::new(&[]);
        let a = lab.pod("ha", 1, 1500);
        let (link, handle) = memory.open_pod(lab, &a, XdpMode::Generic);
        let folder = lab.bpffs().join("skein/ha");
        for pin in ["program", "xsks"] {
            assert!(folder.join(pin).exists(), "{pin}");
        }
        Box::new(link).close(&mut memory.pool());
        handle.detach().unwrap();
        assert!(!folder.exists());
        // The kernel lets go of it behind a grace period.
        let deadline = Instant::now() + Duration::from_secs(10);
        while lab.run("ip link show dev ha").contains("xdp") {
            assert!(Instant::now() < deadline, "the program stays");
            thread::sleep(Duration::from_millis(5));
        }
    });
}

#[test]
fn without_a_bpffs_the_message_says_how_to_get_one() {
    in_lab(|lab| {
        let memory = Memory::new(&[]);
        let a = lab.pod("ha", 1, 1500);
        let plain = tempfile::tempdir().unwrap();
        let opened = open_link(
            &a.device,
            QueueId(0),
            LinkId(0),
            &OpenOptions::new(LinkKind::Pod, XdpMode::Generic, plain.path()),
            &memory.factory,
            &mut memory.pool(),
        );
        let text = opened.unwrap_err().to_string();
        assert!(text.contains("mount -t bpf"), "{text}");
        assert!(
            !lab.run("ip link show dev ha").contains("xdp"),
            "left attached"
        );
        memory.assert_balanced();
        assert!(Features::probe(&[]).is_ok());
    });
}

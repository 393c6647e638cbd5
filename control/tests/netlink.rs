//! The kernel's answers about devices, routes and neighbours, in network namespaces of this
//! test's own. Needs root.

use std::collections::BTreeSet;
use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use skein_control::config::Machine;
use skein_control::neighbour::{NoHop, Underlay};
use skein_control::netlink::{Netlink, Notice, ThisMachine, watch};

/// Two namespaces joined by a veth, `up0` in both, removed at the end.
struct Pair {
    names: [String; 2],
}

fn ip(arguments: &str) {
    let output = Command::new("ip")
        .args(arguments.split_whitespace())
        .output()
        .expect("the ip command is installed");
    assert!(
        output.status.success(),
        "ip {arguments}: {} (these tests need root)",
        String::from_utf8_lossy(&output.stderr)
    );
}

impl Pair {
    fn new() -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let count = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = |side| format!("skt-{}-n{count}{side}", std::process::id());
        let pair = Self {
            names: [name('a'), name('b')],
        };
        let [a, b] = &pair.names;
        ip(&format!("netns add {a}"));
        ip(&format!("netns add {b}"));
        ip(&format!(
            "-n {a} link add up0 type veth peer name up0 netns {b}"
        ));
        for (namespace, n) in [(a, 1), (b, 2)] {
            ip(&format!("-n {namespace} addr add 192.0.2.{n}/24 dev up0"));
            ip(&format!(
                "-n {namespace} addr add 2001:db8::{n}/64 dev up0 nodad"
            ));
            ip(&format!("-n {namespace} link set up0 up"));
        }
        pair
    }

    /// Runs something on a thread inside the first namespace.
    fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let file = File::open(format!("/run/netns/{}", self.names[0])).unwrap();
                let kind = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(file.as_fd(), kind).unwrap();
                work()
            });
            thread.join().unwrap()
        })
    }

    fn a(&self, arguments: &str) {
        ip(&format!("-n {} {arguments}", self.names[0]));
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for name in &self.names {
            // Also when a test failed halfway; what is not there need not go.
            let _ = Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}

fn addr(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Asks until the answer is as wanted; panics after ten seconds.
fn until(what: &str, mut check: impl FnMut() -> bool) {
    let start = Instant::now();
    while !check() {
        assert!(start.elapsed() < Duration::from_secs(10), "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn check_peers(managed: bool) {
    let pair = Pair::new();
    pair.a("link add other type veth peer name other2");
    pair.a("link set other up");
    pair.a("addr add 203.0.113.1/24 dev other");
    pair.a("route add 198.51.100.0/24 via 192.0.2.2 mtu 1400");
    pair.inside(|| {
        let mut netlink = Netlink::new().unwrap();
        let mut underlay = Underlay::new(&["up0".into(), "gone0".into()], managed);
        let peers: BTreeSet<_> = [
            "192.0.2.2",
            "2001:db8::2",
            "198.51.100.7",
            "203.0.113.9",
            "192.0.2.1",
            "8.8.8.8",
        ]
        .map(addr)
        .into();
        assert!(underlay.ask_routes(&mut netlink, &peers).unwrap());
        until("resolved", || {
            underlay.ask_neighbours(&mut netlink).unwrap();
            !underlay.unresolved()
        });
        let uplink = underlay.uplinks()[0].clone().unwrap();
        assert!(underlay.uplinks()[1].is_none());
        assert!(uplink.device.running);
        assert!(uplink.addresses.contains(&addr("192.0.2.1")));
        assert!(uplink.addresses.contains(&addr("2001:db8::1")));

        let near = underlay.hop(addr("192.0.2.2")).unwrap();
        assert_eq!((near.uplink, near.mtu), (0, 1500));
        assert_eq!(near.source, Some(addr("192.0.2.1")));
        assert_eq!(near.source_mac, uplink.device.mac);
        assert_eq!(near.next_hop, addr("192.0.2.2"));
        let far = underlay.hop(addr("198.51.100.7")).unwrap();
        assert_eq!((far.next_hop, far.mtu), (addr("192.0.2.2"), 1400));
        assert_eq!(far.next_hop_mac, near.next_hop_mac);
        let six = underlay.hop(addr("2001:db8::2")).unwrap();
        assert_eq!(six.next_hop_mac, near.next_hop_mac);
        assert_eq!(six.source, Some(addr("2001:db8::1")));

        let refused = |peer: &str| underlay.hop(addr(peer)).unwrap_err();
        assert!(matches!(refused("8.8.8.8"), NoHop::NoRoute(_)));
        assert!(matches!(refused("192.0.2.1"), NoHop::NotRemote(_)));
        let error = refused("203.0.113.9").to_string();
        assert!(error.contains("leaves by other"), "{error}");

        // A MAC that goes stale is confirmed again, and stays good all the while.
        if !managed {
            pair.a("neigh change 192.0.2.2 dev up0 nud stale");
            until("confirmed", || {
                underlay.ask_neighbours(&mut netlink).unwrap();
                assert!(!underlay.unresolved());
                let held = netlink.neighbours().unwrap();
                held.iter()
                    .any(|n| n.address == addr("192.0.2.2") && !n.stale)
            });
        }

        // Only uplinks lead outside, and where another device does they do not.
        let exit = |destination: &str| {
            let mut exits = underlay.exits().iter();
            let found = exits.find(|route| route.destination == addr(destination));
            found.unwrap().exit.as_ref().map(|exit| exit.gateway)
        };
        assert_eq!(exit("192.0.2.0"), Some(None));
        assert_eq!(exit("198.51.100.0"), Some(Some(addr("192.0.2.2"))));
        assert_eq!(exit("203.0.113.0"), None);
        pair.a("route del 198.51.100.0/24");

        // Every entry is as it was asked for; and goes when nobody wants it any more.
        let held = netlink.neighbours().unwrap();
        let entry = held
            .iter()
            .find(|n| n.address == addr("192.0.2.2"))
            .unwrap();
        assert_eq!(entry.managed, managed);
        underlay.ask_routes(&mut netlink, &BTreeSet::new()).unwrap();
        let held = netlink.neighbours().unwrap();
        let left = held.iter().find(|n| n.address == addr("192.0.2.2"));
        assert!(left.is_none_or(|n| n.mac.is_none()), "{left:?}");
    });
}

#[test]
fn peers_are_found_with_managed_neighbours() {
    check_peers(true);
}

#[test]
fn peers_are_found_without_managed_neighbours() {
    check_peers(false);
}

#[test]
fn a_neighbour_that_answers_nothing_stays_unresolved() {
    let pair = Pair::new();
    pair.inside(|| {
        let mut netlink = Netlink::new().unwrap();
        let mut underlay = Underlay::new(&["up0".into()], true);
        let silent = addr("192.0.2.77");
        underlay.ask_routes(&mut netlink, &[silent].into()).unwrap();
        assert!(underlay.unresolved());
        assert_eq!(underlay.hop(silent).unwrap().next_hop_mac, None);
    });
}

#[test]
fn the_uplink_is_the_device_of_the_default_route() {
    let pair = Pair::new();
    let found = |pair: &Pair| pair.inside(|| ThisMachine.default_route_interfaces().unwrap());
    assert_eq!(found(&pair), Vec::<String>::new());
    pair.a("link add best type veth peer name best2");
    pair.a("link set best up");
    pair.a("addr add 203.0.113.1/24 dev best");
    pair.a("route add default via 192.0.2.2 metric 100");
    pair.a("route add default via 203.0.113.2 metric 50");
    assert_eq!(found(&pair), ["best", "up0"]);
}

#[test]
fn changes_are_noticed() {
    let pair = Pair::new();
    let (sender, mut notices) = tokio::sync::mpsc::channel(64);
    pair.inside(|| watch(sender).unwrap());
    pair.a("route add 198.51.100.0/24 via 192.0.2.2");
    until("a route is noticed", || {
        notices.try_recv() == Ok(Notice::Routes)
    });
    pair.a("neigh replace 192.0.2.50 lladdr 02:00:00:00:00:50 dev up0");
    until("a neighbour is noticed", || {
        notices.try_recv() == Ok(Notice::Neighbours)
    });
}

#[test]
fn devices_are_set_and_removed() {
    let pair = Pair::new();
    pair.a("link add pod0 type veth peer name pod1");
    pair.inside(|| {
        let mut netlink = Netlink::new().unwrap();
        let find = |netlink: &mut Netlink| {
            let devices = netlink.devices().unwrap();
            devices.into_iter().find(|device| device.name == "pod0")
        };
        let index = find(&mut netlink).unwrap().index;
        netlink.set_mtu(index, 1400).unwrap();
        netlink.set_up(index).unwrap();
        assert_eq!(find(&mut netlink).unwrap().mtu, 1400);
        assert!(netlink.set_mtu(index, 10_000_000).is_err());
        netlink.delete(index).unwrap();
        assert_eq!(find(&mut netlink), None);
        netlink.delete(index).unwrap();
        assert!(netlink.set_up(index).is_err());
    });
}

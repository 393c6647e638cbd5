//! The netlink verbs and the ethtool features against the kernel, each read back.

mod common;

use std::net::IpAddr;
use std::os::fd::AsFd;

use common::TestNetns;
use skein_cni::ethtool::Ethtool;
use skein_cni::mac::MacAddr;
use skein_cni::netlink::{Address, Netlink, Route, RouteScope, Veth, VethEnd};

const HOST_MAC: MacAddr = MacAddr::new([2, 0, 0, 0, 0, 1]);
const POD_MAC: MacAddr = MacAddr::new([2, 0, 0, 0, 0, 2]);

/// A veth from `host` into `pod`, as the plugin makes it.
fn veth(host: &TestNetns, pod: &TestNetns, mtu: u32, queues: u32) {
    host.netlink(|netlink| {
        netlink
            .add_veth(&Veth {
                end: VethEnd {
                    name: "h0",
                    mac: Some(HOST_MAC),
                    netns: None,
                },
                peer: VethEnd {
                    name: "eth0",
                    mac: Some(POD_MAC),
                    netns: Some(pod.netns.as_fd()),
                },
                mtu,
                queues,
            })
            .unwrap();
    });
}

fn index(netlink: &mut Netlink, name: &str) -> u32 {
    netlink.link_by_name(name).unwrap().unwrap().index
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn a_veth_pair_is_whole_from_one_message() {
    let (host, pod) = (TestNetns::new(), TestNetns::new());
    veth(&host, &pod, 65535, 4);

    let h0 = host.netlink(|n| n.link_by_name("h0").unwrap().unwrap());
    let eth0 = pod.netlink(|n| n.link_by_name("eth0").unwrap().unwrap());
    assert_eq!(
        (h0.mac, h0.mtu, h0.tx_queues, h0.rx_queues, h0.is_up),
        (Some(HOST_MAC), 65535, 4, 4, false)
    );
    assert_eq!(
        (
            eth0.mac,
            eth0.mtu,
            eth0.tx_queues,
            eth0.rx_queues,
            eth0.is_up
        ),
        (Some(POD_MAC), 65535, 4, 4, false)
    );
    assert_eq!((h0.kind.as_str(), eth0.kind.as_str()), ("veth", "veth"));
    assert_eq!(h0.peer_index, Some(eth0.index));
    assert_eq!(eth0.peer_index, Some(h0.index));
    assert!(h0.peer_is_elsewhere && eth0.peer_is_elsewhere);
    assert_eq!(h0.gso_max_size, 65536);

    host.netlink(|n| n.delete_link(h0.index).unwrap());
    assert_eq!(pod.netlink(|n| n.link_by_name("eth0").unwrap()), None);
    assert_eq!(host.netlink(|n| n.link_by_index(h0.index).unwrap()), None);
}

#[test]
fn a_refusal_names_the_verb_and_carries_the_kernels_words() {
    let (host, pod) = (TestNetns::new(), TestNetns::new());
    veth(&host, &pod, 1500, 1);
    host.netlink(|netlink| {
        let h0 = index(netlink, "h0");
        let error = netlink.set_link_mtu(h0, 70_000).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EINVAL));
        let text = error.to_string();
        assert!(text.contains(&format!("set link {h0} mtu 70000")), "{text}");
        assert!(text.contains("mtu greater than device maximum"), "{text}");

        let gone = netlink.delete_link(9999).unwrap_err();
        assert!(gone.is_missing(), "{gone}");
        let address = Address::host(h0, ip("10.0.0.1"));
        netlink.add_address(&address).unwrap();
        assert!(netlink.add_address(&address).unwrap_err().is_exists());
    });
}

#[test]
fn what_is_set_on_a_link_reads_back() {
    let (host, pod) = (TestNetns::new(), TestNetns::new());
    veth(&host, &pod, 1500, 1);
    pod.netlink(|n| {
        let eth0 = index(n, "eth0");
        n.set_link_up(eth0, true).unwrap();
    });
    let mac = MacAddr::new([2, 0, 0, 0, 0, 9]);
    host.netlink(|n| {
        let h0 = index(n, "h0");
        n.rename_link(h0, "h1").unwrap();
        n.set_link_mtu(h0, 9000).unwrap();
        n.set_link_mac(h0, mac).unwrap();
        n.set_link_alias(h0, "some text").unwrap();
        n.disable_address_generation(h0).unwrap();
        n.set_link_up(h0, true).unwrap();
        let h1 = n.link_by_index(h0).unwrap().unwrap();
        assert_eq!(
            (
                h1.name.as_str(),
                h1.mtu,
                h1.mac,
                h1.alias.as_str(),
                h1.is_up
            ),
            ("h1", 9000, Some(mac), "some text", true)
        );
        assert_eq!(n.links().unwrap().iter().find(|l| l.index == h0), Some(&h1));
        assert!(
            n.addresses().unwrap().iter().all(|a| a.ifindex != h0),
            "no link-local address with addrgenmode none"
        );
        n.set_link_up(h0, false).unwrap();
        assert!(!n.link_by_index(h0).unwrap().unwrap().is_up);
        n.move_link(h0, pod.netns.as_fd()).unwrap();
        assert_eq!(n.link_by_name("h1").unwrap(), None);
    });
    assert!(pod.netlink(|n| n.link_by_name("h1").unwrap()).is_some());
}

#[test]
fn addresses_and_routes_read_back_as_they_were_given() {
    let (host, pod) = (TestNetns::new(), TestNetns::new());
    veth(&host, &pod, 65535, 1);
    pod.netlink(|n| {
        let eth0 = index(n, "eth0");
        n.set_link_up(eth0, true).unwrap();
        let addresses = [
            Address::host(eth0, ip("10.7.0.2")),
            Address::host(eth0, ip("fd00:7::2")),
            Address::within(eth0, ip("192.0.2.1"), 24),
        ];
        for address in &addresses {
            n.add_address(address).unwrap();
        }
        let found = n.addresses().unwrap();
        for mut address in addresses {
            // Detection is an IPv6 matter; the flag is not sent for IPv4.
            address.nodad &= address.ip.is_ipv6();
            assert!(found.contains(&address), "{address:?} in {found:?}");
        }

        let gateway = Route {
            mtu: Some(1400),
            ..Route::on_link(ip("169.254.1.1"), 32, eth0)
        };
        let default_v4 = Route {
            onlink: true,
            mtu: Some(1400),
            ..Route::default_via(ip("169.254.1.1"), eth0)
        };
        let default_v6 = Route {
            mtu: Some(1400),
            priority: Some(1024),
            ..Route::default_via(ip("fe80::1"), eth0)
        };
        let other_table = Route {
            table: 1000,
            priority: Some(7),
            source: Some(ip("10.7.0.2")),
            ..Route::via(ip("10.9.0.0"), 16, ip("169.254.1.1"), eth0)
        };
        for route in [gateway, default_v4, default_v6, other_table] {
            n.add_route(&route).unwrap();
            assert!(n.add_route(&route).unwrap_err().is_exists());
            n.replace_route(&route).unwrap();
            // The kernel adds to the flags whether the link has carrier, which is not read.
            let found = n.routes().unwrap();
            assert!(found.contains(&route), "{route:?} in {found:?}");
        }
        assert_eq!(gateway.scope, RouteScope::Link);
        for route in [other_table, default_v6, default_v4, gateway] {
            n.delete_route(&route).unwrap();
            assert!(!n.routes().unwrap().contains(&route));
        }
        n.delete_address(&addresses[0]).unwrap();
        assert!(
            !n.addresses()
                .unwrap()
                .iter()
                .any(|a| a.ip == addresses[0].ip)
        );
    });
}

#[test]
fn permanent_neighbours_read_back() {
    let (host, pod) = (TestNetns::new(), TestNetns::new());
    veth(&host, &pod, 1500, 1);
    pod.netlink(|n| {
        let eth0 = index(n, "eth0");
        n.set_link_up(eth0, true).unwrap();
        for address in ["169.254.1.1", "fe80::1"] {
            let address = ip(address);
            n.add_permanent_neighbour(eth0, address, HOST_MAC).unwrap();
            n.add_permanent_neighbour(eth0, address, POD_MAC).unwrap();
            let found = n.neighbours().unwrap();
            let entry = found.iter().find(|entry| entry.ip == address).unwrap();
            assert_eq!((entry.mac, entry.is_permanent), (Some(POD_MAC), true));
            n.delete_neighbour(eth0, address).unwrap();
            assert!(!n.neighbours().unwrap().iter().any(|e| e.ip == address));
        }
    });
}

#[test]
fn features_go_off_and_on_and_shortfalls_are_named() {
    let (host, pod) = (TestNetns::new(), TestNetns::new());
    veth(&host, &pod, 65535, 1);
    pod.netns
        .run(|| {
            let eth0 = Ethtool::open("eth0").unwrap();
            let state = |name: &str| {
                let features = eth0.features().unwrap();
                features.into_iter().find(|f| f.name == name).unwrap()
            };
            assert!(state("tx-tcp-segmentation").is_on);
            let off = ["tx-tcp-segmentation", "tx-udp-segmentation"];
            assert_eq!(eth0.set_features(&off, false).unwrap(), Default::default());
            assert!(!state("tx-tcp-segmentation").is_on);
            assert!(!state("tx-udp-segmentation").is_on);
            eth0.set_features(&off, true).unwrap();
            assert!(state("tx-tcp-segmentation").is_on);

            let features = eth0.features().unwrap();
            let fixed = features.iter().find(|f| f.is_fixed && !f.is_on).unwrap();
            let wanted = [fixed.name.as_str(), "no-such-feature"];
            let shortfall = eth0.set_features(&wanted, true).unwrap();
            assert_eq!(shortfall.unchanged, [fixed.name.as_str()]);
            assert_eq!(shortfall.unknown, ["no-such-feature"]);
            assert!(Ethtool::open("eth1").unwrap().features().is_err());
            assert!(Ethtool::open("a-name-too-long-for-a-link").is_err());
        })
        .unwrap();
}

#[test]
fn a_namespace_that_is_gone_says_so() {
    let netns = TestNetns::new();
    let path = netns.path();
    netns.remove();
    assert!(skein_cni::netns::Netns::open(&path).unwrap_err().is_gone());

    // What a removed bind mount leaves behind: an ordinary file.
    let file = tempfile::NamedTempFile::new().unwrap();
    let plain = skein_cni::netns::Netns::open(file.path()).unwrap();
    assert!(plain.run(|| ()).unwrap_err().is_gone());
}

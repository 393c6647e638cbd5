//! Announcements as a neighbour's kernel takes them: an entry that it has for the address
//! changes to the announced Ethernet address. It would not for a frame that is wrong anywhere,
//! checksum and hop limit included.

mod common;

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use common::{TestNetns, ip};
use skein_cni::announce::announce;
use skein_cni::interface::wait_for_carrier;
use skein_cni::mac::MacAddr;
use skein_cni::netlink::{Address, Veth, VethEnd};

const POD_MAC: MacAddr = MacAddr::new([2, 0, 0, 0, 0, 2]);
const STALE_MAC: &str = "02:00:00:00:00:55";

#[test]
fn a_neighbours_kernel_takes_both_kinds() {
    let (host, pod) = (TestNetns::new(), TestNetns::new());
    let announced: [IpAddr; 2] = ["10.7.0.2".parse().unwrap(), "fd00:7::2".parse().unwrap()];
    let host_index = host.netlink(|n| {
        n.add_veth(&Veth {
            end: VethEnd {
                name: "h0",
                mac: None,
                netns: None,
            },
            peer: VethEnd {
                name: "eth0",
                mac: Some(POD_MAC),
                netns: Some(pod.netns.as_fd()),
            },
            mtu: 1500,
            queues: 1,
        })
        .unwrap();
        let index = n.link_by_name("h0").unwrap().unwrap().index;
        n.set_link_up(index, true).unwrap();
        for own in ["10.7.0.1", "fd00:7::1"] {
            n.add_address(&Address::host(index, own.parse().unwrap()))
                .unwrap();
        }
        index
    });
    // Without it an entry withstands a change for its first second.
    host.netns
        .run(|| std::fs::write("/proc/sys/net/ipv4/neigh/h0/locktime", "0").unwrap())
        .unwrap();
    for address in announced {
        let address = address.to_string();
        ip(&[
            "-n", &host.name, "neigh", "add", &address, "lladdr", STALE_MAC, "dev", "h0", "nud",
            "stale",
        ]);
    }

    let eth0 = pod.netlink(|n| {
        let index = n.link_by_name("eth0").unwrap().unwrap().index;
        n.set_link_up(index, true).unwrap();
        wait_for_carrier(n, index).unwrap();
        index
    });
    pod.netns
        .run(|| announce(eth0, POD_MAC, &announced).unwrap())
        .unwrap();

    let deadline = Instant::now() + Duration::from_secs(10);
    for address in announced {
        loop {
            let found = host.netlink(|n| n.neighbours().unwrap());
            let entry = found
                .iter()
                .find(|entry| entry.ifindex == host_index && entry.ip == address);
            if entry.is_some_and(|entry| entry.mac == Some(POD_MAC)) {
                break;
            }
            assert!(
                Instant::now() < deadline,
                "{address} is not taken: {found:?}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

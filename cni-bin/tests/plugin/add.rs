//! ADD where all goes well: what the kernel, the runtime and the agent see of it.

use serde_json::json;
use skein_cni::agent::Request;
use skein_cni::ethtool::Ethtool;
use skein_cni::netlink::{Address, Route};

use crate::setup::{Setup, attachment};

#[test]
fn add_makes_the_veth_that_the_agent_reserved() {
    let setup = Setup::new();
    setup.add().success();
    let (eth0, host) = (setup.pod_link().unwrap(), setup.host_link().unwrap());
    assert_eq!(eth0.mac.unwrap().to_string(), "02:00:00:00:07:02");
    assert_eq!(host.mac.unwrap().to_string(), "02:00:00:00:07:01");
    assert_eq!((eth0.mtu, host.mtu), (65535, 65535));
    assert_eq!((eth0.tx_queues, eth0.rx_queues), (2, 2));
    assert_eq!((host.tx_queues, host.rx_queues), (2, 2));
    assert!(eth0.is_running && host.is_up);
    assert_eq!(host.alias, "skein:c1/eth0");
    setup.host.netlink(|n| {
        let addresses = n.addresses().unwrap();
        assert!(
            addresses.iter().all(|a| a.ifindex != host.index),
            "{addresses:?}"
        );
    });
    let features = setup
        .pod
        .netns
        .run(|| Ethtool::open("eth0").unwrap().features().unwrap())
        .unwrap();
    let is_on = |name: &str| features.iter().any(|f| f.name == name && f.is_on);
    assert!(!is_on("tx-udp-segmentation") && !is_on("tx-gso-list"));
    assert!(is_on("tx-checksum-ip-generic") && is_on("tx-tcp-segmentation"));
}

#[test]
fn add_gives_the_pod_host_addresses_and_routes_by_the_gateway() {
    let setup = Setup::new();
    setup.add().success();
    let eth0 = setup.pod_link().unwrap().index;
    setup.pod.netlink(|n| {
        let addresses = n.addresses().unwrap();
        let v6 = Address::host(eth0, "fd00:7::2".parse().unwrap());
        let v4 = Address {
            nodad: false,
            ..Address::host(eth0, "10.7.0.2".parse().unwrap())
        };
        assert!(addresses.contains(&v4), "{addresses:?}");
        assert!(addresses.contains(&v6), "{addresses:?}");

        let gateway = "169.254.1.1".parse().unwrap();
        let mtu = Some(1450);
        let expected = [
            Route {
                mtu,
                ..Route::on_link(gateway, 32, eth0)
            },
            Route {
                mtu,
                onlink: true,
                ..Route::default_via(gateway, eth0)
            },
            Route {
                mtu,
                priority: Some(1024),
                ..Route::default_via("fe80::1".parse().unwrap(), eth0)
            },
        ];
        let routes = n.routes().unwrap();
        for route in expected {
            assert!(routes.contains(&route), "{route:?} in {routes:?}");
        }
        assert!(n.link_by_name("lo").unwrap().unwrap().is_up);
    });
}

#[test]
fn add_tells_runtime_agent_and_log() {
    let setup = Setup::new();
    let result = setup.add().success().json();
    assert_eq!(
        result,
        json!({
            "cniVersion": "1.1.0", "dns": {},
            "interfaces": [
                {"name": "skein7", "mac": "02:00:00:00:07:01", "mtu": 65535},
                {"name": "eth0", "mac": "02:00:00:00:07:02", "mtu": 65535,
                 "sandbox": setup.pod.path()},
            ],
            "ips": [
                {"address": "10.7.0.2/32", "gateway": "169.254.1.1", "interface": 1},
                {"address": "fd00:7::2/128", "gateway": "fe80::1", "interface": 1},
            ],
            "routes": [
                {"dst": "169.254.1.1/32", "mtu": 1450, "scope": 253},
                {"dst": "0.0.0.0/0", "gw": "169.254.1.1", "mtu": 1450},
                {"dst": "::/0", "gw": "fe80::1", "mtu": 1450},
            ],
        })
    );
    let host = setup.host_link().unwrap().index;
    setup.agent.with(|state| {
        let [
            Request::Add {
                attachment: added,
                netns,
                pod,
                ..
            },
            Request::Attach { ifindex, .. },
        ] = state.requests.as_slice()
        else {
            panic!("{:?}", state.requests);
        };
        assert_eq!(*added, attachment());
        assert_eq!(*netns, setup.pod.path().display().to_string());
        assert_eq!(pod.as_ref().unwrap().name, "web");
        assert_eq!(*ifindex, host);
    });
    let log = std::fs::read_to_string(setup.log()).unwrap();
    let expected = "ADD container=c1 ifname=eth0 network=skein ok 10.7.0.2/32 fd00:7::2/128\n";
    assert!(log.ends_with(expected), "{log}");

    setup.run("CHECK", &json!({"prevResult": result})).success();
    assert_eq!(setup.del().success().stdout, "");
    setup.assert_clean();
}

#[test]
fn the_pods_ipv6_settings_are_its_interfaces_own() {
    let setup = Setup::new();
    // As container runtimes do that keep IPv6 off by default.
    let read = |ifname: &str, key: &str| {
        let path = format!("/proc/sys/net/ipv6/conf/{ifname}/{key}");
        setup
            .pod
            .netns
            .run(|| std::fs::read_to_string(path).unwrap())
            .unwrap()
    };
    setup
        .pod
        .netns
        .run(|| std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap())
        .unwrap();
    setup.add().success();
    assert_eq!(read("eth0", "disable_ipv6"), "0\n");
    assert_eq!(read("eth0", "accept_ra"), "0\n");
    assert_eq!(read("eth0", "accept_dad"), "0\n");
    let host = setup
        .host
        .netns
        .run(|| std::fs::read_to_string("/proc/sys/net/ipv6/conf/skein7/disable_ipv6").unwrap());
    assert_eq!(host.unwrap(), "1\n");
    setup.del().success();
}

#[test]
fn older_runtimes_get_results_of_their_version() {
    let setup = Setup::new();
    let result = setup
        .run("ADD", &json!({"cniVersion": "0.3.1"}))
        .success()
        .json();
    assert_eq!(result["cniVersion"], "0.3.1");
    assert_eq!(result["ips"][0]["version"], "4");
    assert_eq!(result["interfaces"][1].get("mtu"), None);
    setup.run("DEL", &json!({"cniVersion": "0.3.1"})).success();
    setup.assert_clean();
}

#[test]
fn the_runtimes_wishes_reach_the_agent_and_the_interface() {
    let setup = Setup::new();
    let extra = json!({
        "mtu": 1300, "dns": {"nameservers": ["10.96.0.10"]},
        "runtimeConfig": {"ips": ["10.7.0.9/24"], "mac": "02:00:00:00:00:99"},
        "prevResult": {"cniVersion": "1.1.0",
            "interfaces": [{"name": "net1", "sandbox": "/x"}],
            "ips": [{"address": "192.0.2.7/24", "interface": 0}]},
    });
    let result = setup.run("ADD", &extra).success().json();
    assert_eq!(result["ips"][0]["address"], "192.0.2.7/24");
    assert_eq!(result["ips"][1]["address"], "10.7.0.9/32");
    assert_eq!(result["ips"][1]["interface"], 2);
    assert_eq!(result["dns"]["nameservers"][0], "10.96.0.10");
    assert_eq!(
        setup.pod_link().unwrap().mac.unwrap().to_string(),
        "02:00:00:00:00:99"
    );
    let mtus = setup.pod.netlink(|n| {
        let routes = n.routes().unwrap();
        let default: Vec<_> = routes
            .iter()
            .filter(|r| r.is_default())
            .map(|r| r.mtu)
            .collect();
        default
    });
    assert_eq!(
        mtus,
        [Some(1300)],
        "one default route: there is no IPv6 address"
    );
    setup.del().success();
}

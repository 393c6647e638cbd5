//! The plugin as a runtime runs it: the binary, with its environment and standard input,
//! between network namespaces, against an agent on a unix socket.

mod common;
#[path = "common/agent.rs"]
mod fake;

use std::io::Write;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::TestNetns;
use fake::{FakeAgent, OnAttach};
use serde_json::{Value, json};
use skein_cni::agent::{Attachment, Request};
use skein_cni::ethtool::Ethtool;
use skein_cni::netlink::{Address, Link, Route, Veth, VethEnd};

/// A node, a pod's namespace, and an agent.
struct Setup {
    host: TestNetns,
    pod: TestNetns,
    agent: FakeAgent,
    folder: tempfile::TempDir,
}

/// What a call of the binary came to.
#[derive(Debug)]
struct Ran {
    is_success: bool,
    stdout: String,
}

impl Ran {
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap()
    }

    /// The code of the error that it printed.
    fn code(&self) -> u64 {
        assert!(!self.is_success, "{self:?}");
        self.json()["code"].as_u64().unwrap()
    }

    fn success(self) -> Self {
        assert!(self.is_success, "{self:?}");
        self
    }
}

impl Setup {
    fn new() -> Self {
        let host = TestNetns::new();
        let folder = tempfile::tempdir().unwrap();
        let agent = FakeAgent::start(&folder.path().join("skein.sock"), &host.netns);
        Self {
            pod: TestNetns::new(),
            host,
            agent,
            folder,
        }
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// A configuration with `extra` keys.
    fn conf(&self, extra: &Value) -> Value {
        let mut conf = json!({
            "cniVersion": "1.1.0", "name": "skein", "type": "skein-cni",
            "socket": self.agent.socket, "logFile": self.log(),
        });
        for (key, value) in extra.as_object().into_iter().flatten() {
            conf[key] = value.clone();
        }
        conf
    }

    fn start(&self, command: &str, extra: &Value) -> Child {
        let mut plugin = Command::new(env!("CARGO_BIN_EXE_skein-cni"));
        plugin
            .env_clear()
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", "c1")
            .env("CNI_NETNS", self.pod.path())
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", "/opt/cni/bin")
            .env(
                "CNI_ARGS",
                "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web;K8S_POD_UID=u1",
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        // A child inherits the namespace of the thread that starts it.
        let mut child = self.host.netns.run(|| plugin.spawn().unwrap()).unwrap();
        let conf = self.conf(extra).to_string();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(conf.as_bytes()).unwrap();
        child
    }

    fn run(&self, command: &str, extra: &Value) -> Ran {
        let output = self.start(command, extra).wait_with_output().unwrap();
        Ran {
            is_success: output.status.success(),
            stdout: String::from_utf8(output.stdout).unwrap(),
        }
    }

    fn add(&self) -> Ran {
        self.run("ADD", &Value::Null)
    }

    fn del(&self) -> Ran {
        self.run("DEL", &Value::Null)
    }

    fn pod_link(&self) -> Option<Link> {
        self.pod.netlink(|n| n.link_by_name("eth0").unwrap())
    }

    fn host_link(&self) -> Option<Link> {
        self.host.netlink(|n| n.link_by_name("skein7").unwrap())
    }

    /// Nothing is left of any ADD.
    fn assert_clean(&self) {
        assert_eq!(self.pod_link(), None);
        self.assert_host_clean();
    }

    fn assert_host_clean(&self) {
        let links = self.host.netlink(|n| n.links().unwrap());
        assert_eq!(links.len(), 1, "only the loopback: {links:?}");
        // The agent learns of the end of a connection a moment after the plugin.
        until("no reservation is left", || {
            self.agent.with(|state| state.reserved.is_empty())
        });
    }
}

/// Waits for what must come about.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}: did not come about");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn attachment() -> Attachment {
    Attachment {
        container_id: "c1".into(),
        ifname: "eth0".into(),
    }
}

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

#[test]
fn a_refused_attach_undoes_everything() {
    for on_attach in [OnAttach::Refuse, OnAttach::HangUp] {
        let setup = Setup::new();
        setup.agent.with(|state| state.on_attach = on_attach);
        let ran = setup.add();
        assert_eq!(ran.code(), 11);
        assert_eq!(setup.agent.requests(), ["add", "attach", "del"]);
        setup.assert_clean();
        let log = std::fs::read_to_string(setup.log()).unwrap();
        assert!(
            log.contains("ADD container=c1 ifname=eth0 network=skein failed "),
            "{log}"
        );
    }
}

#[test]
fn an_attach_without_carrier_is_no_success() {
    let setup = Setup::new();
    setup
        .agent
        .with(|state| state.on_attach = OnAttach::LeaveDown);
    assert_eq!(setup.add().code(), 102);
    setup.assert_clean();
}

#[test]
fn a_refused_reservation_passes_the_agents_error_on() {
    let setup = Setup::new();
    setup.agent.with(|state| state.refuse_add = true);
    let error = setup.add().json();
    assert_eq!(
        error,
        json!({"cniVersion": "1.1.0", "code": 11, "msg": "no address left",
               "details": "try again"})
    );
    assert_eq!(setup.agent.requests(), ["add"]);
    setup.assert_clean();
}

#[test]
fn add_twice_leaks_nothing() {
    let setup = Setup::new();
    let first = setup.add().success().json();
    let old = setup.host_link().unwrap();
    let second = setup.add().success().json();
    assert_eq!(first, second);
    let new = setup.host_link().unwrap();
    assert_ne!(old.index, new.index, "made anew");
    assert_eq!(setup.host.netlink(|n| n.links().unwrap().len()), 2);
    assert_eq!(setup.pod.netlink(|n| n.links().unwrap().len()), 2);
    assert_eq!(
        setup.agent.with(|state| state.attached[&attachment()]),
        new.index
    );
    setup.del().success();
    setup.assert_clean();
}

#[test]
fn add_after_one_that_was_killed_midway() {
    let setup = Setup::new();
    setup.agent.with(|state| state.on_attach = OnAttach::Wait);
    let mut killed = setup.start("ADD", &Value::Null);
    until("the plugin waits for the agent", || {
        setup.agent.requests().last() == Some(&"attach")
    });
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(setup.pod_link().is_some(), "its interface is left behind");

    setup.agent.with(|state| state.on_attach = OnAttach::SetUp);
    setup.add().success();
    assert!(setup.pod_link().unwrap().is_running);
    setup.del().success();
    setup.assert_clean();
}

#[test]
fn the_remains_of_an_add_that_was_killed_before_it_marked_them() {
    let setup = Setup::new();
    for command in ["ADD", "DEL"] {
        let end = |name, netns| VethEnd {
            name,
            mac: None,
            netns,
        };
        setup.host.netlink(|n| {
            n.add_veth(&Veth {
                end: end("skein6", None),
                peer: end("eth0", Some(setup.pod.netns.as_fd())),
                mtu: 1500,
                queues: 1,
            })
            .unwrap();
        });
        setup.run(command, &Value::Null).success();
        assert_eq!(
            setup.host.netlink(|n| n.link_by_name("skein6").unwrap()),
            None
        );
        setup.del().success();
        setup.assert_clean();
    }
}

#[test]
fn an_interface_of_somebody_else_stays() {
    let setup = Setup::new();
    let end = |name, netns| VethEnd {
        name,
        mac: None,
        netns,
    };
    let other = setup.host.netlink(|n| {
        n.add_veth(&Veth {
            end: end("other0", None),
            peer: end("eth0", Some(setup.pod.netns.as_fd())),
            mtu: 1500,
            queues: 1,
        })
        .unwrap();
        let other = n.link_by_name("other0").unwrap().unwrap().index;
        n.set_link_up(other, true).unwrap();
        other
    });
    let ran = setup.add();
    assert_eq!(ran.code(), 101);
    assert!(
        ran.stdout
            .contains("container already has an interface eth0"),
        "{ran:?}"
    );
    setup.del().success();
    assert!(setup.pod_link().is_some());

    // The same for the name on the host.
    setup.host.netlink(|n| {
        n.delete_link(other).unwrap();
        n.add_veth(&Veth {
            end: end("skein7", None),
            peer: end("peer7", None),
            mtu: 1500,
            queues: 1,
        })
        .unwrap();
    });
    assert_eq!(setup.add().code(), 101);
    setup.del().success();
    assert!(setup.host_link().is_some());
}

#[test]
fn del_is_idempotent() {
    let setup = Setup::new();
    setup.del().success();
    setup.add().success();
    setup.del().success();
    setup.assert_clean();
    setup.del().success();
    setup.assert_clean();
}

#[test]
fn del_with_the_namespace_gone() {
    let setup = Setup::new();
    setup.add().success();
    // The test's own descriptor keeps the namespace, and the veth in it, alive: DEL finds the
    // host's end by its mark.
    setup.pod.remove();
    setup.del().success();
    setup.assert_host_clean();
    setup.del().success();
}

#[test]
fn del_with_the_agent_down() {
    let mut setup = Setup::new();
    setup.add().success();
    setup.agent.stop();
    setup.del().success();
    assert_eq!((setup.pod_link(), setup.host_link()), (None, None));
    let log = std::fs::read_to_string(setup.log()).unwrap();
    assert!(log.contains("DEL container=c1 ifname=eth0 network=skein ok the Skein agent does not"));
}

#[test]
fn add_and_status_with_the_agent_down() {
    let mut setup = Setup::new();
    setup.run("STATUS", &Value::Null).success();
    setup.agent.stop();
    assert_eq!(setup.add().code(), 11);
    assert_eq!(setup.run("STATUS", &Value::Null).code(), 50);
    assert_eq!(setup.pod_link(), None);
}

#[test]
fn add_into_the_hosts_own_namespace_is_refused() {
    let mut setup = Setup::new();
    let pod = std::mem::replace(&mut setup.pod, TestNetns::new());
    drop(pod);
    let host_path = setup.host.path();
    let run = |command: &str| {
        let conf = setup.conf(&Value::Null).to_string();
        setup
            .host
            .netns
            .run(|| {
                let env = |name: &str| {
                    let value = match name {
                        "CNI_COMMAND" => command.into(),
                        "CNI_CONTAINERID" => "c1".into(),
                        "CNI_IFNAME" => "eth0".into(),
                        "CNI_NETNS" => host_path.clone().into_os_string(),
                        _ => return None,
                    };
                    Some(value)
                };
                skein_cni::plugin::run(&env, conf.as_bytes())
            })
            .unwrap()
    };
    let added = run("ADD");
    assert!(
        !added.is_success && added.stdout.contains("host's own"),
        "{added:?}"
    );
    assert!(run("DEL").is_success);
    assert_eq!(setup.agent.requests(), ["del"]);
}

#[test]
fn check_names_what_differs() {
    let setup = Setup::new();
    let result = setup.add().success().json();
    setup.pod.netlink(|n| {
        let eth0 = n.link_by_name("eth0").unwrap().unwrap().index;
        n.set_link_mtu(eth0, 9000).unwrap();
        let address = Address::host(eth0, "10.7.0.2".parse().unwrap());
        n.delete_address(&address).unwrap();
    });
    let ran = setup.run("CHECK", &json!({"prevResult": result}));
    assert_eq!(ran.code(), 103);
    for difference in [
        "the MTU is 9000, not 65535",
        "the address 10.7.0.2 is missing",
    ] {
        assert!(ran.stdout.contains(difference), "{ran:?}");
    }
    assert_eq!(setup.run("CHECK", &Value::Null).code(), 7);
    setup.del().success();
    assert_eq!(
        setup.run("CHECK", &json!({"prevResult": result})).code(),
        11
    );
}

#[test]
fn gc_hands_the_list_to_the_agent() {
    let setup = Setup::new();
    setup.add().success();
    let valid = json!([{"containerID": "c1", "ifname": "eth0"}]);
    setup
        .run("GC", &json!({"cni.dev/valid-attachments": valid}))
        .success();
    assert!(
        setup
            .agent
            .with(|state| state.reserved.contains_key(&attachment()))
    );
    setup
        .run("GC", &json!({"cni.dev/valid-attachments": []}))
        .success();
    assert!(setup.agent.with(|state| state.reserved.is_empty()));
    assert_eq!(setup.run("GC", &Value::Null).code(), 7);
    setup.del().success();
}

#[test]
fn version_and_bad_calls_print_what_the_specification_says() {
    let setup = Setup::new();
    assert_eq!(
        setup
            .run("VERSION", &json!({"cniVersion": "0.4.0"}))
            .success()
            .stdout,
        r#"{"cniVersion":"0.4.0","supportedVersions":["0.3.1","0.4.0","1.0.0","1.1.0"]}"#
    );
    assert_eq!(setup.run("ADD", &json!({"cniVersion": "0.2.0"})).code(), 1);
    assert_eq!(
        setup
            .run("ADD", &json!({"ipam": {"type": "host-local"}}))
            .code(),
        2
    );
    assert_eq!(setup.run("ADD", &json!({"mtu": 5})).code(), 7);
    assert_eq!(setup.run("NONE", &Value::Null).code(), 4);
    let log = std::fs::read_to_string(setup.log()).unwrap();
    assert!(
        log.contains("NONE container=c1 ifname=eth0 network=skein failed "),
        "{log}"
    );
    assert!(setup.agent.requests().is_empty());
}

#[test]
fn a_log_that_cannot_be_written_fails_nothing() {
    let setup = Setup::new();
    let extra = json!({"logFile": "/proc/none/log"});
    setup.run("ADD", &extra).success();
    setup.run("DEL", &extra).success();
    setup.assert_clean();
}

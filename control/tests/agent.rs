//! `skeind` and `skeinctl` as processes, on a node made of network namespaces: an uplink, a
//! pod's veth, real XDP programs and sockets. Needs root.
//!
//! The test plays the CNI plugin's part over the agent's socket, and kubelet's in the folder of
//! manifests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use skein_cni::agent::{Attachment, Client, PodRef, Reply, Request, Reservation};

const SKEIND: &str = env!("CARGO_BIN_EXE_skeind");
const SKEINCTL: &str = env!("CARGO_BIN_EXE_skeinctl");

/// What an agent says that lost no frame.
const BALANCED: &str = "frames: 8192 of 8192";

/// The longest that anything here may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

fn run(program: &str, arguments: &[&str]) -> Output {
    Command::new(program)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"))
}

fn ip(arguments: &str) {
    let arguments: Vec<_> = arguments.split_whitespace().collect();
    let output = run("ip", &arguments);
    assert!(
        output.status.success(),
        "ip {arguments:?}: {} (these tests need root)",
        String::from_utf8_lossy(&output.stderr)
    );
}

fn until(what: &str, mut check: impl FnMut() -> bool) {
    let start = Instant::now();
    while !check() {
        assert!(start.elapsed() < LIMIT, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A node: a namespace with an uplink to a second one, a folder for everything.
struct Node {
    name: String,
    folder: tempfile::TempDir,
}

impl Node {
    fn new() -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let count = COUNTER.fetch_add(1, Ordering::Relaxed);
        let node = Self {
            name: format!("skt-{}-c{count}", std::process::id()),
            folder: tempfile::tempdir().unwrap(),
        };
        let name = &node.name;
        for namespace in [node.name.clone(), node.far(), node.pod()] {
            ip(&format!("netns add {namespace}"));
        }
        ip(&format!("-n {name} link set lo up"));
        ip(&format!(
            "-n {name} link add up0 numrxqueues 1 numtxqueues 1 type veth peer name up0 numrxqueues 1 numtxqueues 1 netns {}",
            node.far()
        ));
        for (namespace, n) in [(node.name.clone(), 1), (node.far(), 2)] {
            ip(&format!("-n {namespace} addr add 192.0.2.{n}/24 dev up0"));
            ip(&format!("-n {namespace} link set up0 up"));
        }
        fs::create_dir(node.path("cluster")).unwrap();
        fs::create_dir(node.path("bpf")).unwrap();
        let bpffs = node.path("bpf").display().to_string();
        let mounted = run("mount", &["-t", "bpf", "bpf", &bpffs]);
        assert!(mounted.status.success(), "{mounted:?}");
        for n in [1, 2] {
            let text = format!(
                "apiVersion: v1\nkind: Node\nmetadata: {{name: n{n}}}\n\
                 spec: {{podCIDRs: [10.1.{n}.0/24, 'fd00:{n}::/64']}}\n\
                 status: {{addresses: [{{type: InternalIP, address: 192.0.2.{n}}}]}}\n"
            );
            node.manifest(&format!("node{n}.yaml"), &text);
        }
        node.config("");
        node
    }

    fn far(&self) -> String {
        format!("{}f", self.name)
    }

    fn pod(&self) -> String {
        format!("{}p", self.name)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn manifest(&self, name: &str, text: &str) {
        let temporary = self.path("new");
        fs::write(&temporary, text).unwrap();
        fs::rename(temporary, self.path("cluster").join(name)).unwrap();
    }

    fn pod_manifest(&self, uid: &str) {
        let text = format!(
            "apiVersion: v1\nkind: Pod\n\
             metadata: {{name: web, namespace: shop, uid: {uid}, labels: {{app: web}}}}\n\
             spec: {{nodeName: n1}}\n"
        );
        self.manifest("pod.yaml", &text);
    }

    fn config(&self, more: &str) {
        let folder = self.folder.path().display();
        let text = format!(
            "[node]\nname = \"n1\"\n[uplink]\ninterfaces = [\"up0\"]\n\
             [cluster]\nsource = \"directory\"\ndirectory = \"{folder}/cluster\"\n\
             [api]\nsocket = \"{folder}/skein.sock\"\n\
             [state]\ndirectory = \"{folder}/state\"\n{more}"
        );
        fs::write(self.path("skeind.toml"), text).unwrap();
    }

    fn socket(&self) -> PathBuf {
        self.path("skein.sock")
    }

    /// `skeind` inside the namespace, with a bpffs of its own at the usual place.
    fn skeind(&self) -> Command {
        let mut command = Command::new("ip");
        // `ip netns exec` makes mounts private. Pins outlive an agent, so the bpffs is one for
        // all agents of this node.
        let bpffs = self.path("bpf");
        let script = format!(
            "mount --bind {0} /sys/fs/bpf && exec {SKEIND} --config {1}",
            bpffs.display(),
            self.path("skeind.toml").display()
        );
        command.args(["netns", "exec", &self.name, "sh", "-c", &script]);
        command
    }

    fn start(&self) -> Agent<'_> {
        let log = self.path("log");
        let file = fs::File::options()
            .create(true)
            .append(true)
            .open(&log)
            .unwrap();
        let child = self
            .skeind()
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()
            .unwrap();
        let mut agent = Agent { node: self, child };
        until("the agent answers", || {
            let ended = agent.child.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", self.log());
            agent.ctl(&["status"]).is_ok()
        });
        agent
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        for name in [self.name.clone(), self.far(), self.pod()] {
            // Also when a test failed halfway; what is not there need not go.
            let _ = run("ip", &["netns", "del", &name]);
        }
        let _ = run("umount", &[&self.path("bpf").display().to_string()]);
    }
}

/// A running agent, killed when dropped.
struct Agent<'a> {
    node: &'a Node,
    child: Child,
}

impl Drop for Agent<'_> {
    fn drop(&mut self) {
        // `ip netns exec` and `sh` replaced themselves: this is skeind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Agent<'_> {
    /// What `skeinctl … -o json` prints; the document also when it ends with another code.
    fn ctl(&self, arguments: &[&str]) -> Result<Value, String> {
        let socket = self.node.socket();
        let output = Command::new(SKEINCTL)
            .args(arguments)
            .args(["-o", "json", "--socket"])
            .arg(socket)
            .output()
            .unwrap();
        serde_json::from_slice(&output.stdout)
            .map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned())
    }

    fn view(&self, name: &str) -> Value {
        self.ctl(&[name]).unwrap()
    }

    fn until_ready(&self) {
        until("ready", || {
            let status = self.view("status");
            status["ready"] == Value::Bool(true) || {
                std::thread::sleep(Duration::from_millis(50));
                false
            }
        });
    }

    fn client(&self) -> Client {
        Client::connect(&self.node.socket(), LIMIT).unwrap()
    }

    fn stop(mut self) {
        let pid = self.child.id().to_string();
        assert!(run("kill", &["-TERM", &pid]).status.success());
        let mut status = None;
        until("the agent stops", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        assert_eq!(status.unwrap().code(), Some(0), "{}", self.node.log());
    }
}

fn attachment() -> Attachment {
    Attachment {
        container_id: "c1".into(),
        ifname: "eth0".into(),
    }
}

fn add(client: &mut Client, uid: &str) -> Reservation {
    let request = Request::Add {
        attachment: attachment(),
        network: "skein".into(),
        netns: "/run/netns/x".into(),
        pod: Some(PodRef {
            namespace: "shop".into(),
            name: "web".into(),
            uid: uid.into(),
        }),
        ips: vec![],
        mac: None,
        mtu: None,
    };
    match client.call(&request).unwrap() {
        Reply::Reserved(reservation) => reservation,
        other => panic!("no reservation: {other:?}"),
    }
}

/// Makes the veth as the plugin would; its host end's index.
fn make_veth(node: &Node, reservation: &Reservation) -> u32 {
    let Reservation {
        host_ifname,
        pod_mac,
        host_mac,
        device_mtu,
        ..
    } = reservation;
    let name = &node.name;
    let pod = node.pod();
    ip(&format!(
        "-n {name} link add {host_ifname} numrxqueues 1 numtxqueues 1 mtu {device_mtu} \
         address {host_mac} type veth peer name eth0 numrxqueues 1 numtxqueues 1 \
         mtu {device_mtu} address {pod_mac} netns {pod}"
    ));
    let pod_ip = reservation.ips[0];
    ip(&format!("-n {pod} link set lo up"));
    ip(&format!("-n {pod} addr add {pod_ip}/32 dev eth0"));
    ip(&format!("-n {pod} link set eth0 up"));
    ip(&format!(
        "-n {pod} route add 169.254.1.1 dev eth0 scope link"
    ));
    ip(&format!(
        "-n {pod} route add default via 169.254.1.1 dev eth0"
    ));
    let show = run("ip", &["-n", name, "-j", "link", "show", host_ifname]);
    let links: Value = serde_json::from_slice(&show.stdout).unwrap();
    u32::try_from(links[0]["ifindex"].as_u64().unwrap()).unwrap()
}

/// Whether the datapath answers the pod's ARP for its gateway.
fn gateway_answers(node: &Node) -> bool {
    let pod = node.pod();
    ip(&format!("-n {pod} neigh flush dev eth0"));
    // The gateway answers ARP, not the echo request that has the kernel ask.
    let ping = [
        "netns",
        "exec",
        &pod,
        "ping",
        "-n",
        "-c",
        "1",
        "-W",
        "1",
        "169.254.1.1",
    ];
    run("ip", &ping);
    let shown = run("ip", &["-n", &pod, "neigh", "show", "169.254.1.1"]);
    String::from_utf8_lossy(&shown.stdout).contains("lladdr")
}

/// Adds the pod, and answers whether its gateway is there.
fn add_pod(node: &Node, agent: &Agent<'_>, uid: &str) -> Reservation {
    let mut client = agent.client();
    let reservation = add(&mut client, uid);
    let ifindex = make_veth(node, &reservation);
    let attach = Request::Attach {
        attachment: attachment(),
        ifindex,
    };
    let reply = client.call(&attach).unwrap();
    assert_eq!(reply, Reply::Attached, "{}", node.log());
    assert!(gateway_answers(node), "{}", node.log());
    reservation
}

#[test]
fn a_pod_is_added_and_seen() {
    let node = Node::new();
    node.pod_manifest("u1");
    let agent = node.start();
    agent.until_ready();
    let reservation = add_pod(&node, &agent, "u1");
    assert_eq!(reservation.ips[0].to_string(), "10.1.1.2");
    assert_eq!(reservation.route_mtu, 1450);

    let endpoints = agent.view("endpoints");
    let endpoint = &endpoints["endpoints"][0];
    assert_eq!(endpoint["state"], "ready");
    assert_eq!(endpoint["mode"], "generic");
    assert_eq!(agent.view("status")["uplinks"][0]["mode"], "native");
    assert!(endpoint["rx_packets"].as_u64().unwrap() > 0);
    let identity = endpoint["identity"].as_u64().unwrap();
    assert!(identity >= 256);
    let file = node.path(&format!("cluster/skein.io/identities/{identity}.yaml"));
    assert!(fs::read_to_string(file).unwrap().contains("label:app"));
    let ipcache = agent.view("ipcache").to_string();
    assert!(ipcache.contains("10.1.1.2/32"), "{ipcache}");
    assert!(ipcache.contains("10.1.2.0/24"), "{ipcache}");
    until("the peer is reachable", || {
        agent.view("status")["healthy"] == true
    });
    let metrics = agent.view("metrics")["text"].to_string();
    assert!(metrics.contains("skein_endpoints 1"), "{metrics}");
    agent.stop();
    assert!(node.log().contains(BALANCED), "{}", node.log());
}

#[test]
fn a_pod_survives_restarts_and_goes_without_a_trace() {
    let node = Node::new();
    node.pod_manifest("u1");
    let agent = node.start();
    agent.until_ready();
    let reservation = add_pod(&node, &agent, "u1");
    let identity = agent.view("endpoints")["endpoints"][0]["identity"].clone();

    // A clean stop, and a crash: both times the next agent takes the pod over.
    agent.stop();
    assert!(!gateway_answers(&node));
    let agent = node.start();
    until("the gateway answers again", || gateway_answers(&node));
    drop(agent);
    let agent = node.start();
    until("the gateway answers again", || gateway_answers(&node));
    until("the identity is known again", || {
        agent.view("endpoints")["endpoints"][0]["identity"] == identity
    });

    // The same ADD again: the plugin removes what is left and makes it anew.
    agent.until_ready();
    assert_eq!(add_pod(&node, &agent, "u1"), reservation);
    for _ in 0..2 {
        let attachment = attachment();
        let del = Request::Del { attachment };
        assert_eq!(agent.client().call(&del).unwrap(), Reply::Done);
    }
    let left = agent.view("endpoints");
    assert_eq!(left["endpoints"].as_array().unwrap().len(), 0);
    assert_eq!(agent.view("status")["addresses"]["ipv4"]["used"], 0);
    let device = &reservation.host_ifname;
    let left = run("ip", &["-n", &node.name, "link", "show", device]);
    assert!(!left.status.success(), "the device stays");
    assert!(!node.path(&format!("bpf/skein/{device}")).exists());
    agent.stop();
    assert!(node.log().contains(BALANCED), "{}", node.log());
}

#[test]
fn an_endpoint_that_cannot_be_restored_is_tried_again() {
    let node = Node::new();
    node.pod_manifest("u1");
    let agent = node.start();
    agent.until_ready();
    let reservation = add_pod(&node, &agent, "u1");
    agent.stop();
    // Something stands where the map is to be pinned.
    let pin = node.path(&format!("bpf/skein/{}/xsks", reservation.host_ifname));
    fs::remove_file(&pin).unwrap();
    fs::create_dir(&pin).unwrap();
    let agent = node.start();
    until("it fails", || node.log().contains("is not restored"));
    assert!(!gateway_answers(&node));
    fs::remove_dir(&pin).unwrap();
    until("the gateway answers again", || gateway_answers(&node));
    until("all is well", || agent.view("status")["healthy"] == true);
    agent.stop();
    assert!(node.log().contains(BALANCED), "{}", node.log());
}

#[test]
fn a_connection_that_ends_late_leaves_a_later_add_alone() {
    let node = Node::new();
    node.pod_manifest("u1");
    let agent = node.start();
    agent.until_ready();
    let mut late = agent.client();
    add(&mut late, "u1");
    // The runtime gave the first ADD up; its plugin lives on for a while.
    let attachment = attachment();
    let del = Request::Del { attachment };
    assert_eq!(agent.client().call(&del).unwrap(), Reply::Done);
    add_pod(&node, &agent, "u1");
    let attach = Request::Attach {
        attachment: self::attachment(),
        ifindex: 999,
    };
    assert!(matches!(late.call(&attach).unwrap(), Reply::Error(_)));
    drop(late);
    // The end of the connection reaches the agent before what is asked after it; a while more
    // would show the pod gone, were it taken away.
    for _ in 0..20 {
        assert_eq!(agent.view("status")["addresses"]["ipv4"]["used"], 1);
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(gateway_answers(&node), "{}", node.log());
    agent.stop();
    assert!(node.log().contains(BALANCED), "{}", node.log());
}

#[test]
fn an_add_waits_for_its_very_pod_and_gives_back_what_fails() {
    let node = Node::new();
    node.pod_manifest("old");
    let agent = node.start();
    agent.until_ready();
    let mut client = agent.client();
    let reservation = add(&mut client, "new");
    let ifindex = make_veth(&node, &reservation);
    let attach = Request::Attach {
        attachment: attachment(),
        ifindex,
    };
    let answer = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| client.call(&attach).unwrap());
        until("the ADD waits", || {
            agent.view("endpoints")["endpoints"][0]["state"] == "waiting"
        });
        node.pod_manifest("new");
        waiting.join().unwrap()
    });
    assert_eq!(answer, Reply::Attached, "{}", node.log());
    drop(client);
    // Attached: the end of the connection gives nothing back.
    assert_eq!(agent.view("status")["addresses"]["ipv4"]["used"], 1);

    // A second one is given back: its device is not there.
    let mut client = agent.client();
    let other = Attachment {
        container_id: "c2".into(),
        ifname: "eth0".into(),
    };
    let request = Request::Add {
        attachment: other.clone(),
        network: "skein".into(),
        netns: "/run/netns/x".into(),
        pod: None,
        ips: vec![],
        mac: None,
        mtu: None,
    };
    assert!(matches!(client.call(&request).unwrap(), Reply::Reserved(_)));
    assert_eq!(agent.view("status")["addresses"]["ipv4"]["used"], 2);
    let attach = Request::Attach {
        attachment: other,
        ifindex: 999,
    };
    let Reply::Error(error) = client.call(&attach).unwrap() else {
        panic!("attached")
    };
    assert!(error.to_string().contains("cannot be opened"), "{error}");
    drop(client);
    until("the address is given back", || {
        agent.view("status")["addresses"]["ipv4"]["used"] == 1
    });

    // The pod's namespace goes without a DEL: said, and the link closed.
    ip(&format!("-n {} link del eth0", node.pod()));
    until("the loss is noticed", || {
        agent.view("endpoints")["endpoints"][0]["state"] == "lost"
    });
    let status = agent.view("status");
    assert_eq!(status["healthy"], false);
    assert!(status["faults"].to_string().contains("gone without a DEL"));
    // GC with nothing valid removes it.
    // … of its own network, and none of another's.
    for (network, left) in [("other", 1), ("skein", 0)] {
        let gc = Request::Gc {
            network: network.into(),
            valid: vec![],
        };
        assert_eq!(agent.client().call(&gc).unwrap(), Reply::Done);
        let used = &agent.view("status")["addresses"]["ipv4"]["used"];
        assert_eq!(*used, left, "{network}");
    }
    agent.stop();
    assert!(node.log().contains(BALANCED), "{}", node.log());
}

#[test]
fn manifests_are_live_and_their_faults_are_said() {
    let node = Node::new();
    let agent = node.start();
    agent.until_ready();
    node.manifest("bad.yaml", "apiVersion: v1\nkind: Podd\n");
    until("the fault is said", || {
        let faults = agent.view("status")["faults"].to_string();
        faults.contains("bad.yaml:1: unknown apiVersion 'v1' and kind 'Podd'")
    });
    let metrics = agent.view("metrics")["text"].to_string();
    assert!(metrics.contains("skein_documents_refused 1"), "{metrics}");
    node.manifest(
        "bad.yaml",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: far, namespace: x}\n\
         spec: {nodeName: n2}\nstatus: {podIP: 10.1.2.9}\n",
    );
    until("the pod is known", || {
        agent.view("ipcache").to_string().contains("10.1.2.9/32")
    });
    assert_eq!(
        agent.view("identities")["identities"]
            .as_array()
            .unwrap()
            .len(),
        7
    );
    // Without its Node object the node takes no pod, and says why.
    fs::remove_file(node.path("cluster/node1.yaml")).unwrap();
    until("the node is not ready", || {
        let reasons = agent.view("status")["not_ready"].to_string();
        reasons.contains("there is no Node object of the name n1")
    });
    let Reply::Error(error) = agent.client().call(&Request::Status).unwrap() else {
        panic!("able")
    };
    assert_eq!(error.code, 50);
    let table = Command::new(SKEINCTL)
        .args(["status", "--socket"])
        .arg(node.socket())
        .output()
        .unwrap();
    assert_eq!(table.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&table.stdout).contains("not ready"));
    agent.stop();
}

fn fails(mut command: Command, code: i32, text: &str) {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(said.contains(text), "{text}: {said}");
}

#[test]
fn an_add_that_comes_too_early_waits_for_the_agent() {
    let node = Node::new();
    node.pod_manifest("u1");
    let manifest = fs::read_to_string(node.path("cluster/node1.yaml")).unwrap();
    fs::remove_file(node.path("cluster/node1.yaml")).unwrap();
    let agent = node.start();
    let mut client = agent.client();
    std::thread::scope(|scope| {
        let early = scope.spawn(|| add(&mut client, "u1"));
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(agent.view("status")["endpoints"], 0);
        assert!(!early.is_finished());
        node.manifest("node1.yaml", &manifest);
        assert_eq!(early.join().unwrap().ips[0].to_string(), "10.1.1.2");
    });
    // In vain, it is told what is missing.
    fs::remove_file(node.path("cluster/node1.yaml")).unwrap();
    until("the node is gone", || {
        agent.view("status")["ready"] == false
    });
    let request = Request::Add {
        attachment: Attachment {
            container_id: "c2".into(),
            ifname: "eth0".into(),
        },
        network: "skein".into(),
        netns: "/run/netns/x".into(),
        pod: None,
        ips: vec![],
        mac: None,
        mtu: None,
    };
    let Reply::Error(error) = agent.client().call(&request).unwrap() else {
        panic!("reserved")
    };
    assert_eq!(error.code, 11);
    assert!(error.details.contains("no Node object"), "{error}");
    agent.stop();
}

#[test]
fn an_add_waits_for_its_pods_object_whose_annotations_count() {
    let node = Node::new();
    let agent = node.start();
    agent.until_ready();
    let mut client = agent.client();
    let reservation = std::thread::scope(|scope| {
        let early = scope.spawn(|| add(&mut client, "u1"));
        std::thread::sleep(Duration::from_millis(200));
        assert!(!early.is_finished());
        node.manifest(
            "pod.yaml",
            "apiVersion: v1\nkind: Pod\n\
             metadata: {name: web, namespace: shop, uid: u1, annotations: \
             {skein.io/large-frames: \"false\", skein.io/tx-checksum: full}}\n\
             spec: {nodeName: n1}\n",
        );
        early.join().unwrap()
    });
    assert_eq!(
        (reservation.device_mtu, reservation.route_mtu),
        (1450, 1450)
    );
    let off = &reservation.disable_features;
    assert!(
        off.iter().any(|name| name == "tx-checksum-ip-generic"),
        "{off:?}"
    );
    drop(client);
    // One that nobody knows by then is made as the configuration says.
    let unknown = add(&mut agent.client(), "u2");
    assert_eq!((unknown.device_mtu, unknown.route_mtu), (65_535, 1450));
    agent.stop();
}

#[test]
fn a_second_agent_is_told_and_the_first_goes_on() {
    let node = Node::new();
    let agent = node.start();
    agent.until_ready();
    let process = format!("another skeind (process {})", agent.child.id());
    fails(node.skeind(), 1, &process);
    assert_eq!(agent.view("status")["ready"], true);
    // With a state directory of its own it still meets the first.
    let config = fs::read_to_string(node.path("skeind.toml")).unwrap();
    let other = config.replace("/state\"", "/state2\"");
    fs::write(node.path("skeind.toml"), other).unwrap();
    fails(
        node.skeind(),
        1,
        "another process uses AF_XDP on this queue",
    );
    assert_eq!(agent.view("status")["ready"], true);
    agent.stop();
}

#[test]
fn what_cannot_work_is_one_clear_line() {
    let node = Node::new();
    let config = fs::read_to_string(node.path("skeind.toml")).unwrap();
    let with = |from: &str, to: &str| {
        assert!(config.contains(from));
        fs::write(node.path("skeind.toml"), config.replace(from, to)).unwrap();
        node.skeind()
    };
    fails(
        with("[\"up0\"]", "[\"none0\"]"),
        1,
        "uplink none0 does not exist",
    );
    fails(
        with("\"directory\"", "\"kubernetes\""),
        1,
        "not built into this agent yet",
    );
    fails(
        with("[api]", "[overlay]\nmode = \"native\"\n[api]"),
        1,
        "overlay.mode = \"native\" is not built into this agent yet",
    );
    fails(
        with("[uplink]", "[uplink]\nio = \"udp\""),
        1,
        "uplink.io = \"udp\" is not built into this agent yet",
    );
    fails(with("/cluster\"", "/nowhere\""), 1, "set cluster.directory");
    fails(
        with("[api]", "[workers]\ncpus = [1000]\n[api]"),
        1,
        "cannot run on CPU 1000",
    );
    fails(
        with("[api]", "[api]\nmetrics = \"192.0.2.99:1\""),
        1,
        "see api.metrics",
    );
    fails(
        with("name = \"n1\"", "name = \"N_1\"\nx = 1"),
        2,
        "line 3: node.x: unknown key",
    );
    fails(
        with("interfaces = [\"up0\"]", ""),
        2,
        "there is no default route",
    );
    let mut nobody = Command::new(SKEINCTL);
    nobody.arg("--socket").arg(node.socket()).arg("status");
    let said = nobody.output().unwrap();
    assert_eq!(said.status.code(), Some(1));
    let said = String::from_utf8_lossy(&said.stderr);
    assert_eq!(said.lines().count(), 1);
    assert_eq!(said.matches("os error 2").count(), 1, "{said}");
    let check = |path: &Path| {
        let mut command = Command::new(SKEIND);
        command.args(["--check-config", "--config"]).arg(path);
        command
    };
    fails(check(&node.path("none")), 2, "cannot be read");
    fs::write(node.path("good"), &config).unwrap();
    assert_eq!(check(&node.path("good")).status().unwrap().code(), Some(0));
    let mut overridden = check(&node.path("good"));
    overridden.env("SKEIN_OVERLAY_PORT", "0");
    fails(overridden, 2, "SKEIN_OVERLAY_PORT: overlay.port");
}

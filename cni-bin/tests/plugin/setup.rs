//! A node, a pod and an agent for one test, and the binary run between them.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use skein_cni::agent::Attachment;
use skein_cni::netlink::Link;

use crate::agent::FakeAgent;
use crate::common::TestNetns;

/// A node, a pod's namespace, and an agent.
pub struct Setup {
    pub host: TestNetns,
    pub pod: TestNetns,
    pub agent: FakeAgent,
    folder: tempfile::TempDir,
}

/// What a call of the binary came to.
#[derive(Debug)]
pub struct Ran {
    pub is_success: bool,
    pub stdout: String,
}

impl Ran {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap()
    }

    /// The code of the error that it printed.
    pub fn code(&self) -> u64 {
        assert!(!self.is_success, "{self:?}");
        self.json()["code"].as_u64().unwrap()
    }

    pub fn success(self) -> Self {
        assert!(self.is_success, "{self:?}");
        self
    }
}

impl Setup {
    pub fn new() -> Self {
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

    pub fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// Where other plugins are looked for.
    pub fn bin(&self) -> PathBuf {
        self.folder.path().join("bin")
    }

    /// A configuration with `extra` keys.
    pub fn conf(&self, extra: &Value) -> Value {
        let mut conf = json!({
            "cniVersion": "1.1.0", "name": "skein", "type": "skein-cni",
            "socket": self.agent.socket, "logFile": self.log(),
        });
        for (key, value) in extra.as_object().into_iter().flatten() {
            conf[key] = value.clone();
        }
        conf
    }

    pub fn start(&self, command: &str, extra: &Value) -> Child {
        let mut plugin = Command::new(env!("CARGO_BIN_EXE_skein-cni"));
        plugin
            .env_clear()
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", "c1")
            .env("CNI_NETNS", self.pod.path())
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", self.bin())
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

    pub fn run(&self, command: &str, extra: &Value) -> Ran {
        let output = self.start(command, extra).wait_with_output().unwrap();
        Ran {
            is_success: output.status.success(),
            stdout: String::from_utf8(output.stdout).unwrap(),
        }
    }

    pub fn add(&self) -> Ran {
        self.run("ADD", &Value::Null)
    }

    pub fn del(&self) -> Ran {
        self.run("DEL", &Value::Null)
    }

    pub fn pod_link(&self) -> Option<Link> {
        self.pod.netlink(|n| n.link_by_name("eth0").unwrap())
    }

    pub fn host_link(&self) -> Option<Link> {
        self.host.netlink(|n| n.link_by_name("skein7").unwrap())
    }

    /// Nothing is left of any ADD.
    pub fn assert_clean(&self) {
        assert_eq!(self.pod_link(), None);
        self.assert_host_clean();
    }

    pub fn assert_host_clean(&self) {
        let links = self.host.netlink(|n| n.links().unwrap());
        assert_eq!(links.len(), 1, "only the loopback: {links:?}");
        // The agent learns of the end of a connection a moment after the plugin.
        until("no reservation is left", || {
            self.agent.with(|state| state.reserved.is_empty())
        });
    }
}

/// Waits for what must come about.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}: did not come about");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn attachment() -> Attachment {
    Attachment {
        container_id: "c1".into(),
        ifname: "eth0".into(),
    }
}

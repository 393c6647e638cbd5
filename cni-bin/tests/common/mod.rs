//! Throw-away network namespaces for tests. Needs root, and says so where it is missing.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use skein_cni::netlink::Netlink;
use skein_cni::netns::Netns;

static COUNTER: AtomicU32 = AtomicU32::new(0);

/// A named network namespace of this test's own; removed when dropped.
pub struct TestNetns {
    pub name: String,
    pub netns: Netns,
}

impl TestNetns {
    /// Makes a namespace; panics without root.
    pub fn new() -> Self {
        let counter = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = format!("skt-{}-{counter}", std::process::id());
        ip(&["netns", "add", &name]);
        let netns = Netns::open(&Path::new("/run/netns").join(&name)).unwrap();
        Self { name, netns }
    }

    pub fn path(&self) -> PathBuf {
        self.netns.path().to_owned()
    }

    /// Runs `work` inside, with a netlink socket of the namespace.
    pub fn netlink<T: Send>(&self, work: impl FnOnce(&mut Netlink) -> T + Send) -> T {
        self.netns
            .run(|| work(&mut Netlink::open().unwrap()))
            .unwrap()
    }

    /// Removes the name, so that the namespace is gone for whoever looks it up.
    pub fn remove(&self) {
        ip(&["netns", "delete", &self.name]);
    }
}

impl Drop for TestNetns {
    fn drop(&mut self) {
        // The test may have removed it already, or it may be failing: nothing to check.
        let _ = Command::new("ip")
            .args(["netns", "delete", &self.name])
            .output();
    }
}

/// Runs `ip` and panics with its words where it fails.
pub fn ip(arguments: &[&str]) {
    let output = Command::new("ip")
        .args(arguments)
        .output()
        .expect("ip (iproute2) is installed");
    assert!(
        output.status.success(),
        "ip {}: {} (network namespace tests need root)",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
}

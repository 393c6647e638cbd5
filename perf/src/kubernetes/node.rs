//! A lab's node made into a machine that Kubernetes can use: mounts, containerd, kubelet and,
//! where it is wanted, kube-proxy.
//!
//! ```text
//! /etc, /opt, /var/lib, /var/log   the machine's, with a layer of this node's above
//! /etc/cni/net.d, /opt/cni/bin     empty but for what the lab puts there
//! /var/lib/containerd, .../kubelet folders of the lab's
//! /sys/fs/cgroup                   the machine's hierarchies
//! /proc/sys/{vm,kernel}/...        six files that say what the kubelet wants to read
//! ```
//!
//! Those six are settings of the whole machine: the kubelet would change them, and nothing here
//! may. It runs with `protectKernelDefaults`, so that it fails rather than writes.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

use super::cgroup;
use super::daemon::{self, Daemon};
use super::image;
use super::pki::Pki;
use super::programs::Programs;
use crate::node::NodeInfo;
use crate::state;

/// containerd's socket, inside the node.
pub const CONTAINERD: &str = "/run/containerd/containerd.sock";

/// The folder of CNI configurations, inside the node.
pub const CNI_CONF: &str = "/etc/cni/net.d";

/// The folder of CNI plugins, inside the node.
pub const CNI_BIN: &str = "/opt/cni/bin";

/// How long containerd may take to answer, and an import to unpack.
const PATIENCE: Duration = Duration::from_secs(120);

/// `$1` is the node's folder; standard input has a line `NAME OPTIONS` for each control group
/// hierarchy of version 1, or none.
const MOUNTS: &str = r#"
# Private to this node, but shared inside: the runtime hands mounts on to containers.
mount --make-rshared /
for place in etc opt var/lib var/log; do
    layer=$1/layers/$place
    mkdir -p "$layer/upper" "$layer/work"
    mount -t overlay -o "lowerdir=/$place,upperdir=$layer/upper,workdir=$layer/work" overlay "/$place"
done
for place in containerd kubelet; do
    mkdir -p "$1/$place" "/var/lib/$place"
    mount --bind "$1/$place" "/var/lib/$place"
done
for place in /etc/cni/net.d /opt/cni/bin; do
    mkdir -p "$place"
    mount -t tmpfs -o mode=755 tmpfs "$place"
done
mkdir /run/sysctl
while read -r file value; do
    echo "$value" > "/run/sysctl/${file##*/}"
    mount --bind "/run/sysctl/${file##*/}" "/proc/sys/$file"
done <<END
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
END
first=yes
while read -r name options; do
    if [ $first = yes ]; then
        umount /sys/fs/cgroup 2>/dev/null || true
        mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
        first=no
    fi
    mkdir -p "/sys/fs/cgroup/$name"
    mount -t cgroup -o "$options" cgroup "/sys/fs/cgroup/$name"
done
"#;

/// Gives the node its mounts and control groups.
///
/// # Errors
/// What mount(8) or the kernel refuses.
pub fn prepare(node: &NodeInfo) -> Result<()> {
    cgroup::make(&node.lab, &node.name)?;
    let hierarchies: String = cgroup::hierarchies()
        .iter()
        .filter(|hierarchy| !hierarchy.unified)
        .filter_map(|hierarchy| {
            let name = hierarchy.mount.file_name()?.to_string_lossy();
            Some(format!("{name} {}\n", hierarchy.options))
        })
        .collect();
    node.cmd("sh")
        .args(["-ec", MOUNTS, "sh"])
        .arg(node.node_directory())
        .stdin(hierarchies)
        .run()
        .map(drop)
        .with_context(|| format!("cannot make the mounts of {}", node.name))
}

/// Starts containerd and imports the images.
///
/// # Errors
/// With the end of containerd's log, or ctr's.
pub fn start_containerd(node: &NodeInfo, archives: &[PathBuf]) -> Result<Daemon> {
    let config = node.node_directory().join("containerd.toml");
    state::write_atomically(&config, &containerd_config())?;
    let command = node.cmd("containerd").arg("--config").arg(&config);
    let mut daemon = Daemon::start(node, "containerd", command)?;
    daemon.wait(PATIENCE, || ctr(node, &["version"]).map(drop))?;
    for archive in archives {
        node.cmd("ctr")
            .args(["--address", CONTAINERD, "--namespace", "k8s.io"])
            .args(["images", "import"])
            .arg(archive)
            .timeout(PATIENCE)
            .run()?;
    }
    Ok(daemon)
}

fn ctr(node: &NodeInfo, arguments: &[&str]) -> Result<String> {
    let command = node.cmd("ctr").args(["--address", CONTAINERD]);
    Ok(command.args(arguments).run()?.stdout)
}

fn containerd_config() -> String {
    format!(
        r#"version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
    "io.containerd.internal.v1.tracing",
]

[grpc]
address = "{CONTAINERD}"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
# A machine may lack CAP_SYS_RESOURCE or AppArmor; neither matters here.
restrict_oom_score_adj = true
disable_apparmor = true
stream_server_address = "127.0.0.1"

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{CNI_BIN}"
conf_dir = "{CNI_CONF}"

[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"#,
        pause = image::PAUSE
    )
}

/// What a node is in its cluster.
#[derive(Clone, Debug)]
pub struct Role {
    /// Runs the control plane: carries a taint that keeps ordinary pods away.
    pub control_plane: bool,
    /// Tells the API server both of the node's addresses.
    pub dual_stack: bool,
}

/// Starts the kubelet, which registers the node.
///
/// # Errors
/// With the end of its log.
pub fn start_kubelet(
    node: &NodeInfo,
    programs: &Programs,
    pki: &Pki,
    server: &str,
    role: &Role,
) -> Result<Daemon> {
    let name = &node.name;
    let user = format!("system:node:{name}");
    let kubeconfig = pki.client(&format!("kubelet-{name}"), &user, "system:nodes", server)?;
    let config = node.node_directory().join("kubelet.json");
    state::write_json(&config, &kubelet_config(node, pki, role))?;
    let addresses: Vec<String> = node
        .addresses
        .iter()
        .filter(|address| role.dual_stack || address.is_ipv4())
        .map(ToString::to_string)
        .collect();
    let command = node
        .cmd(programs.path("kubelet"))
        .arg(format!("--config={}", config.display()))
        .arg(format!("--kubeconfig={}", kubeconfig.display()))
        .arg(format!("--hostname-override={name}"))
        .arg(format!("--node-ip={}", addresses.join(",")))
        .arg("--cert-dir=/var/lib/kubelet/pki");
    Daemon::start(node, "kubelet", command)
}

fn kubelet_config(node: &NodeInfo, pki: &Pki, role: &Role) -> serde_json::Value {
    let mut config = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": pki.certificate("ca")},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": format!("unix://{CONTAINERD}"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": format!("/{}/{}", node.lab, node.name),
        "enforceNodeAllocatable": ["pods"],
        "failCgroupV1": false,
        "failSwapOn": false,
        "localStorageCapacityIsolation": false,
        "protectKernelDefaults": true,
        "oomScoreAdj": 0,
        // Name resolution is none of this cluster's business.
        "resolvConf": "",
        // Its default lies outside the node's own folders.
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        // A full disk of the machine's is its own affair, and no image can be fetched again.
        "evictionHard": {"nodefs.available": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "5s",
        "healthzBindAddress": "127.0.0.1",
        "logging": {"verbosity": 1},
    });
    if role.control_plane {
        config["registerWithTaints"] = json!([{
            "key": "node-role.kubernetes.io/control-plane",
            "effect": "NoSchedule",
        }]);
    }
    config
}

/// Starts kube-proxy, the baseline for services.
///
/// # Errors
/// With the end of its log if it does not come up.
pub fn start_kube_proxy(
    node: &NodeInfo,
    programs: &Programs,
    pki: &Pki,
    server: &str,
    pod_ranges: &str,
) -> Result<Daemon> {
    let name = format!("kube-proxy-{}", node.name);
    let kubeconfig = pki.client(&name, "system:kube-proxy", "", server)?;
    let mut command = node
        .cmd(programs.path("kube-proxy"))
        .arg(format!("--kubeconfig={}", kubeconfig.display()))
        .arg(format!("--hostname-override={}", node.name))
        .arg(format!("--cluster-cidr={pod_ranges}"))
        .args([
            "--proxy-mode=iptables",
            "--healthz-bind-address=127.0.0.1:10256",
        ]);
    // Connection tracking's limits are the machine's own: left as they are.
    for limit in [
        "max-per-core",
        "min",
        "tcp-timeout-established",
        "tcp-timeout-close-wait",
        "udp-timeout",
        "udp-timeout-stream",
    ] {
        command = command.arg(format!("--conntrack-{limit}=0"));
    }
    let mut daemon = Daemon::start(node, "kube-proxy", command)?;
    daemon.wait(PATIENCE, || {
        daemon::http_get(node, "127.0.0.1:10256", "/healthz").map(drop)
    })?;
    Ok(daemon)
}

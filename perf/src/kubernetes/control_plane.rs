//! etcd, the API server, the controller manager and the scheduler, all on one node.

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::daemon::Daemon;
use super::pki::Pki;
use super::programs::Programs;
use crate::cmd::Cmd;
use crate::node::NodeInfo;

/// How long the API server may take until it serves; its first start writes all default objects.
const PATIENCE: Duration = Duration::from_secs(120);

/// The API server's port.
const PORT: u16 = 6443;

/// The address ranges of a cluster, each one range, or IPv4's and IPv6's with a comma between.
#[derive(Clone, Debug)]
pub struct Ranges {
    /// Of pods; each node gets a /24 or /64 of it.
    pub pods: String,
    /// Of services.
    pub services: String,
    /// The kubernetes Service's address: the first of `services`.
    pub kubernetes: Vec<IpAddr>,
}

impl Ranges {
    /// The ranges of a cluster with IPv4 alone, or with both.
    pub fn new(dual_stack: bool) -> Self {
        let mut ranges = Self {
            pods: "10.244.0.0/16".into(),
            services: "10.96.0.0/16".into(),
            kubernetes: vec![IpAddr::from([10, 96, 0, 1])],
        };
        if dual_stack {
            ranges.pods += ",fd00:10:244::/48";
            ranges.services += ",fd00:10:96::/112";
        }
        ranges
    }
}

/// The API server's URL as all nodes reach it.
///
/// # Errors
/// If the node has no address.
pub fn server_url(node: &NodeInfo) -> Result<String> {
    let address = address(node)?;
    Ok(format!("https://{address}:{PORT}"))
}

fn address(node: &NodeInfo) -> Result<IpAddr> {
    let first = node.addresses.first().copied();
    first.with_context(|| format!("{} has no address", node.name))
}

/// Starts all four and waits until the API server is ready. Returns them with the
/// administrator's kubeconfig written as `admin`.
///
/// # Errors
/// The first that does not come up, with the end of its log.
pub fn start(
    node: &NodeInfo,
    programs: &Programs,
    pki: &Pki,
    ranges: &Ranges,
) -> Result<Vec<Daemon>> {
    let server = server_url(node)?;
    let mut etcd = Daemon::start(node, "etcd", etcd(node))?;
    pki.server(
        "apiserver",
        &["kubernetes", "kubernetes.default", "kubernetes.default.svc"],
        &[&[address(node)?], ranges.kubernetes.as_slice()].concat(),
    )?;
    pki.client(
        "apiserver-kubelet",
        "kube-apiserver-kubelet",
        "system:masters",
        &server,
    )?;
    pki.client("front-proxy", "front-proxy-client", "", &server)?;
    let admin = pki.client("admin", "lab-admin", "system:masters", &server)?;
    let apiserver = apiserver(node, programs, pki, ranges)?;
    let mut apiserver = Daemon::start(node, "kube-apiserver", apiserver)?;
    let ready = || {
        let kubectl = kubectl(node, programs, &admin);
        kubectl.args(["get", "--raw", "/readyz"]).run().map(drop)
    };
    apiserver.wait(PATIENCE, ready)?;
    etcd.check()?;
    let mut daemons = vec![etcd, apiserver];
    for (name, command) in [
        (
            "kube-controller-manager",
            controller_manager(node, programs, pki, ranges, &server)?,
        ),
        ("kube-scheduler", scheduler(node, programs, pki, &server)?),
    ] {
        daemons.push(Daemon::start(node, name, command)?);
    }
    Ok(daemons)
}

/// kubectl with the administrator's rights, on the node.
pub fn kubectl(node: &NodeInfo, programs: &Programs, kubeconfig: &Path) -> Cmd {
    node.cmd(programs.path("kubectl"))
        .env(
            super::KUBECTL_CACHE_ENV,
            &super::kubectl_cache(&node.directory),
        )
        .arg(format!("--kubeconfig={}", kubeconfig.display()))
}

fn etcd(node: &NodeInfo) -> Cmd {
    let data = node.node_directory().join("etcd");
    node.cmd("etcd")
        .arg(format!("--data-dir={}", data.display()))
        .args([
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--logger=zap",
        ])
}

fn apiserver(node: &NodeInfo, programs: &Programs, pki: &Pki, ranges: &Ranges) -> Result<Cmd> {
    let address = address(node)?;
    let files = [
        ("client-ca-file", pki.certificate("ca")),
        ("tls-cert-file", pki.certificate("apiserver")),
        ("tls-private-key-file", pki.key("apiserver")),
        (
            "kubelet-client-certificate",
            pki.certificate("apiserver-kubelet"),
        ),
        ("kubelet-client-key", pki.key("apiserver-kubelet")),
        (
            "service-account-key-file",
            pki.certificate("service-accounts"),
        ),
        (
            "service-account-signing-key-file",
            pki.key("service-accounts"),
        ),
        ("requestheader-client-ca-file", pki.certificate("ca")),
        ("proxy-client-cert-file", pki.certificate("front-proxy")),
        ("proxy-client-key-file", pki.key("front-proxy")),
    ];
    let mut command = node
        .cmd(programs.path("kube-apiserver"))
        .arg(format!("--bind-address={address}"))
        .arg(format!("--advertise-address={address}"))
        .arg(format!("--secure-port={PORT}"))
        .arg(format!("--service-cluster-ip-range={}", ranges.services));
    for (name, path) in files {
        command = command.arg(format!("--{name}={}", path.display()));
    }
    Ok(command.args([
        "--etcd-servers=http://127.0.0.1:2379",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        "--kubelet-preferred-address-types=InternalIP",
        "--allow-privileged=true",
        "--profiling=false",
    ]))
}

fn controller_manager(
    node: &NodeInfo,
    programs: &Programs,
    pki: &Pki,
    ranges: &Ranges,
    server: &str,
) -> Result<Cmd> {
    let name = "kube-controller-manager";
    let kubeconfig = pki.client(name, "system:kube-controller-manager", "", server)?;
    let files = [
        ("kubeconfig", kubeconfig),
        ("root-ca-file", pki.certificate("ca")),
        ("cluster-signing-cert-file", pki.certificate("ca")),
        ("cluster-signing-key-file", pki.key("ca")),
        (
            "service-account-private-key-file",
            pki.key("service-accounts"),
        ),
    ];
    let mut command = node.cmd(programs.path(name)).args([
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        "--use-service-account-credentials=true",
        "--allocate-node-cidrs=true",
        // Made where it is missing; its default lies outside the node's own folders.
        "--flex-volume-plugin-dir=/var/lib/kubelet/volume-plugins",
    ]);
    command = command
        .arg(format!("--cluster-cidr={}", ranges.pods))
        .arg(format!("--service-cluster-ip-range={}", ranges.services));
    for (name, path) in files {
        command = command.arg(format!("--{name}={}", path.display()));
    }
    Ok(command)
}

fn scheduler(node: &NodeInfo, programs: &Programs, pki: &Pki, server: &str) -> Result<Cmd> {
    let name = "kube-scheduler";
    let kubeconfig = pki.client(name, "system:kube-scheduler", "", server)?;
    Ok(node
        .cmd(programs.path(name))
        .args(["--bind-address=127.0.0.1", "--leader-elect=false"])
        .arg(format!("--kubeconfig={}", kubeconfig.display())))
}

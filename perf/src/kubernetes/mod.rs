//! A real Kubernetes cluster out of the lab's nodes: the judge of a network plugin.
//!
//! Where the rest of the lab plays runtime, kubelet and API server, this runs them: etcd, API
//! server, controller manager and scheduler on the last node, containerd, runc and kubelet on
//! every one. The last node is a node of the cluster like the others, with a taint that keeps
//! ordinary pods away, so that the API server reaches pods as any node does.
//!
//! In the order in which a cluster comes to life:
//!
//! - [`programs`], [`image`]: what is built once and kept outside the tree;
//! - [`pki`]: certificates and kubeconfigs;
//! - [`cgroup`], [`node`]: a lab's node as a machine for Kubernetes;
//! - [`daemon`], [`control_plane`]: programs that stay, and the four that are the control plane;
//! - [`cni`]: the reference plugins, or Skein;
//! - [`e2e`]: the Kubernetes project's own tests;
//! - [`cli`]: `skein-lab cluster`.
//!
//! Deliberately absent: name resolution, storage, a registry; nothing is ever fetched. Namespaces,
//! names, records and removal are the lab's own: [`crate::lab`], [`crate::teardown`].

pub mod cgroup;
pub mod cli;
pub mod cni;
pub mod control_plane;
pub mod daemon;
pub mod e2e;
pub mod image;
pub mod node;
pub mod pki;
pub mod programs;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::cmd::Cmd;
use crate::lab::{Lab, LabOptions, Underlay};
use crate::node::NodeInfo;
use crate::pod::Netns;
use crate::{state, teardown};

use cni::{Cni, RegisteredNode};
use control_plane::Ranges;
use daemon::{Daemon, DaemonRecord};
use node::Role;
use pki::Pki;
use programs::Programs;

/// How long nodes may take to register, and then to become ready.
const PATIENCE: Duration = Duration::from_secs(120);

/// What kind of cluster to build.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// How many nodes beside the control plane's.
    pub nodes: usize,
    /// The network plugin.
    pub cni: Cni,
    /// IPv4 and IPv6.
    pub dual_stack: bool,
    /// Services by kube-proxy.
    pub kube_proxy: bool,
}

/// What another process needs to know of a cluster: its record.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClusterRecord {
    /// The lab's name.
    pub lab: String,
    /// The lab's folder.
    pub directory: PathBuf,
    /// The folder of built programs.
    programs: PathBuf,
    /// The network plugin.
    pub cni: Cni,
    /// Whether kube-proxy serves services.
    pub kube_proxy: bool,
    /// How many nodes there are beside the control plane's.
    pub workers: usize,
    /// The administrator's kubeconfig.
    pub admin: PathBuf,
    /// The node with the control plane.
    pub control_plane: String,
    /// What was started.
    pub daemons: Vec<DaemonRecord>,
}

impl ClusterRecord {
    /// The cluster that a command means: that of lab `name`, else the only one that is up.
    ///
    /// # Errors
    /// If there is none, or several.
    pub fn choose(name: Option<&str>) -> Result<Self> {
        let mut records: Vec<Self> = state::labs()
            .into_iter()
            .filter(|lab| name.map_or(lab.persistent, |name| lab.name == name))
            .filter_map(|lab| state::read_json(&path(&lab.name)).ok())
            .collect();
        ensure!(
            records.len() < 2,
            "several clusters are up: name one with --lab: {}",
            records
                .iter()
                .map(|r| r.lab.as_str())
                .collect::<Vec<_>>()
                .join(", ")
        );
        records
            .pop()
            .context("no cluster is up; start one with `skein-lab cluster up`")
    }

    /// The built programs.
    pub fn programs(&self) -> Programs {
        Programs::in_folder(self.programs.clone())
    }

    /// The image of the tests' pods, which has a web server, a shell and network tools.
    ///
    /// # Errors
    /// If it has not been made.
    pub fn agnhost(&self) -> Result<String> {
        image::agnhost(&self.programs())
    }

    /// The plugin's name as the command line has it.
    pub fn cni_name(&self) -> &'static str {
        match self.cni {
            Cni::Reference => "reference",
            Cni::Skein => "skein",
        }
    }

    /// A node by its name; `control` is the control plane's.
    ///
    /// # Errors
    /// If there is none of that name.
    pub fn node(&self, name: &str) -> Result<NodeInfo> {
        let name = if name == "control" {
            &self.control_plane
        } else {
            name
        };
        state::read_all::<NodeInfo>(&self.lab, "node-")?
            .into_iter()
            .find(|node| node.name == name)
            .with_context(|| format!("cluster {} has no node {name}", self.lab))
    }

    /// A command in the control plane's network, with the machine's own files.
    ///
    /// # Errors
    /// If the node's record cannot be read.
    pub fn in_network(&self, program: impl AsRef<Path>) -> Result<Cmd> {
        let netns = Netns {
            lab: self.lab.clone(),
            name: self.node(&self.control_plane)?.netns,
        };
        Ok(self.with_environment(netns.cmd(program)))
    }

    /// A command in a node, the built programs in its `PATH`.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn in_node(&self, node: &str, program: impl AsRef<Path>) -> Result<Cmd> {
        Ok(self.with_environment(self.node(node)?.cmd(program)))
    }

    fn with_environment(&self, command: Cmd) -> Cmd {
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!(
            "{}:{path}:{}",
            self.programs.display(),
            crate::cmd::SYSTEM_FOLDERS
        );
        command
            .env("PATH", &path)
            .env("KUBECONFIG", &self.admin.display().to_string())
            .env(KUBECTL_CACHE_ENV, &kubectl_cache(&self.directory))
            .env("CONTAINERD_ADDRESS", node::CONTAINERD)
            .env("CONTAINERD_NAMESPACE", "k8s.io")
    }

    /// kubectl with the administrator's rights.
    ///
    /// # Errors
    /// If the node's record cannot be read.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<Cmd> {
        let kubectl = self.in_network(self.programs().path("kubectl"))?;
        Ok(kubectl.args(arguments))
    }

    /// Creates or changes an object.
    ///
    /// # Errors
    /// kubectl's.
    pub fn apply(&self, object: &Value) -> Result<()> {
        self.kubectl(&["apply", "--filename=-"])?
            .stdin(object.to_string())
            .run()
            .map(drop)
    }

    /// Objects as JSON: `get(&["nodes"])`.
    ///
    /// # Errors
    /// kubectl's.
    pub fn get(&self, arguments: &[&str]) -> Result<Value> {
        let output = self.kubectl(&["get", "--output=json"])?.args(arguments);
        output.json()
    }
}

/// Where kubectl keeps what it has asked for; otherwise in the caller's home.
const KUBECTL_CACHE_ENV: &str = "KUBECACHEDIR";

fn kubectl_cache(directory: &Path) -> String {
    directory.join("kubectl-cache").display().to_string()
}

fn path(lab: &str) -> PathBuf {
    state::records(lab).join("cluster.json")
}

/// A cluster of this process; dropping it removes everything.
#[derive(Debug)]
pub struct Cluster {
    lab: Lab,
    record: ClusterRecord,
    daemons: Vec<Daemon>,
}

impl Cluster {
    /// Builds a cluster and waits until all its nodes are ready.
    ///
    /// # Errors
    /// What is missing on the machine, or the first program that does not come up with the end of
    /// its log. Nothing stays behind then.
    pub fn up(options: &ClusterOptions) -> Result<Self> {
        programs::require_tools()?;
        cni::require(options.cni)?;
        let programs = Programs::find()?;
        let archives = image::archives(&programs)?;
        let lab = Lab::new(&LabOptions {
            nodes: options.nodes + 1,
            underlay: if options.dual_stack {
                Underlay::Dual
            } else {
                Underlay::V4
            },
            ..LabOptions::default()
        })?;
        let control_plane = lab.nodes()[options.nodes].info().clone();
        let pki = Pki::create(lab.directory().join("pki"))?;
        let record = ClusterRecord {
            lab: lab.name().to_owned(),
            directory: lab.directory().to_owned(),
            programs: programs.folder().to_owned(),
            cni: options.cni,
            kube_proxy: options.kube_proxy,
            workers: options.nodes,
            admin: pki.folder().join("admin.kubeconfig"),
            control_plane: control_plane.name.clone(),
            daemons: Vec::new(),
        };
        let daemons = Vec::new();
        let mut cluster = Self {
            lab,
            record,
            daemons,
        };
        let ranges = Ranges::new(options.dual_stack);
        cluster.start_machines(&control_plane, &archives, &pki, &ranges)?;
        cluster.start_nodes(options, &control_plane, &pki, &ranges)?;
        cluster.connect(&control_plane, &pki)?;
        cluster.wait_ready()?;
        cluster.record.daemons = cluster.daemons.iter().map(|d| d.record().clone()).collect();
        state::write_json(&path(&cluster.record.lab), &cluster.record)?;
        Ok(cluster)
    }

    /// The cluster's record: what can be done with it.
    pub fn record(&self) -> &ClusterRecord {
        &self.record
    }

    /// Mounts and control groups, then containerd on all nodes beside the control plane's start.
    fn start_machines(
        &mut self,
        control_plane: &NodeInfo,
        archives: &[PathBuf],
        pki: &Pki,
        ranges: &Ranges,
    ) -> Result<()> {
        let nodes = self.node_infos();
        for info in &nodes {
            node::prepare(info)?;
        }
        let programs = self.record.programs();
        let daemons = std::thread::scope(|scope| -> Result<Vec<Daemon>> {
            let machines: Vec<_> = nodes
                .iter()
                .map(|info| scope.spawn(move || node::start_containerd(info, archives)))
                .collect();
            let mut daemons = control_plane::start(control_plane, &programs, pki, ranges)?;
            for machine in machines {
                let started = machine.join();
                let started = started.map_err(|_| anyhow::anyhow!("a thread panicked"))?;
                daemons.push(started?);
            }
            Ok(daemons)
        })?;
        self.daemons.extend(daemons);
        Ok(())
    }

    fn start_nodes(
        &mut self,
        options: &ClusterOptions,
        control_plane: &NodeInfo,
        pki: &Pki,
        ranges: &Ranges,
    ) -> Result<()> {
        let programs = self.record.programs();
        let server = control_plane::server_url(control_plane)?;
        for info in self.node_infos() {
            let role = Role {
                control_plane: info.name == control_plane.name,
                dual_stack: options.dual_stack,
            };
            let kubelet = node::start_kubelet(&info, &programs, pki, &server, &role)?;
            self.daemons.push(kubelet);
        }
        if options.kube_proxy {
            for info in self.node_infos() {
                let proxy = node::start_kube_proxy(&info, &programs, pki, &server, &ranges.pods)?;
                self.daemons.push(proxy);
            }
        }
        Ok(())
    }

    /// Waits for the nodes' pod ranges, then installs the network plugin.
    fn connect(&mut self, control_plane: &NodeInfo, pki: &Pki) -> Result<()> {
        let registered = self.wait_registered()?;
        let name = &control_plane.name;
        self.record
            .kubectl(&[
                "label",
                "node",
                name,
                "node-role.kubernetes.io/control-plane=",
            ])?
            .run()?;
        match self.record.cni {
            Cni::Reference => cni::install_reference(&self.node_infos(), &registered),
            Cni::Skein => {
                let server = control_plane::server_url(control_plane)?;
                let user = "skein-agent";
                let kubeconfig = pki.client(user, user, "system:masters", &server)?;
                let own_services = !self.record.kube_proxy;
                for number in 1..=self.lab.nodes().len() {
                    cni::install_skein(self.lab.node(number), &kubeconfig, &server, own_services)?;
                }
                Ok(())
            }
        }
    }

    fn wait_registered(&mut self) -> Result<Vec<RegisteredNode>> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            for daemon in &mut self.daemons {
                daemon.check()?;
            }
            let registered = registered(&self.record.get(&["nodes"])?);
            if registered.len() == self.lab.nodes().len() {
                return Ok(registered);
            }
            ensure!(
                Instant::now() < deadline,
                "of {} nodes only these have registered and have a pod range: {registered:?}",
                self.lab.nodes().len()
            );
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    fn wait_ready(&mut self) -> Result<()> {
        let seconds = PATIENCE.as_secs();
        self.record
            .kubectl(&["wait", "--for=condition=Ready", "nodes", "--all"])?
            .arg(format!("--timeout={seconds}s"))
            .timeout(PATIENCE + Duration::from_secs(10))
            .run()?;
        for daemon in &mut self.daemons {
            daemon.check()?;
        }
        Ok(())
    }

    fn node_infos(&self) -> Vec<NodeInfo> {
        self.lab
            .nodes()
            .iter()
            .map(|node| node.info().clone())
            .collect()
    }

    /// Leaves the cluster up when this process ends, until [`down`].
    ///
    /// # Errors
    /// If its first node has ended; the cluster is removed then.
    pub fn persist(self) -> Result<()> {
        self.lab.persist()
    }

    /// Removes everything now.
    ///
    /// # Errors
    /// What is left over.
    pub fn close(self) -> Result<()> {
        self.lab.close()
    }
}

/// Removes a cluster that another process left up.
///
/// # Errors
/// What is left over.
pub fn down(record: &ClusterRecord) -> Result<()> {
    teardown::teardown(&record.lab)
}

/// The nodes of a list that have a pod range.
fn registered(list: &Value) -> Vec<RegisteredNode> {
    let mut found = Vec::new();
    for node in list["items"].as_array().into_iter().flatten() {
        let ranges = node["spec"]["podCIDRs"].as_array();
        if let (Some(name), Some(ranges)) = (node["metadata"]["name"].as_str(), ranges) {
            found.push(RegisteredNode {
                name: name.to_owned(),
                pod_ranges: ranges
                    .iter()
                    .filter_map(|range| range.as_str().map(ToOwned::to_owned))
                    .collect(),
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_a_node_with_a_pod_range_counts_as_registered() {
        let list = json!({"items": [
            {"metadata": {"name": "node1"}, "spec": {"podCIDRs": ["10.244.0.0/24"]}},
            {"metadata": {"name": "node2"}, "spec": {}},
        ]});
        let nodes = registered(&list);
        assert_eq!(nodes.len(), 1);
        assert_eq!(
            (nodes[0].name.as_str(), nodes[0].pod_ranges.len()),
            ("node1", 1)
        );
    }
}

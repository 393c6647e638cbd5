//! A pod: a network namespace that the real plugin connects.
//!
//! The lab plays the container runtime as the CNI specification describes it: it makes the
//! namespace, runs the plugin with `CNI_*` variables and a configuration on standard input, and
//! reads a result or an error from standard output. Then it plays the kubelet: it reports the
//! addresses in the pod's manifest.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::cmd::{Cmd, Output, Running, tail};
use crate::node::NodeInfo;
use crate::{bins, cluster, state, wire};

/// The pod's interface.
pub const IFNAME: &str = "eth0";

/// The CNI error code "try again later".
const TRY_AGAIN: u64 = 11;

/// How long a runtime goes on trying again.
const PATIENCE: Duration = Duration::from_secs(60);

/// A network namespace of a lab, by name: where programs run and probes stand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Netns {
    /// The lab's name.
    pub lab: String,
    /// The namespace's name, a file in `/run/netns`.
    pub name: String,
}

impl Netns {
    /// Makes the namespace, with its loopback up.
    ///
    /// # Errors
    /// `ip`'s: one of that name exists, no root.
    pub fn add(lab: &str, name: String) -> Result<Self> {
        wire::ip(&format!("netns add {name}"))?;
        let netns = Self {
            lab: lab.to_owned(),
            name,
        };
        wire::ip(&format!("-n {} link set lo up", netns.name))?;
        Ok(netns)
    }

    /// Removes the name; the namespace ends with its last process.
    ///
    /// # Errors
    /// `ip`'s.
    pub fn delete(&self) -> Result<()> {
        wire::ip(&format!("netns delete {}", self.name))
    }

    /// A command inside.
    pub fn cmd(&self, program: impl AsRef<std::path::Path>) -> Cmd {
        Cmd::new(program.as_ref()).of_lab(&self.lab).prefix([
            "nsenter".to_owned(),
            format!("--net={}", self.path()),
            "--".to_owned(),
        ])
    }

    /// Its path on the machine, and in every node that has it.
    pub fn path(&self) -> String {
        format!("{}/{}", state::NETNS, self.name)
    }
}

/// Everything about a pod that another process can use: its record.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PodInfo {
    /// Kubernetes namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
    /// The container id that the plugin was given.
    pub container_id: String,
    /// The pod's network namespace.
    pub netns: Netns,
    /// The node that it is on.
    pub node: NodeInfo,
    /// Its addresses, as the plugin reported them.
    pub ips: Vec<IpAddr>,
    /// The result of ADD, which a runtime keeps and hands to CHECK and DEL as `prevResult`.
    pub result: Option<Value>,
}

/// A connected pod. Dropping the value leaves the pod; [`Pod::delete`] removes it, and so does
/// the end of the lab.
#[derive(Clone, Debug)]
pub struct Pod {
    info: PodInfo,
}

impl Pod {
    /// Makes a pod on `node` and connects it.
    ///
    /// # Errors
    /// If the plugin fails with anything but "try again later", or with that for a minute: its
    /// error as it wrote it. Namespace and manifest are gone then.
    pub fn add(
        node: &NodeInfo,
        namespace: &str,
        name: &str,
        labels: &BTreeMap<String, String>,
        annotations: &BTreeMap<String, String>,
    ) -> Result<Self> {
        let mut pod = Self::prepare(node, namespace, name, labels, annotations)?;
        pod.connect()?;
        Ok(pod)
    }

    /// The same, but for the plugin: a namespace and a manifest, for [`Pod::connect`].
    ///
    /// # Errors
    /// `ip`'s, or the manifest's.
    pub fn prepare(
        node: &NodeInfo,
        namespace: &str,
        name: &str,
        labels: &BTreeMap<String, String>,
        annotations: &BTreeMap<String, String>,
    ) -> Result<Self> {
        let netns = format!("{}-{}-{namespace}-{name}", node.lab, node.name);
        let container = cluster::uid(&format!("container/{netns}/{}", state::unique_name()));
        let info = PodInfo {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: cluster::uid(&format!("pod/{container}")),
            labels: labels.clone(),
            annotations: annotations.clone(),
            container_id: container.replace('-', "").repeat(2),
            netns: Netns::add(&node.lab, netns)?,
            node: node.clone(),
            ips: Vec::new(),
            result: None,
        };
        let pod = Self { info };
        let prepared = pod.show_in_node().and_then(|()| pod.write_manifest());
        prepared.map_err(|error| pod.give_up(error))?;
        Ok(pod)
    }

    /// Connects a prepared pod; how long the plugin took that succeeded.
    ///
    /// # Errors
    /// See [`Pod::add`].
    pub fn connect(&mut self) -> Result<Duration> {
        self.try_connect().map_err(|error| self.give_up(error))
    }

    fn give_up(&self, error: anyhow::Error) -> anyhow::Error {
        // The first error is the one to tell; the end of the lab removes what stays.
        drop(self.remove());
        error.context(format!(
            "pod {} on {}",
            self.full_name(),
            self.info.node.name
        ))
    }

    /// A pod that another process made, from its record.
    pub fn from_record(info: PodInfo) -> Self {
        Self { info }
    }

    fn try_connect(&mut self) -> Result<Duration> {
        let (result, took) = self.cni_add()?;
        self.info.ips = addresses(&result)?;
        self.info.result = Some(result);
        self.write_manifest()?;
        state::write_json(&self.record_path(), &self.info)?;
        Ok(took)
    }

    /// Binds the namespace to the same path in the node's own /run.
    fn show_in_node(&self) -> Result<()> {
        let path = self.info.netns.path();
        let bind = "touch \"$1\" && mount --bind /proc/self/ns/net \"$1\"";
        self.info
            .node
            .cmd_in_mounts("sh")
            .args(["-ec", bind, "sh", &path])
            .prefix(["nsenter".to_owned(), format!("--net={path}")])
            .run()
            .map(drop)
    }

    fn cni_add(&self) -> Result<(Value, Duration)> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let start = Instant::now();
            let output = self.cni("ADD")?.try_run()?;
            let reply: Value = serde_json::from_str(&output.stdout)
                .with_context(|| format!("skein-cni ADD wrote no JSON: {}", output.describe()))?;
            if output.status.success() {
                return Ok((reply, start.elapsed()));
            }
            if reply["code"] != TRY_AGAIN || Instant::now() >= deadline {
                bail!("skein-cni ADD failed: {}", output.describe());
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// The plugin, ready to run with `command`, as the runtime of this pod's node would.
    ///
    /// # Errors
    /// If the plugin is not built.
    pub fn cni(&self, command: &str) -> Result<Cmd> {
        let info = &self.info;
        let plugin = bins::find("skein-cni")?;
        let folder = plugin.parent().unwrap_or(&plugin).display().to_string();
        let arguments = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};\
             K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID={}",
            info.namespace, info.name, info.container_id, info.uid
        );
        let mut conf = json!({"cniVersion": "1.1.0", "name": "skein", "type": "skein-cni"});
        if let Some(result) = info.result.as_ref().filter(|_| command != "ADD") {
            conf["prevResult"] = result.clone();
        }
        Ok(info
            .node
            .cmd(plugin)
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", &info.container_id)
            .env("CNI_NETNS", &info.netns.path())
            .env("CNI_IFNAME", IFNAME)
            .env("CNI_PATH", &folder)
            .env("CNI_ARGS", &arguments)
            .stdin(conf.to_string()))
    }

    /// The pod's record.
    pub fn info(&self) -> &PodInfo {
        &self.info
    }

    /// `namespace/name`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.info.namespace, self.info.name)
    }

    /// Where its programs run.
    pub fn netns(&self) -> &Netns {
        &self.info.netns
    }

    /// Its IPv4 (`false`) or IPv6 (`true`) address.
    ///
    /// # Errors
    /// If it has none.
    pub fn ip(&self, v6: bool) -> Result<IpAddr> {
        let found = self.info.ips.iter().find(|ip| ip.is_ipv6() == v6);
        found.copied().with_context(|| {
            let version = if v6 { 6 } else { 4 };
            format!("{} has no IPv{version} address", self.full_name())
        })
    }

    /// Runs a program in the pod; fails unless it exits with 0.
    ///
    /// # Errors
    /// The command line with its exit status and output.
    pub fn exec(&self, argv: &[&str]) -> Result<Output> {
        self.cmd(argv)?.run()
    }

    /// Starts a program in the pod.
    ///
    /// # Errors
    /// If it cannot start.
    pub fn spawn(&self, argv: &[&str]) -> Result<Running> {
        self.cmd(argv)?.spawn()
    }

    fn cmd(&self, argv: &[&str]) -> Result<Cmd> {
        let [program, arguments @ ..] = argv else {
            bail!("no command given");
        };
        Ok(self.info.netns.cmd(program).args(arguments))
    }

    /// Disconnects the pod by CNI DEL and removes manifest and namespace.
    ///
    /// # Errors
    /// The plugin's, after the rest was removed all the same.
    pub fn delete(self) -> Result<()> {
        self.remove()
    }

    fn remove(&self) -> Result<()> {
        let deleted = self.cni("DEL")?.try_run()?;
        cluster::remove(&self.info.node.cluster_directory(), &self.manifest())?;
        let unbind = self
            .info
            .node
            .cmd("umount")
            .arg(self.info.netns.path())
            .run();
        self.info.netns.delete()?;
        if self.record_path().exists() {
            std::fs::remove_file(self.record_path())?;
        }
        unbind?;
        if !deleted.status.success() || !deleted.stdout.trim().is_empty() {
            bail!("skein-cni DEL: {}", tail(&deleted.describe()));
        }
        Ok(())
    }

    fn manifest(&self) -> String {
        format!("pod-{}-{}", self.info.namespace, self.info.name)
    }

    fn write_manifest(&self) -> Result<()> {
        let node = &self.info.node;
        let object = cluster::pod(&self.info, &node.name, &self.info.ips);
        cluster::write(&node.cluster_directory(), &self.manifest(), &object)
    }

    fn record_path(&self) -> PathBuf {
        state::records(&self.info.netns.lab).join(format!("{}.json", self.manifest()))
    }
}

/// The addresses of a CNI result (specification 1.1.0, "Success"): `ips[].address`, with prefix.
fn addresses(result: &Value) -> Result<Vec<IpAddr>> {
    let list = result["ips"].as_array();
    let list = list.with_context(|| format!("the CNI result has no `ips`: {result}"))?;
    list.iter()
        .map(|entry| {
            let text = entry["address"].as_str().unwrap_or_default();
            let (address, _) = text.split_once('/').unwrap_or((text, ""));
            address
                .parse()
                .with_context(|| format!("no address in the CNI result: {entry}"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_from_a_result() {
        let result = json!({
            "cniVersion": "1.1.0",
            "ips": [
                {"address": "10.244.1.2/32", "interface": 1},
                {"address": "fd00:10:244:1::2/128", "interface": 1},
            ],
        });
        let expected: Vec<IpAddr> = vec![
            "10.244.1.2".parse().unwrap(),
            "fd00:10:244:1::2".parse().unwrap(),
        ];
        assert_eq!(addresses(&result).unwrap(), expected);
        assert!(addresses(&json!({"code": 7})).is_err());
        assert!(addresses(&json!({"ips": [{"address": "here"}]})).is_err());
    }
}

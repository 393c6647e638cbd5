//! The CNI of a cluster: the reference plugins, which prove the cluster itself, or Skein.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::node::{CNI_BIN, CNI_CONF};
use super::programs::REFERENCE_PLUGINS;
use crate::agent::{AgentOptions, Source};
use crate::node::{Node, NodeInfo};
use crate::{bins, wire};

/// Which network plugin a cluster has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Cni {
    /// The reference bridge plugin, with routes between the nodes' pod ranges.
    Reference,
    /// Skein: its plugin, and its agent on each node.
    Skein,
}

/// A node as the API server knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegisteredNode {
    /// Its name, the lab's.
    pub name: String,
    /// Its pods' ranges, which the controller manager gave it.
    pub pod_ranges: Vec<String>,
}

/// Fails early, before anything is built, where the plugin's programs are missing.
///
/// # Errors
/// Says what is missing and what to do.
pub fn require(cni: Cni) -> Result<()> {
    match cni {
        Cni::Reference => {
            ensure!(
                Path::new("/proc/sys/net/bridge/bridge-nf-call-iptables").exists(),
                "the reference plugin's bridge needs the kernel's br_netfilter for services: \
                 run `modprobe br_netfilter` first"
            );
        }
        Cni::Skein => {
            for name in ["skeind", "skein-cni"] {
                bins::find(name)?;
            }
        }
    }
    Ok(())
}

/// Connects the nodes' pods: routes and configuration for the reference plugin.
///
/// # Errors
/// The command that failed.
pub fn install_reference(nodes: &[NodeInfo], registered: &[RegisteredNode]) -> Result<()> {
    for node in nodes {
        let own = pod_ranges(registered, &node.name)?;
        node.cmd("sh").args(["-ec", FORWARDING]).run()?;
        for peer in nodes.iter().filter(|peer| peer.name != node.name) {
            for range in pod_ranges(registered, &peer.name)? {
                let via = peer
                    .addresses
                    .iter()
                    .find(|address| address.is_ipv6() == range.contains(':'))
                    .with_context(|| format!("{} has no address for {range}", peer.name))?;
                let uplink = wire::UPLINK;
                node.cmd("ip")
                    .args([
                        "route",
                        "replace",
                        range,
                        "via",
                        &via.to_string(),
                        "dev",
                        uplink,
                    ])
                    .run()?;
            }
        }
        let plugins = ["bridge", "host-local", "loopback", "portmap"]
            .map(|name| PathBuf::from(REFERENCE_PLUGINS).join(name));
        install(node, &plugins, "10-reference.conflist", &reference(own))?;
    }
    Ok(())
}

/// What a node needs in order to forward between a bridge of pods and its uplink, and to
/// translate between two pods on one bridge.
const FORWARDING: &str = "
cd /proc/sys/net
for file in ipv4/ip_forward ipv6/conf/all/forwarding \
            bridge/bridge-nf-call-iptables bridge/bridge-nf-call-ip6tables; do
    echo 1 > $file
done";

fn pod_ranges<'a>(registered: &'a [RegisteredNode], name: &str) -> Result<&'a [String]> {
    registered
        .iter()
        .find(|node| node.name == name)
        .map(|node| node.pod_ranges.as_slice())
        .with_context(|| format!("{name} has not registered"))
}

fn reference(pod_ranges: &[String]) -> Value {
    let ranges: Vec<Value> = pod_ranges.iter().map(|r| json!([{"subnet": r}])).collect();
    let routes: Vec<Value> = pod_ranges
        .iter()
        .map(|range| {
            if range.contains(':') {
                "::/0"
            } else {
                "0.0.0.0/0"
            }
        })
        .map(|all| json!({"dst": all}))
        .collect();
    json!({
        "cniVersion": "1.0.0",
        "name": "reference",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": true,
                "hairpinMode": true,
                "ipam": {"type": "host-local", "ranges": ranges, "routes": routes},
            },
            {"type": "portmap", "capabilities": {"portMappings": true}},
        ],
    })
}

/// Starts Skein's agent on a node and installs its plugin; `services` says whether the agent
/// serves them.
///
/// # Errors
/// With the end of the agent's log if it does not become ready.
pub fn install_skein(
    node: &mut Node,
    kubeconfig: &Path,
    server: &str,
    services: bool,
) -> Result<()> {
    let options = AgentOptions {
        source: Source::Kubernetes {
            kubeconfig: kubeconfig.to_owned(),
            api_server: server.trim_start_matches("https://").to_owned(),
        },
        more: format!("[services]\nenabled = {services}\n"),
        ..AgentOptions::default()
    };
    node.start_agent(&options)
        .context("Skein's agent cannot serve a real cluster")?;
    let plugins = [
        bins::find("skein-cni")?,
        PathBuf::from(REFERENCE_PLUGINS).join("loopback"),
    ];
    install(node.info(), &plugins, "10-skein.conflist", &skein())
}

fn skein() -> Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "skein",
        "plugins": [{
            "type": "skein-cni",
            "capabilities": {"portMappings": true, "bandwidth": true},
        }],
    })
}

/// Puts plugins and then the configuration into the node; the runtime reads it at once.
fn install(node: &NodeInfo, plugins: &[PathBuf], file: &str, conflist: &Value) -> Result<()> {
    node.cmd("ln").arg("-s").args(plugins).arg(CNI_BIN).run()?;
    let write = format!("cat > {CNI_CONF}/.{file} && mv {CNI_CONF}/.{file} {CNI_CONF}/{file}");
    node.cmd("sh")
        .args(["-ec", &write])
        .stdin(conflist.to_string())
        .run()
        .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_configuration_has_a_range_and_a_route_for_each_family() {
        let conflist = reference(&["10.244.1.0/24".into(), "fd00:10:244:1::/64".into()]);
        let ipam = &conflist["plugins"][0]["ipam"];
        assert_eq!(ipam["ranges"][1][0]["subnet"], "fd00:10:244:1::/64");
        assert_eq!(
            ipam["routes"],
            json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}])
        );
        assert_eq!(conflist["cniVersion"], "1.0.0");
    }
}

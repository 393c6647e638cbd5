//! How long a CNI ADD takes, beside the reference plugin for a veth and routes, `ptp` with
//! `host-local`.
//!
//! What a runtime waits for: from the start of the plugin's process to its end. A DEL follows
//! each ADD and does not count.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::cmd::Cmd;
use crate::node::NodeInfo;
use crate::pod::Pod;

/// ADDs of a run: so many that a hundredth of them is one.
const ADDS: usize = 100;

/// Where distributions and installers put the reference plugins.
const FOLDERS: [&str; 2] = ["/usr/lib/cni", "/opt/cni/bin"];

/// Median and 99th percentile of Skein's plugin, ms.
///
/// # Errors
/// The plugin's.
pub fn skein(node: &NodeInfo) -> Result<Vec<f64>> {
    measure(node, |pod, command| pod.cni(command))
}

/// The same of the reference plugin, in a node without agent.
///
/// # Errors
/// The plugin's, or that it is not installed.
pub fn reference(node: &NodeInfo) -> Result<Vec<f64>> {
    let plugin = (FOLDERS.iter())
        .map(|folder| PathBuf::from(folder).join("ptp"))
        .find(|file| file.is_file())
        .with_context(|| {
            format!(
                "no plugin `ptp` in {}; install containernetworking-plugins",
                FOLDERS.join(" or ")
            )
        })?;
    measure(node, |pod, command| {
        Ok(pod.plugin(command, &plugin, &ptp()))
    })
}

fn ptp() -> Value {
    json!({
        "cniVersion": "1.0.0", "name": "bench", "type": "ptp",
        // IPv4 alone: with IPv6 the plugin waits seconds for duplicate address detection.
        "ipam": {
            "type": "host-local", "dataDir": "/run/bench",
            "ranges": [[{"subnet": "10.9.128.0/24"}]],
        },
    })
}

fn measure(node: &NodeInfo, plugin: impl Fn(&Pod, &str) -> Result<Cmd>) -> Result<Vec<f64>> {
    let none = BTreeMap::new();
    let pod = Pod::prepare(node, "default", "added", &none, &none)?;
    let measured = adds(&pod, plugin);
    // The first error is the one to tell.
    let deleted = pod.delete();
    let mut times = measured?;
    deleted?;
    times.sort_by(f64::total_cmp);
    let at = |share: usize| times[(times.len() - 1) * share / 100];
    Ok(vec![at(50), at(99)])
}

fn adds(pod: &Pod, plugin: impl Fn(&Pod, &str) -> Result<Cmd>) -> Result<Vec<f64>> {
    let mut times = Vec::new();
    for _ in 0..ADDS {
        let add = plugin(pod, "ADD")?;
        let start = Instant::now();
        add.run()?;
        times.push(start.elapsed().as_secs_f64() * 1000.0);
        plugin(pod, "DEL")?.run()?;
    }
    Ok(times)
}

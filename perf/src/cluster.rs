//! The folder of Kubernetes manifests that stands for the API server.
//!
//! Ordinary objects in ordinary YAML, one file each, written beside and renamed into place, so
//! that no agent reads half of one. The addresses follow the node's number N: pods of node N are
//! in 10.244.N.0/24 and fd00:10:244:N::/64.

use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::node::NodeInfo;
use crate::pod::PodInfo;
use crate::state;

/// Writes an object as `<file>.yaml`.
///
/// # Errors
/// The file's.
pub fn write(folder: &Path, file: &str, object: &Value) -> Result<()> {
    let text = serde_yaml_ng::to_string(object).context("cannot write an object as YAML")?;
    state::write_atomically(&folder.join(format!("{file}.yaml")), &text)
}

/// Removes `<file>.yaml`.
///
/// # Errors
/// The file's.
pub fn remove(folder: &Path, file: &str) -> Result<()> {
    let path = folder.join(format!("{file}.yaml"));
    std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
}

/// A Namespace with the label that Kubernetes gives every one.
pub fn namespace(name: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": name,
            "uid": uid(&format!("namespace/{name}")),
            "labels": {"kubernetes.io/metadata.name": name},
        },
        "status": {"phase": "Active"},
    })
}

/// A Node with its pod ranges and addresses.
pub fn node(info: &NodeInfo) -> Value {
    let mut addresses: Vec<Value> = info
        .addresses
        .iter()
        .map(|address| json!({"type": "InternalIP", "address": address}))
        .collect();
    addresses.push(json!({"type": "Hostname", "address": info.name}));
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": info.name,
            "uid": uid(&format!("node/{}", info.name)),
            "labels": {"kubernetes.io/hostname": info.name, "kubernetes.io/os": "linux"},
        },
        "spec": {"podCIDR": info.pod_cidrs.first(), "podCIDRs": info.pod_cidrs},
        "status": {
            "addresses": addresses,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    })
}

/// A Pod as the API server shows it before (`ips` empty) and after the kubelet reports addresses.
pub fn pod(info: &PodInfo, node: &str, ips: &[IpAddr]) -> Value {
    let ready = if ips.is_empty() { "False" } else { "True" };
    let mut status = json!({
        "phase": if ips.is_empty() { "Pending" } else { "Running" },
        "conditions": [{"type": "Ready", "status": ready}],
    });
    if let Some(first) = ips.first() {
        status["podIP"] = json!(first);
        status["podIPs"] = ips.iter().map(|ip| json!({"ip": ip})).collect();
    }
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": info.namespace,
            "name": info.name,
            "uid": info.uid,
            "labels": info.labels,
            "annotations": info.annotations,
        },
        "spec": {
            "nodeName": node,
            "serviceAccountName": "default",
            "containers": [{"name": "main", "image": "none"}],
        },
        "status": status,
    })
}

/// A UUID that depends on `seed` alone: version 8, "custom" (RFC 9562, section 5.8).
pub fn uid(seed: &str) -> String {
    use sha2::{Digest, Sha256};
    let hash = Sha256::digest(seed);
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash[..16]);
    bytes[6] = 0x80 | (bytes[6] & 0x0f);
    bytes[8] = 0x80 | (bytes[8] & 0x3f);
    let hex = |range: std::ops::Range<usize>| -> String {
        bytes[range].iter().map(|b| format!("{b:02x}")).collect()
    };
    format!(
        "{}-{}-{}-{}-{}",
        hex(0..4),
        hex(4..6),
        hex(6..8),
        hex(8..10),
        hex(10..16)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uid_has_the_form_of_one_and_depends_on_its_seed() {
        let one = uid("pod/a");
        assert_eq!(one, uid("pod/a"));
        assert_ne!(one, uid("pod/b"));
        let lengths: Vec<usize> = one.split('-').map(str::len).collect();
        assert_eq!(lengths, [8, 4, 4, 4, 12]);
    }

    #[test]
    fn an_object_survives_yaml() {
        let object = namespace("default");
        let text = serde_yaml_ng::to_string(&object).unwrap();
        assert!(text.contains("kind: Namespace"));
        let back: Value = serde_yaml_ng::from_str(&text).unwrap();
        assert_eq!(back, object);
    }
}

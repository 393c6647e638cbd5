//! What another network plugin has left on this node.
//!
//! A tunnel device, a bridge or a pod's device of a plugin that ran here before answers for
//! addresses that are Skein's now, and its routes may win. It is named in the status with what
//! to do; nothing that is not our own is touched. Deliberately absent: configuration files of
//! other plugins, whose order the container runtime judges, and packet filter rules.

use crate::netlink::Device;

/// Names of devices that only that plugin gives; a `*` at the end stands for any more.
const PLUGINS: [(&str, &[&str]); 7] = [
    ("flannel", &["flannel.*", "flannel-v6.*", "flannel-wg*"]),
    ("the bridge plugin", &["cni0"]),
    ("Cilium", &["cilium_*"]),
    ("Calico", &["cali*", "vxlan.calico", "vxlan-v6.calico"]),
    ("Antrea", &["antrea-gw0", "antrea-tun0"]),
    ("Weave Net", &["weave", "vxlan-6784"]),
    ("kube-router", &["kube-bridge", "kube-dummy-if"]),
];

/// The most devices that are named for one plugin: there may be one for each of its pods.
const NAMED: usize = 3;

/// A sentence for each plugin that has devices here.
#[must_use]
pub fn of(devices: &[Device]) -> Vec<String> {
    let found = |patterns: &[&str]| -> Vec<&str> {
        let names = devices.iter().map(|device| device.name.as_str());
        names
            .filter(|name| patterns.iter().any(|pattern| fits(name, pattern)))
            .collect()
    };
    let mut sentences = Vec::new();
    for (plugin, patterns) in PLUGINS {
        let names = found(patterns);
        if names.is_empty() {
            continue;
        }
        let shown = names[..names.len().min(NAMED)].join(", ");
        let more = match names.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        sentences.push(format!(
            "{shown}{more}: of another network plugin ({plugin}); uninstall it, restart its pods \
             and remove what stays (ip link delete NAME), or reboot"
        ));
    }
    sentences
}

fn fits(name: &str, pattern: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => name == pattern,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mac::MacAddr;

    fn devices(names: &[&str]) -> Vec<Device> {
        names
            .iter()
            .map(|name| Device {
                name: (*name).to_owned(),
                index: 1,
                mac: MacAddr::ZERO,
                mtu: 1500,
                running: true,
                queues: 1,
            })
            .collect()
    }

    #[test]
    fn each_plugin_is_named_once_with_its_devices() {
        let node = devices(&["lo", "eth0", "skein0", "skein0-dp", "sk0123456789abc"]);
        assert_eq!(of(&node), [""; 0]);
        let calico = devices(&["cali1", "eth0", "cali2", "vxlan.calico", "cali3", "cali4"]);
        let [sentence] = &of(&calico)[..] else {
            panic!("one plugin")
        };
        assert!(sentence.starts_with("cali1, cali2, vxlan.calico and 2 more: "));
        assert!(sentence.contains("(Calico)"));
        assert_eq!(of(&devices(&["flannel.1", "cni0", "cilium_host"])).len(), 3);
    }
}

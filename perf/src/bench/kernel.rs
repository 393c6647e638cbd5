//! The baseline: pods on a kernel bridge, nodes joined by kernel VXLAN.
//!
//! The same three pods as Skein's lab has, in one layer 2 network 10.9.0.0/16. The pods' MTU is
//! the wire's less the 50 bytes of VXLAN over IPv4, on one node too, as a cluster would set it.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Result, ensure};

use super::Ends;
use crate::lab::Lab;
use crate::pod::{IFNAME, Netns};
use crate::wire::{self, ip};

/// Outer Ethernet is not counted: inner Ethernet 14, IPv4 20, UDP 8, VXLAN 8 (RFC 7348).
const VXLAN_OVERHEAD: u32 = 50;

/// Pods and addresses of the baseline.
#[derive(Debug)]
pub struct KernelPods {
    pods: Vec<(Netns, IpAddr)>,
}

impl KernelPods {
    /// Builds bridges, tunnel and pods into a lab of two nodes that runs no agent.
    ///
    /// # Errors
    /// The `ip` command that failed; the kernel lacks bridge or VXLAN.
    pub fn build(lab: &Lab, mtu: u32) -> Result<Self> {
        let nodes = lab.nodes();
        ensure!(nodes.len() == 2, "the baseline is made for two nodes");
        let mtu = mtu - VXLAN_OVERHEAD;
        for (node, peer) in nodes.iter().zip([2, 1]) {
            let netns = &node.info().netns;
            let (local, remote) = (wire::address_v4(node.info().number), wire::address_v4(peer));
            let uplink = wire::UPLINK;
            ip(&format!(
                "-n {netns} link add bridge0 mtu {mtu} type bridge stp_state 0"
            ))?;
            ip(&format!(
                "-n {netns} link add vxlan0 mtu {mtu} type vxlan id 1 dev {uplink} \
                 local {local} remote {remote} dstport 8472"
            ))?;
            ip(&format!("-n {netns} link set vxlan0 master bridge0 up"))?;
            ip(&format!("-n {netns} link set bridge0 up"))?;
        }
        let mut pods = Vec::new();
        for (node, name) in [(0, "a"), (0, "b"), (1, "c")] {
            let node = nodes[node].info();
            let address = Ipv4Addr::new(10, 9, node.number, 1 + u8::try_from(pods.len())?);
            let pod = Netns::add(&node.lab, format!("{}-{}-{name}", node.lab, node.name))?;
            ip(&format!(
                "link add name {IFNAME} mtu {mtu} netns {} type veth \
                 peer name pod-{name} mtu {mtu} netns {}",
                pod.name, node.netns
            ))?;
            ip(&format!(
                "-n {} link set pod-{name} master bridge0 up",
                node.netns
            ))?;
            ip(&format!("-n {} link set {IFNAME} up", pod.name))?;
            ip(&format!(
                "-n {} address add {address}/16 dev {IFNAME}",
                pod.name
            ))?;
            pods.push((pod, IpAddr::V4(address)));
        }
        Ok(Self { pods })
    }

    /// The first pod and another.
    pub(super) fn ends(&self, to: usize) -> Ends<'_> {
        Ends {
            from: &self.pods[0].0,
            to: &self.pods[to].0,
            ip: self.pods[to].1,
        }
    }

    /// The pods, two on the first node and one on the second, with their addresses.
    pub fn pods(&self) -> &[(Netns, IpAddr)] {
        &self.pods
    }
}

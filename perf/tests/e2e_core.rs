//! The core suite in each combination of fall-back and XDP mode, over each kind of underlay.

mod common;

use common::core_suite;
use skein_perf::{AgentOptions, LabOptions, Underlay};

fn disabled(features: &[&str]) -> AgentOptions {
    AgentOptions {
        disable: features.iter().map(ToString::to_string).collect(),
        ..AgentOptions::default()
    }
}

fn modes(uplink: &str, pods: &str) -> AgentOptions {
    AgentOptions {
        uplink_xdp_mode: uplink.into(),
        pods_xdp_mode: pods.into(),
        ..AgentOptions::default()
    }
}

#[test]
fn defaults() {
    core_suite(&LabOptions::default(), &AgentOptions::default());
}

#[test]
fn real_packets_on_the_wire() {
    let lab = LabOptions {
        real_packets: true,
        ..LabOptions::default()
    };
    core_suite(&lab, &AgentOptions::default());
}

#[test]
fn nodes_with_ipv4_addresses_alone() {
    let lab = LabOptions {
        underlay: Underlay::V4,
        ..LabOptions::default()
    };
    core_suite(&lab, &AgentOptions::default());
}

#[test]
fn nodes_with_ipv6_addresses_alone() {
    let lab = LabOptions {
        underlay: Underlay::V6,
        ..LabOptions::default()
    };
    core_suite(&lab, &AgentOptions::default());
}

#[test]
fn three_nodes_on_a_switch() {
    let lab = LabOptions {
        nodes: 3,
        ..LabOptions::default()
    };
    core_suite(&lab, &AgentOptions::default());
}

#[test]
fn a_wire_with_jumbo_frames() {
    let lab = LabOptions {
        mtu: 9000,
        ..LabOptions::default()
    };
    core_suite(&lab, &AgentOptions::default());
}

#[test]
fn without_multi_buffer() {
    core_suite(&LabOptions::default(), &disabled(&["multi-buffer"]));
}

#[test]
fn without_tx_metadata() {
    core_suite(&LabOptions::default(), &disabled(&["tx-metadata"]));
}

#[test]
fn without_multi_buffer_and_tx_metadata() {
    let agent = disabled(&["multi-buffer", "tx-metadata"]);
    core_suite(&LabOptions::default(), &agent);
}

#[test]
fn uplink_native_pods_generic() {
    core_suite(&LabOptions::default(), &modes("native", "generic"));
}

#[test]
fn uplink_native_pods_native() {
    core_suite(&LabOptions::default(), &modes("native", "native"));
}

#[test]
fn uplink_generic_pods_generic() {
    core_suite(&LabOptions::default(), &modes("generic", "generic"));
}

#[test]
fn uplink_generic_pods_native() {
    core_suite(&LabOptions::default(), &modes("generic", "native"));
}

//! The core suite in each combination of fall-back and XDP mode, over each kind of underlay.

mod common;

use common::core_suite;
use skein_perf::{AgentOptions, LabOptions, Underlay};

/// Every combination of kernel features to do without, with the given XDP modes.
fn in_every_fall_back(uplink: &str, pods: &str) {
    for disable in [
        &[][..],
        &["multi-buffer"],
        &["tx-metadata"],
        &["multi-buffer", "tx-metadata"],
    ] {
        println!("uplink {uplink}, pods {pods}, without {disable:?}");
        let agent = AgentOptions {
            disable: disable.iter().map(ToString::to_string).collect(),
            uplink_xdp_mode: uplink.into(),
            pods_xdp_mode: pods.into(),
            ..AgentOptions::default()
        };
        core_suite(&LabOptions::default(), &agent);
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
fn uplink_native_pods_generic() {
    in_every_fall_back("native", "generic");
}

#[test]
fn uplink_native_pods_native() {
    in_every_fall_back("native", "native");
}

#[test]
fn uplink_generic_pods_generic() {
    in_every_fall_back("generic", "generic");
}

#[test]
fn uplink_generic_pods_native() {
    in_every_fall_back("generic", "native");
}

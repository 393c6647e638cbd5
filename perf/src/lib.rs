//! The lab: a small cluster on one machine.
//!
//! A *node* is a network namespace with its own mounts and host name, a *wire* joins the nodes,
//! a *pod* is a network namespace that the real plugin connects to the real agent of its node.
//! Nothing here imitates Skein: the lab runs `skeind`, `skein-cni` and `skeinctl` as a machine
//! would, and plays only the parts of the container runtime (it calls the plugin), of the
//! kubelet (it writes pod addresses) and of the API server (a folder of manifests).
//!
//! In the order in which a lab comes to life:
//!
//! - [`cmd`]: programs run with a deadline and errors that say which program failed and why;
//! - [`bins`]: where `skeind` and the others are;
//! - [`state`]: names, folders and records of labs, and who owns one;
//! - [`lab`]: a lab as a value; dropping it removes everything;
//! - [`wire`]: the links between nodes;
//! - [`node`], [`agent`]: a node and its `skeind`;
//! - [`cluster`], [`pod`]: manifests, and pods by way of `skein-cni`;
//! - [`probe`]: small traffic programs of our own, so that no other tool's habits matter;
//! - [`check`]: probes with typed results: ping, transfers, echoes, latencies;
//! - [`teardown`]: removal by name alone, what is left over, labs whose owner died;
//! - [`kubernetes`]: the same nodes under a real API server, kubelet and runtime;
//! - [`demo`], [`bench`], [`report`]: what `skein-lab demo` and `skein-lab bench` do.
//!
//! Deliberately absent: any packet processing, and any change to the machine's own interfaces,
//! routes or rules. All traffic stays inside namespaces that the lab made.

pub mod agent;
pub mod bench;
pub mod bins;
pub mod check;
pub mod cluster;
pub mod cmd;
pub mod demo;
mod demo_cluster;
pub mod kubernetes;
pub mod lab;
pub mod node;
pub mod pod;
pub mod probe;
pub mod report;
pub mod state;
pub mod teardown;
pub mod wire;

pub use agent::{AgentOptions, Poll};
pub use lab::{Lab, LabOptions, Underlay};
pub use node::Node;
pub use pod::Pod;

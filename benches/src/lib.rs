//! Named packets and a node to run them on, shared by all benchmarks.

pub mod node;
pub mod packets;

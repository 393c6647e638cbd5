//! Packets of every size and kind, over two nodes in memory: what fits arrives, what does not
//! is cut or answered, and nothing is lost in silence.

#[path = "../common/mod.rs"]
mod common;

mod errors;
mod every_size;
mod fragments;
mod golden;
mod kinds;
mod nested;

use common::frames::Pod;

/// The sender of these tests, a pod on its own node, and one on the other.
const FROM: Pod = (1, 1);
const NEAR: Pod = (1, 2);
const FAR: Pod = (2, 1);

/// The largest IP packet on every path: pods have it, and 1500 bytes of underlay less 50 of
/// tunnel over IPv4.
const MTU: usize = 1450;

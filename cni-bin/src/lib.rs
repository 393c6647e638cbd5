//! The Skein CNI plugin as a library: the part of it that the node agent and the lab share.
//!
//! [`agent`] is the contract with the node agent, and the only module that `control` uses.

pub mod agent;

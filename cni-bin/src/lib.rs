//! The Skein CNI plugin as a library: the plugin itself, and the parts of it that the node
//! agent and the lab share.
//!
//! [`agent`] is the contract with the node agent, and the only module that `control` uses.
//! [`netns`], [`netlink`] and [`ethtool`] are how the plugin builds a pod's interface; the lab
//! builds its nodes and wires with the same verbs.

pub mod agent;
pub mod ethtool;
pub mod mac;
pub mod netlink;
pub mod netns;

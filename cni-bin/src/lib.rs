//! The Skein CNI plugin as a library: the plugin itself, and the parts of it that the node
//! agent and the lab share.
//!
//! A call comes in as a [`request`], checked; [`plugin`] hands it to the command of its name
//! ([`add`], [`del`], [`check`], [`gc`], [`status`]), which talks to the node's agent
//! ([`agent`]) and builds or removes the pod's [`interface`]; the answer has the shape of
//! [`spec`].
//!
//! [`agent`] is the contract with the node agent. [`netns`], [`netlink`] and [`ethtool`] are how
//! the plugin builds a pod's interface; the agent makes the host link with the same verbs, and
//! the lab its nodes and wires.

pub mod agent;

pub mod plugin;
pub mod request;
pub mod spec;

pub mod add;
pub mod check;
pub mod del;
pub mod gc;
pub mod status;

pub mod announce;
pub mod call_log;
pub mod ethtool;
pub mod interface;
pub mod ipam;
pub mod mac;
pub mod netlink;
pub mod netns;
pub mod sysctl;
pub mod undo;

//! The Skein node agent: everything beside the packets.
//!
//! State goes one way: [`watch`] → [`state`] → compile → publish. What the kernel knows of
//! routes and neighbours joins it on the way; the CNI plugin and `skeinctl` ask over one socket.

pub mod agent;
pub mod cidr;
pub mod cni_server;
pub mod compile;
pub mod config;
pub mod connections;
pub mod ctl;
pub mod durable;
pub mod endpoint;
pub mod flows;
pub mod host;
pub mod identity;
pub mod ipam;
pub mod journal;
pub mod lock;
pub mod mac;
pub mod neighbour;
pub mod netlink;
pub mod numbers;
pub mod observe;
pub mod open;
pub mod pods;
pub mod reserved;
pub mod run;
pub mod state;
pub mod views;
pub mod watch;
pub mod workers;

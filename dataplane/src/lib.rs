//! The Skein datapath: AF_XDP links, the packet pipeline, and the tables that it reads.
//!
//! A packet's way, in the order in which the modules stand below:
//!
//! A [`worker`] receives a batch from one of its links ([`io`]) and hands it to the
//! [`pipeline`]. Each packet is parsed once ([`parse`] over [`wire`]); questions for the gateway
//! are answered on the spot ([`hairpin`]); [`classify`] finds out who sent it and whether it may
//! claim so. Its [`flow`] usually has an action already; if not, the [`slow`] path decides from
//! the tables ([`snapshot`]), asking both ends' [`policy`], and the flow keeps the decision. The action is applied: checksums
//! the tables ([`snapshot`]) and the flow keeps the decision. Packets that belong together, both
//! ways and over all workers, are a connection of the shared table ([`conntrack`]). The action is applied: checksums
//! the tables ([`snapshot`]; for a Service's address, [`service`] chooses the backend) and the
//! flow keeps the decision. The action is applied: checksums
//! completed ([`offload`], and for tunnels that a pod makes itself [`nested`]), TTL and MACs
//! rewritten ([`rewrite`]), what is too large cut ([`fragment`]), tunnel header pushed
//! ([`encap`]). The packet leaves by the link that the action names, or by the worker that owns
//! that link. What is dropped on the way has a reason ([`verdict`]) and a counter ([`stats`]),
//! and its sender is told where that helps ([`icmp_error`]).
//!
//! Deliberately absent: clocks, logging and allocation on that way; any knowledge of
//! Kubernetes; unsafe code outside [`io`].

pub mod ids;
pub mod stats;
pub mod time;
pub mod verdict;

pub mod worker;

pub mod pipeline;

pub mod icmp_error;

pub mod wire;

pub mod parse;

pub mod hairpin;

pub mod classify;

pub mod flow;

pub mod conntrack;

pub mod slow;

pub mod policy;
pub mod service;

pub mod offload;

pub mod nested;

pub mod rewrite;

pub mod fragment;

pub mod encap;

pub mod snapshot;

pub mod io;

pub mod fixtures;

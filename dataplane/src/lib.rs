//! The Skein datapath: AF_XDP links, the packet pipeline, and the tables that it reads.
//!
//! A packet's way, in the order in which the modules stand below:
//!
//! A [`worker`] receives a batch from one of its links ([`io`]) and hands it to the
//! [`pipeline`]. Each packet is parsed once ([`parse`] over [`wire`]); questions for the gateway
//! are answered on the spot ([`hairpin`]); [`classify`] finds out who sent it and whether it may
//! claim so; a fragment learns its ports from the first of its packet ([`first_fragment`]). Its
//! [`flow`] usually has an action already; if not, the [`slow`] path decides, by the connection
//! that it belongs to ([`conntrack`]), the Service that it is for ([`service`]) and what both
//! ends allow ([`policy`]), from the tables ([`snapshot`]), and the flow keeps the decision. (An
//! ICMP error follows the connection of the packet that it quotes: [`related`].) The action is
//! applied: checksums completed ([`offload`], and for tunnels that a pod makes itself
//! [`nested`]), TTL and MACs rewritten ([`rewrite`]), addresses and ports translated
//! ([`translate`]), what is too large cut ([`fragment`]), tunnel header pushed ([`encap`]). The
//! packet leaves by the link that the action names, or by the worker that owns that link. What
//! is dropped on the way has a reason ([`verdict`]) and a counter ([`stats`]), and its sender is
//! told where that helps ([`icmp_error`], [`reset`]); people are told of new flows and of drops
//! ([`events`]).
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

pub mod reset;

pub mod events;

pub mod wire;

pub mod parse;

pub mod hairpin;

pub mod classify;

pub mod first_fragment;

pub mod flow;

pub mod slow;

pub mod conntrack;

pub mod service;

pub mod policy;

pub mod related;

pub mod offload;

pub mod nested;

pub mod rewrite;

pub mod translate;

pub mod fragment;

pub mod encap;

pub mod snapshot;

pub mod io;

pub mod fixtures;

//! A gibibyte over TCP arrives whole, whatever the number of workers and their way of waiting.

mod common;

use common::Cluster;
use skein_perf::{AgentOptions, LabOptions, Poll, check};

const GIBIBYTE: u64 = 1 << 30;

/// Both paths, IPv4 on one node and IPv6 across, with the hashes of both ends compared.
fn transfer(cpus: &[usize], poll: Poll) {
    let agent = AgentOptions {
        cpus: cpus.to_vec(),
        poll,
        ..AgentOptions::default()
    };
    let cluster = Cluster::new(&LabOptions::default(), &agent);
    for (path, from, to, _) in cluster.paths() {
        let ip = to.ip(path == "across nodes").unwrap();
        let transfer = check::tcp_transfer(from.netns(), to.netns(), ip, GIBIBYTE)
            .unwrap_or_else(|error| panic!("{path}, workers {cpus:?}, {poll:?}: {error:#}"));
        assert_eq!(transfer.bytes, GIBIBYTE);
    }
    cluster.finish();
}

#[test]
fn one_worker() {
    transfer(&[0], Poll::Adaptive);
}

#[test]
fn two_workers() {
    transfer(&[0, 1], Poll::Adaptive);
}

#[test]
fn four_workers_two_to_a_cpu() {
    transfer(&[0, 1, 0, 1], Poll::Adaptive);
}

#[test]
fn one_worker_that_sleeps() {
    transfer(&[0], Poll::Interrupt);
}

#[test]
fn one_worker_that_spins() {
    transfer(&[0], Poll::Busy);
}

#[test]
fn four_workers_that_sleep() {
    transfer(&[0, 1, 0, 1], Poll::Interrupt);
}

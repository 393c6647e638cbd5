//! The compiled policies against an oracle: random clusters, policies and flows, each cluster
//! then changed step by step, and every verdict compared with what a reader of the manifests
//! who knows nothing of identities, tables or caches would say.

mod generate;
mod oracle;
mod world;

use std::net::IpAddr;

use skein_dataplane::ids::IdentityId;
use skein_dataplane::policy::{Judgement, PeerOf, Side};

use generate::Random;
use oracle::{Direction, Flow, PeerKind};
use world::World;

/// Clusters a run, and changes of each: together the 10 000 states that are compared.
const CLUSTERS: u64 = 2_000;
const CHANGES: usize = 4;

/// Flows that are compared in each state.
const FLOWS: usize = 48;

/// How often each kind of verdict was seen, so that a run that compares nothing fails.
#[derive(Default)]
struct Tally {
    not_isolated: usize,
    always: usize,
    allowed: usize,
    denied: usize,
    of_states: usize,
}

#[test]
fn compiled_verdicts_are_those_of_the_api() {
    // Another seed is another 10 000 states; a failure names the one to come back to.
    let seed = std::env::var("SKEIN_ORACLE_SEED").map_or(1, |text| text.parse().unwrap());
    let mut tally = Tally::default();
    for cluster in 0..CLUSTERS {
        let seed = seed * 1_000_000 + cluster;
        let mut random = Random::new(seed);
        let mut world = World::new(&mut random);
        compare(seed, &mut world, &mut random, &mut tally);
        for _ in 0..CHANGES {
            world.change(&mut random);
            compare(seed, &mut world, &mut random, &mut tally);
        }
    }
    assert_eq!(tally.of_states, 10_000);
    let judged = tally.allowed + tally.denied;
    assert!(judged > 100_000, "only {judged} flows met a policy");
    assert!(tally.allowed > judged / 10, "{} of {judged}", tally.allowed);
    assert!(tally.denied > judged / 10, "{} of {judged}", tally.denied);
    assert!(tally.not_isolated > 10_000 && tally.always > 1_000);
}

/// Compares flows from and to this node's pods in the world as it is now.
fn compare(seed: u64, world: &mut World, random: &mut Random, tally: &mut Tally) {
    let policies = world.endpoints();
    tally.of_states += 1;
    for _ in 0..FLOWS {
        let Some((pod, side, flow)) = generate::flow(world, random) else {
            return;
        };
        let oracle = &world.model;
        let direction = match side {
            Side::Ingress => Direction::In,
            Side::Egress => Direction::Out,
        };
        let expected = oracle.allows(pod, direction, &flow);
        let peer = PeerOf {
            identity: identity(world, &flow),
            address: flow.address,
        };
        let found = policies[&world::pod_key(&world.model.pods[pod])].judge(
            side,
            peer,
            flow.protocol,
            flow.port,
        );
        let context = || {
            format!(
                "SKEIN_ORACLE_SEED run, seed {seed}: {side:?} of {}, {flow:?}: {found:?}\n{}",
                world::pod_key(&world.model.pods[pod]),
                world.manifests()
            )
        };
        assert_eq!(found.allows(), expected, "{}", context());
        match found {
            Judgement::NotIsolated => tally.not_isolated += 1,
            Judgement::AlwaysAllowed => tally.always += 1,
            Judgement::Denied => tally.denied += 1,
            Judgement::Allowed(rule) => {
                tally.allowed += 1;
                let name = world.policies.rule(rule).unwrap();
                let policy = (name.policy.namespace.clone(), name.policy.name.clone());
                assert_eq!(name.side, side, "{}", context());
                let allows = oracle.rule_allows(&policy, name.index, pod, direction, &flow);
                assert!(allows, "{name} does not: {}", context());
            }
        }
    }
}

/// What the datapath knows the other end as.
fn identity(world: &World, flow: &Flow) -> IdentityId {
    match flow.peer {
        PeerKind::Pod(index) => world.identity(index),
        PeerKind::OwnNode => IdentityId::HOST,
        PeerKind::OtherNode => IdentityId::REMOTE_NODE,
        PeerKind::World => match flow.address {
            IpAddr::V4(_) => IdentityId::WORLD_IPV4,
            IpAddr::V6(_) => IdentityId::WORLD_IPV6,
        },
    }
}

/// The side matters to what `port` means; both are compared.
const SIDES: [Side; 2] = [Side::Ingress, Side::Egress];

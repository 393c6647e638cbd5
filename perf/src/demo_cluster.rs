//! What the demo shows beside plain traffic: a Service that balances, and a policy that denies.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::check;
use crate::lab::Lab;
use crate::pod::Pod;

/// The Service's address and port, and its backends' port.
const VIRTUAL: &str = "10.96.0.10";
const PORT: u16 = 80;
const TARGET: u16 = 8080;

/// How many connections are made.
const QUESTIONS: u32 = 40;

/// How long until a manifest is in force at the latest.
const IN_FORCE: Duration = Duration::from_secs(10);

/// A Service with the pods `backends` behind it, asked from `client`: each must answer.
///
/// # Errors
/// If one does not answer, or a question stays without answer.
pub fn service(lab: &Lab, client: &Pod, backends: [&Pod; 2]) -> Result<String> {
    let names = backends.map(|pod| pod.info().name.clone());
    let mut servers = Vec::new();
    for (pod, name) in backends.iter().zip(&names) {
        servers.push(check::name_server(pod.netns(), name, TARGET)?);
    }
    let endpoints: Vec<_> = (backends.iter())
        .map(|pod| Ok(json!({"addresses": [pod.ip(false)?], "nodeName": pod.info().node.name})))
        .collect::<Result<_>>()?;
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "demo", "namespace": "default"},
        "spec": {"clusterIP": VIRTUAL, "ports": [{"port": PORT}]},
    });
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "demo-1",
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": "demo"},
        },
        "addressType": "IPv4",
        "ports": [{"port": TARGET}],
        "endpoints": endpoints,
    });
    lab.apply("service-demo", &service)?;
    lab.apply("slice-demo", &slice)?;
    until("the Service has its backends", || {
        let view = lab.nodes()[0].view("services")?;
        let backends = view["services"][0]["backends"].as_array();
        Ok(backends
            .is_some_and(|all| all.len() == 2 && all.iter().all(|one| one["selected"] == true)))
    })?;
    let to = SocketAddr::new(VIRTUAL.parse()?, PORT);
    let answers = check::ask_names(client.netns(), to, QUESTIONS, false)?;
    let shares: Vec<String> = (answers.by_name.iter())
        .map(|(name, count)| format!("{name} {count}"))
        .collect();
    let text = format!(
        "{QUESTIONS} connections to {VIRTUAL}: {}",
        shares.join(", ")
    );
    let all = names.iter().all(|name| answers.by_name.contains_key(name));
    ensure!(
        all && answers.refused + answers.silent == 0,
        "{text}; {} refused, {} without answer",
        answers.refused,
        answers.silent
    );
    Ok(text)
}

/// A policy by which the pod `target` is reached by `friend` alone: `stranger` is denied, and
/// the node says why.
///
/// # Errors
/// If it lets somebody else through, or tells of no denial.
pub fn policy(lab: &Lab, target: &Pod, friend: &Pod, stranger: &Pod) -> Result<String> {
    let _server = check::answer(target.netns(), &[PORT])?;
    let app = |pod: &Pod| pod.info().labels.get("app").cloned().unwrap_or_default();
    let policy = json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "demo", "namespace": "default"},
        "spec": {
            "podSelector": {"matchLabels": {"app": app(target)}},
            "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": app(friend)}}}]}],
        },
    });
    let to = format!("tcp/{}", SocketAddr::new(target.ip(false)?, PORT)).parse()?;
    let reaches = |from: &Pod| -> Result<bool> {
        let reached = check::reach(from.netns(), &[to], Duration::from_millis(700))?;
        Ok(reached.0.values().all(|&answered| answered))
    };
    ensure!(reaches(stranger)?, "without a policy nobody is denied");
    lab.apply("policy-demo", &policy)?;
    until("the policy is in force", || Ok(!reaches(stranger)?))?;
    ensure!(reaches(friend)?, "the policy stops whom it allows");
    let node = &target.info().node.name;
    let found = lab.nodes().iter().find(|one| one.name() == node);
    let flows = found.context("the pod has no node")?.view("flows")?;
    let denied = flows["flows"].as_array().into_iter().flatten().any(|flow| {
        flow["reason"] == "policy_denied_ingress" && flow["source"]["pod"] == stranger.info().name
    });
    ensure!(denied, "no flow event tells of the denial");
    lab.withdraw("policy-demo")?;
    let (friend, stranger) = (&friend.info().name, &stranger.info().name);
    Ok(format!(
        "{friend} is let in, {stranger} is not: policy_denied_ingress"
    ))
}

fn until(what: &str, mut check: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !check()? {
        ensure!(
            start.elapsed() < IN_FORCE,
            "not within {IN_FORCE:?}: {what}"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

//! Many pods on one node, and many that come and go: reachable, within the memory that a node
//! may spend, nothing left behind.
//!
//! In everyday runs with less of everything; `SKEIN_LONG=1` (`make test-long`) for the numbers
//! that a full node has.

mod common;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::ledger::{Ledger, control_cpu, kernel_memory, resident};
use common::{Cluster, add};
use skein_perf::cmd::Output;
use skein_perf::{AgentOptions, LabOptions, Pod, check};

/// What a node may spend on 250 pods: the kernel's memory and the agent's. Bytes.
const CEILING: i64 = 600_000_000;

/// How many plugins a runtime runs at once.
const PARALLEL: usize = 20;

/// How long pods may take to be reached: nobody's promise, a busy machine's patience.
const PATIENCE: Duration = Duration::from_secs(60);

fn count(everyday: usize, long: usize) -> usize {
    if std::env::var_os("SKEIN_LONG").is_some() {
        long
    } else {
        everyday
    }
}

/// Namespaces and manifests of pods on the first node, not connected yet.
fn prepare(cluster: &Cluster, number: usize) -> Vec<Pod> {
    let node = cluster.lab.nodes()[0].info();
    let labels = BTreeMap::from([("app".to_owned(), "many".to_owned())]);
    in_parallel((0..number).collect(), |index| {
        Pod::prepare(
            node,
            "default",
            &format!("m{index}"),
            &labels,
            &BTreeMap::new(),
        )
        .unwrap()
    })
}

/// Does `work` on each item, [`PARALLEL`] at a time; the results in no order.
fn in_parallel<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let items = Mutex::new(items.into_iter());
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..PARALLEL {
            scope.spawn(|| {
                loop {
                    let item = items.lock().unwrap().next();
                    let Some(item) = item else { return };
                    let result = work(item);
                    results.lock().unwrap().push(result);
                }
            });
        }
    });
    results.into_inner().unwrap()
}

/// Median and 99th percentile, ms.
fn percentiles(times: &mut [Duration]) -> (f64, f64) {
    times.sort();
    let at = |share: usize| times[(times.len() - 1) * share / 100].as_secs_f64() * 1000.0;
    (at(50), at(99))
}

fn run(pod: &Pod, command: &str) -> Output {
    pod.cni(command).unwrap().run().unwrap()
}

#[test]
fn many_pods_are_reached_within_the_memory_that_a_node_may_spend() {
    let number = count(60, 250);
    let mut cluster = Cluster::bare(&LabOptions::default());
    let agent = AgentOptions::default();
    cluster.start_agent(2, &agent);
    let remote = add(&mut cluster.lab, 2, "remote");
    let prepared = prepare(&cluster, number);
    // The namespaces are the runtime's expense, the rest is ours.
    let before = kernel_memory();
    cluster.start_agent(1, &agent);
    let cpu = control_cpu(&cluster.lab.nodes()[0]);
    let start = Instant::now();
    let added = in_parallel(prepared, |mut pod| {
        let took = pod.connect().unwrap();
        (pod, took)
    });
    let all = start.elapsed();
    let node = &cluster.lab.nodes()[0];
    let cpu = (control_cpu(node) - cpu) / u32::try_from(number).unwrap();
    let (pods, mut times): (Vec<Pod>, Vec<Duration>) = added.into_iter().unzip();
    let (p50, p99) = percentiles(&mut times);
    let kernel = kernel_memory() - before;
    let memory = kernel + resident(node);
    println!(
        "{number} pods, {PARALLEL} at a time: ADD p50 {p50:.0} ms, p99 {p99:.0} ms, all in \
         {:.1} s, {:.1} ms of the agent's control thread each; memory: kernel {} MB + agent \
         {} MB",
        all.as_secs_f64(),
        cpu.as_secs_f64() * 1000.0,
        kernel / 1_000_000,
        resident(node) / 1_000_000,
    );
    assert!(memory < CEILING, "{number} pods take {memory} bytes");

    let ips: Vec<IpAddr> = (pods.iter().flat_map(|pod| pod.info().ips.clone())).collect();
    assert_eq!(ips.len(), 2 * number);
    for prober in [&pods[0], &remote] {
        let own = &prober.info().ips;
        let others: Vec<_> = ips.iter().copied().filter(|ip| !own.contains(ip)).collect();
        let sweep = check::sweep(prober.netns(), &others, PATIENCE).unwrap();
        assert_eq!(sweep.missing, [] as [IpAddr; 0], "{}", prober.full_name());
        println!(
            "{} reaches {} addresses in {:.2} s",
            prober.full_name(),
            sweep.answered,
            sweep.seconds
        );
    }
    let status = node.view("status").unwrap();
    assert_eq!(status["endpoints"], number);
    assert_eq!(status["healthy"], true, "{status}");
    in_parallel(pods, |pod| pod.delete().unwrap());
    cluster.pods.push(remote);
    cluster.finish();
}

#[test]
fn pods_that_come_and_go_leave_nothing() {
    let rounds = count(100, 1000);
    let mut cluster = Cluster::bare(&LabOptions::default());
    cluster.start_agent(1, &AgentOptions::default());
    cluster.start_agent(2, &AgentOptions::default());
    let pods = prepare(&cluster, PARALLEL);
    let remote = add(&mut cluster.lab, 2, "remote");
    let node = &cluster.lab.nodes()[0];
    // Once each beforehand: what an agent makes for the first pod of all stays, and may.
    for pod in &pods {
        run(pod, "ADD");
        run(pod, "DEL");
    }
    let before = Ledger::of(node);
    let memory = (kernel_memory(), resident(node));

    let (mut adds, mut dels) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let pod = &pods[round % pods.len()];
        let start = Instant::now();
        run(pod, "ADD");
        adds.push(start.elapsed());
        let start = Instant::now();
        run(pod, "DEL");
        dels.push(start.elapsed());
    }
    let (add, del) = (percentiles(&mut adds), percentiles(&mut dels));
    println!(
        "{rounds} in turn: ADD p50 {:.1} ms, p99 {:.1} ms; DEL p50 {:.1} ms, p99 {:.1} ms",
        add.0, add.1, del.0, del.1
    );
    before.assert_again(node, "in turn");

    let turn = AtomicUsize::new(0);
    let times = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for pod in &pods {
            scope.spawn(|| {
                while turn.fetch_add(1, Ordering::Relaxed) < rounds {
                    let start = Instant::now();
                    run(pod, "ADD");
                    times.lock().unwrap().push(start.elapsed());
                    run(pod, "DEL");
                }
            });
        }
    });
    let (p50, p99) = percentiles(&mut times.into_inner().unwrap());
    println!("{rounds}, {PARALLEL} at a time: ADD p50 {p50:.0} ms, p99 {p99:.0} ms");
    before.assert_again(node, "in parallel");
    println!(
        "memory kept: kernel {} kB, agent {} kB",
        (kernel_memory() - memory.0) / 1000,
        (resident(node) - memory.1) / 1000
    );
    // DEL again, as a runtime does that is not sure.
    in_parallel(pods, |pod| pod.delete().unwrap());
    before.assert_again(node, "after all");
    cluster.pods.push(remote);
    cluster.finish();
}

//! A real Kubernetes with the reference bridge plugin: that the judge works, and that it judges.
//!
//! Needs root, Go and the packages of `deploy/cluster/setup.sh`, and says so without them. Run by
//! `make test-cluster`, not by `cargo test` alone. One test in one cluster: it is the cluster that
//! takes time and memory.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use skein_perf::cmd::tail;
use skein_perf::kubernetes::cni::Cni;
use skein_perf::kubernetes::e2e::{self, Selection, Spec};
use skein_perf::kubernetes::{Cluster, ClusterOptions, ClusterRecord, cli};
use skein_perf::teardown;

/// What a spec may take at most: those here wait for pods, probes and their own time limits.
const E2E: Duration = Duration::from_secs(1500);

#[test]
fn a_cluster_with_the_reference_plugin_runs_pods_and_is_judged() {
    let before = traces_on_the_machine();
    let begin = Instant::now();
    let cluster = Cluster::up(&ClusterOptions {
        nodes: 2,
        cni: Cni::Reference,
        dual_stack: false,
        kube_proxy: true,
    })
    .unwrap();
    println!("up in {:.1} s", begin.elapsed().as_secs_f64());
    let record = cluster.record().clone();
    nodes_are_ready(&record);
    nothing_runs_in_the_machines_own_network(&record);
    pods_reach_each_other_and_the_api_server(&record);
    the_projects_own_pod_network_specs_pass(&record);
    the_default_deny_spec_fails_without_enforcement(&record);

    let begin = Instant::now();
    cluster.close().unwrap();
    println!("down in {:.1} s", begin.elapsed().as_secs_f64());
    assert_eq!(teardown::leftovers(&record.lab), []);
    assert_eq!(traces_on_the_machine(), before);
}

/// What the cluster's programs change on a machine unless they are kept from it: settings of the
/// kernel, and folders at fixed places.
fn traces_on_the_machine() -> Vec<String> {
    let settings = [
        "vm/overcommit_memory",
        "kernel/panic",
        "kernel/panic_on_oops",
    ]
    .map(|file| std::fs::read_to_string(format!("/proc/sys/{file}")).unwrap());
    let home = std::env::var("HOME").unwrap_or_default();
    let folders = [
        "/etc/cni/net.d",
        "/opt/cni",
        "/usr/libexec/kubernetes",
        "/var/lib/cni",
        "/var/lib/kubelet",
        "/var/log/pods",
        "/run/containerd",
        &format!("{home}/.kube"),
    ]
    .map(|path| format!("{path} {}", Path::new(path).exists()));
    [settings.as_slice(), &folders].concat()
}

fn nodes_are_ready(cluster: &ClusterRecord) {
    let nodes = cluster.get(&["nodes"]).unwrap();
    let nodes = nodes["items"].as_array().unwrap();
    assert_eq!(nodes.len(), 3, "two nodes and the control plane's");
    assert!(nodes.iter().all(cli::is_ready), "{nodes:#?}");
    let key = "node-role.kubernetes.io/control-plane";
    let tainted = nodes.iter().filter(|node| {
        let taints = node["spec"]["taints"].as_array().into_iter().flatten();
        taints.filter(|taint| taint["key"] == key).count() == 1
    });
    assert_eq!(tainted.count(), 1, "the control plane's alone");
}

/// Nothing of the cluster can listen on the machine's own interfaces.
fn nothing_runs_in_the_machines_own_network(cluster: &ClusterRecord) {
    let own = std::fs::read_link("/proc/self/ns/net").unwrap();
    let processes = teardown::processes(&cluster.lab);
    let mut seen = 0;
    for pid in processes {
        // One that has ended meanwhile has no namespace.
        if let Ok(namespace) = std::fs::read_link(format!("/proc/{pid}/ns/net")) {
            assert_ne!(namespace, own, "process {pid} is outside");
            seen += 1;
        }
    }
    assert!(
        seen >= 13,
        "{seen}: four of the control plane, three on each node"
    );
}

fn pods_reach_each_other_and_the_api_server(cluster: &ClusterRecord) {
    cluster
        .apply(&deployment(&cluster.agnhost().unwrap()))
        .unwrap();
    cluster
        .kubectl(&["rollout", "status", "deployment/web", "--timeout=120s"])
        .unwrap()
        .timeout(Duration::from_secs(130))
        .run()
        .unwrap();
    cluster
        .kubectl(&[
            "expose",
            "deployment/web",
            "--port=80",
            "--target-port=8080",
        ])
        .unwrap()
        .run()
        .unwrap();
    let pods = cluster.get(&["pods", "--selector=app=web"]).unwrap();
    let pods = pods["items"].as_array().unwrap().clone();
    let text =
        |pod: &Value, pointer: &str| pod.pointer(pointer).unwrap().as_str().unwrap().to_owned();
    let on: BTreeSet<String> = pods.iter().map(|pod| text(pod, "/spec/nodeName")).collect();
    assert_eq!(on, BTreeSet::from(["node1".to_owned(), "node2".to_owned()]));
    for from in &pods {
        let name = text(from, "/metadata/name");
        let curl = |url: &str, more: &[&str]| {
            let words = ["exec", &name, "--", "curl", "-sSk", "--max-time", "10", url];
            let command = cluster.kubectl(&words).unwrap().args(more);
            command.run().unwrap().stdout
        };
        for to in &pods {
            let address = text(to, "/status/podIP");
            let answer = curl(&format!("http://{address}:8080/hostname"), &[]);
            assert_eq!(answer, text(to, "/metadata/name"), "{name} to {address}");
        }
        // No name server: the addresses are those that the kubelet hands to every container.
        let service = cluster.get(&["service", "web"]).unwrap();
        let web = text(&service, "/spec/clusterIP");
        // A new service refuses connections until every kube-proxy has heard of its pods.
        let patience = ["--retry", "20", "--retry-delay", "1", "--retry-all-errors"];
        let answer = curl(&format!("http://{web}/hostname"), &patience);
        assert!(
            pods.iter().any(|pod| text(pod, "/metadata/name") == answer),
            "{answer}"
        );
        assert!(curl("https://10.96.0.1/version", &[]).contains("gitVersion"));
        let log = cluster.kubectl(&["logs", &name]).unwrap().run().unwrap();
        let log = log.stdout + &log.stderr;
        assert!(log.contains("GET /hostname"), "{log}");
    }
}

fn deployment(image: &str) -> Value {
    let labels = json!({"app": "web"});
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {
            "replicas": 4,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "terminationGracePeriodSeconds": 1,
                    "topologySpreadConstraints": [{
                        "maxSkew": 1,
                        "topologyKey": "kubernetes.io/hostname",
                        "whenUnsatisfiable": "DoNotSchedule",
                        "labelSelector": {"matchLabels": labels},
                        "nodeTaintsPolicy": "Honor",
                    }],
                    "containers": [{
                        "name": "web",
                        "image": image,
                        "args": ["netexec", "--http-port=8080"],
                        "readinessProbe": {"httpGet": {"path": "/hostname", "port": 8080}, "periodSeconds": 1},
                    }],
                },
            },
        },
    })
}

fn specs(cluster: &ClusterRecord, focus: &str) -> Vec<Spec> {
    let selection = Selection {
        focus: focus.to_owned(),
        ..Selection::default()
    };
    let (specs, output) = e2e::run(cluster, &selection, E2E).unwrap();
    print!("{}", e2e::table(&specs));
    if !specs.iter().all(Spec::passed) {
        println!("{}", tail(&output.stdout));
    }
    specs
}

fn the_projects_own_pod_network_specs_pass(cluster: &ClusterRecord) {
    let specs = specs(cluster, "(intra-pod|node-pod) communication: (http|udp)");
    assert_eq!(
        specs.len(),
        4,
        "intra-pod and node-pod, http and udp: {specs:#?}"
    );
    assert!(specs.iter().all(Spec::passed), "{specs:#?}");
}

/// Nothing enforces policies here, so the spec has to fail, and for that reason: packets went
/// where the policy forbids it.
fn the_default_deny_spec_fails_without_enforcement(cluster: &ClusterRecord) {
    let specs = specs(
        cluster,
        "Netpol NetworkPolicy between server and client should support a 'default-deny-ingress'",
    );
    let [spec] = specs.as_slice() else {
        panic!("one spec has that name: {specs:#?}");
    };
    assert_eq!(spec.state, "failed");
    assert!(
        spec.message
            .contains("wrong results in reachability matrix"),
        "{spec:#?}"
    );
}

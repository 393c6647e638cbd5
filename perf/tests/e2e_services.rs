//! Services with real servers: everybody who may ask, both protocols and IP versions, clients that
//! stay, refusals at once, and backends that come and go.

mod common;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use common::Cluster;
use serde_json::{Value, json};
use skein_perf::cmd::Running;
use skein_perf::pod::Netns;
use skein_perf::probe::name::Answers;
use skein_perf::{AgentOptions, LabOptions, check};

/// The port of all servers, and that of the Service.
const TARGET: u16 = 8080;
const PORT: u16 = 80;

/// The Service's addresses.
const VIRTUAL: [&str; 2] = ["10.96.0.10", "fd96::10"];

const NAMESPACE: &str = "default";

fn service(more: &Value) -> Value {
    let mut spec = json!({
        "clusterIP": VIRTUAL[0],
        "clusterIPs": VIRTUAL,
        "ports": [
            {"name": "t", "port": PORT, "protocol": "TCP"},
            {"name": "u", "port": PORT, "protocol": "UDP"},
        ],
    });
    for (key, value) in more.as_object().expect("keys of a spec") {
        spec[key] = value.clone();
    }
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "namespace": NAMESPACE},
        "spec": spec,
    })
}

/// The slice of one family with these pods of the cluster.
fn slice(cluster: &Cluster, pods: &[usize], v6: bool) -> Value {
    let endpoint = |&pod: &usize| {
        let pod = &cluster.pods[pod];
        json!({
            "addresses": [pod.ip(v6).unwrap()],
            "nodeName": pod.info().node.name,
            "conditions": {"ready": true},
        })
    };
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": if v6 { "web-6" } else { "web-4" },
            "namespace": NAMESPACE,
            "labels": {"kubernetes.io/service-name": "web"},
        },
        "addressType": if v6 { "IPv6" } else { "IPv4" },
        "ports": [
            {"name": "t", "port": TARGET, "protocol": "TCP"},
            {"name": "u", "port": TARGET, "protocol": "UDP"},
        ],
        "endpoints": pods.iter().map(endpoint).collect::<Vec<_>>(),
    })
}

/// Sets who serves, and waits until every node chooses among exactly those.
fn serve(cluster: &Cluster, pods: &[usize]) {
    for v6 in [false, true] {
        let slice = slice(cluster, pods, v6);
        let file = format!("slice-{}", if v6 { 6 } else { 4 });
        cluster.lab.apply(&file, &slice).unwrap();
    }
    let wanted = |port: &Value| {
        let v6 = port["family"] == "ipv6";
        let mut all: Vec<String> = (pods.iter())
            .map(|&pod| cluster.pods[pod].ip(v6).unwrap().to_string())
            .collect();
        all.sort();
        all
    };
    until("every node knows the backends", || {
        cluster.lab.nodes().iter().all(|node| {
            let view = node.view("services").unwrap();
            let ports = view["services"].as_array().unwrap();
            // Two ports, each in two families.
            ports.len() == 4 && ports.iter().all(|port| chosen(port) == wanted(port))
        })
    });
}

/// The addresses that a port's new connections go to.
fn chosen(port: &Value) -> Vec<String> {
    let backends = port["backends"].as_array().unwrap().iter();
    let mut chosen: Vec<String> = backends
        .filter(|one| one["selected"] == true)
        .map(|one| one["address"].as_str().unwrap().to_owned())
        .collect();
    chosen.sort();
    chosen
}

fn until(what: &str, mut check: impl FnMut() -> bool) {
    let start = Instant::now();
    while !check() {
        assert!(start.elapsed() < Duration::from_secs(15), "not so: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Servers in pods b (node 1) and c (node 2), by those names.
fn servers(cluster: &Cluster) -> Vec<Running> {
    let of = |pod: usize, name| {
        check::name_server(cluster.pods[pod].netns(), name, TARGET).expect("a server")
    };
    vec![of(1, "b"), of(2, "c")]
}

/// Who asks: pod a and the host on node 1, pod c and the host on node 2.
fn clients(cluster: &Cluster) -> Vec<(&'static str, Netns)> {
    let nodes = cluster.lab.nodes();
    vec![
        ("pod a", cluster.pods[0].netns().clone()),
        ("pod c", cluster.pods[2].netns().clone()),
        ("host 1", nodes[0].netns()),
        ("host 2", nodes[1].netns()),
    ]
}

fn virtual_addresses() -> [SocketAddr; 2] {
    VIRTUAL.map(|text| SocketAddr::new(text.parse::<IpAddr>().unwrap(), PORT))
}

fn names(answers: &Answers) -> Vec<&str> {
    answers.by_name.keys().map(String::as_str).collect()
}

#[test]
fn pods_and_hosts_reach_every_backend_of_a_service() {
    let cluster = Cluster::new(&LabOptions::default(), &AgentOptions::default());
    let _servers = servers(&cluster);
    cluster.lab.apply("service", &service(&json!({}))).unwrap();
    serve(&cluster, &[1, 2]);
    let mut wrong = Vec::new();
    for (who, netns) in clients(&cluster) {
        for to in virtual_addresses() {
            for udp in [false, true] {
                let answers = check::ask_names(&netns, to, 40, udp).unwrap();
                // A fair coin shows one side forty times once in 5 * 10^11.
                if names(&answers) != ["b", "c"] || answers.refused + answers.silent > 0 {
                    wrong.push(format!("{who} to {to}, UDP {udp}: {answers:?}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    cluster.finish();
}

#[test]
fn nobody_serves_and_the_client_hears_it_at_once() {
    let cluster = Cluster::new(&LabOptions::default(), &AgentOptions::default());
    cluster.lab.apply("service", &service(&json!({}))).unwrap();
    serve(&cluster, &[]);
    for to in virtual_addresses() {
        for udp in [false, true] {
            for port in [PORT, PORT + 1] {
                let to = SocketAddr::new(to.ip(), port);
                let answers = check::ask_names(cluster.pods[0].netns(), to, 1, udp).unwrap();
                assert_eq!(answers.refused, 1, "{to}, UDP {udp}: {answers:?}");
            }
        }
    }
    cluster.finish();
}

#[test]
fn a_client_stays_with_its_backend_and_moves_when_that_is_gone() {
    let cluster = Cluster::new(&LabOptions::default(), &AgentOptions::default());
    let _servers = servers(&cluster);
    let affinity = json!({"sessionAffinity": "ClientIP"});
    cluster.lab.apply("service", &service(&affinity)).unwrap();
    serve(&cluster, &[1, 2]);
    let client = cluster.pods[0].netns();
    for to in virtual_addresses() {
        for udp in [false, true] {
            serve(&cluster, &[1, 2]);
            let what = format!("{to}, UDP {udp}");
            let first = check::ask_names(client, to, 30, udp).unwrap();
            assert_eq!(first.by_name.len(), 1, "{what}: {first:?}");
            assert_eq!(first.refused + first.silent, 0, "{what}: {first:?}");
            let (gone, left) = match names(&first)[..] {
                ["b"] => (1, "c"),
                _ => (2, "b"),
            };
            serve(&cluster, &[3 - gone]);
            let then = check::ask_names(client, to, 10, udp).unwrap();
            assert_eq!(names(&then), [left], "{what}: {then:?}");
            assert_eq!(then.refused + then.silent, 0, "{what}: {then:?}");
        }
    }
    cluster.finish();
}

#[test]
fn backends_come_and_go_and_no_question_is_lost() {
    let cluster = Cluster::new(&LabOptions::default(), &AgentOptions::default());
    let _servers = servers(&cluster);
    cluster.lab.apply("service", &service(&json!({}))).unwrap();
    for round in 0..6 {
        let pods: &[usize] = [&[1, 2][..], &[1], &[2]][round % 3];
        serve(&cluster, pods);
        for to in virtual_addresses() {
            for udp in [false, true] {
                let what = format!("round {round}, {to}, UDP {udp}");
                let answers = check::ask_names(cluster.pods[0].netns(), to, 30, udp).unwrap();
                assert_eq!(answers.by_name.len(), pods.len(), "{what}: {answers:?}");
                assert_eq!(answers.refused + answers.silent, 0, "{what}: {answers:?}");
            }
        }
    }
    cluster.finish();
}

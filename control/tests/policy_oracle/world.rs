//! A cluster as manifests, and beside it the compiled policies, told of each change alone.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::{Value, json};
use skein_cni::agent::{Attachment, PodRef};
use skein_control::compile::policy::Policies;
use skein_control::identity::LabelSet;
use skein_control::mac::MacAddr;
use skein_control::policy::PolicyKey;
use skein_control::state::{Change, ClusterState, Endpoint, ObjectKey, PodKey};
use skein_control::watch::manifest;
use skein_dataplane::ids::IdentityId;
use skein_dataplane::policy::EndpointPolicy;

use super::generate::{self, Random};
use super::oracle::{Model, PodModel};

pub fn pod_key(pod: &PodModel) -> PodKey {
    PodKey {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
    }
}

fn manifest_of(pod: &PodModel) -> Value {
    let ports = |of_sidecar: bool| -> Vec<Value> {
        let ports = pod
            .ports
            .iter()
            .filter(|port| port.of_sidecar == of_sidecar);
        ports
            .map(|port| {
                json!({
                    "name": port.name, "protocol": port.protocol, "containerPort": port.number
                })
            })
            .collect()
    };
    let labels: serde_json::Map<_, _> = (pod.labels.iter().cloned())
        .map(|(name, value)| (name, Value::String(value)))
        .collect();
    let ips: Vec<_> = pod.addresses.iter().map(|ip| json!({ "ip": ip })).collect();
    // What a container that ends before the others begin calls its ports is nobody's.
    let early = json!([{ "name": "http", "containerPort": 7 }]);
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": pod.name, "namespace": pod.namespace, "labels": labels,
            "uid": format!("uid-{}", pod.name),
        },
        "spec": {
            "nodeName": if pod.is_local { "n1" } else { "n2" },
            "initContainers": [
                { "name": "i", "ports": early },
                { "name": "s", "restartPolicy": "Always", "ports": ports(true) },
            ],
            "containers": [{ "name": "c", "ports": ports(false) }],
        },
        "status": { "podIPs": if pod.tells_addresses { ips } else { Vec::new() } },
    })
}

fn endpoint_of(pod: &PodModel) -> Endpoint {
    Endpoint {
        attachment: attachment(&pod_key(pod)),
        network: "skein".into(),
        netns: "/n".into(),
        pod: Some(PodRef {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: format!("uid-{}", pod.name),
        }),
        ips: pod.addresses.clone(),
        host_ifname: "sk".into(),
        pod_mac: MacAddr::ZERO,
        host_mac: MacAddr::ZERO,
        device_mtu: 1450,
        route_mtu: 1450,
        queues: 1,
        full_checksums: false,
        ifindex: Some(1),
    }
}

fn attachment(key: &PodKey) -> Attachment {
    Attachment {
        container_id: key.to_string(),
        ifname: "eth0".into(),
    }
}

#[derive(Default)]
pub struct World {
    pub model: Model,
    pub policies: Policies,
    state: ClusterState,
    numbers: HashMap<LabelSet, IdentityId>,
    identities: BTreeMap<PodKey, IdentityId>,
    /// Counts pods and addresses, so that none comes twice.
    pub made: u8,
}

impl World {
    /// A random cluster. Its objects come all at once, as at the start, and endpoints before or
    /// after them.
    pub fn new(random: &mut Random) -> Self {
        let mut world = Self::default();
        let mut changed = BTreeSet::new();
        for name in generate::NAMESPACES {
            let labels = random.labels();
            changed.insert(world.put_namespace(name, labels));
        }
        for _ in 0..random.below(5) + 3 {
            let pod = generate::pod(&mut world, random);
            changed.insert(world.put_pod(pod));
        }
        for _ in 0..random.below(6) + 1 {
            let policy = generate::policy(random);
            changed.insert(world.put_policy(policy));
        }
        world.tell(&changed);
        world
    }

    /// One random change, told alone.
    pub fn change(&mut self, random: &mut Random) {
        let key = match random.below(9) {
            0 | 1 => {
                let policy = generate::policy(random);
                self.put_policy(policy)
            }
            2 => {
                let Some(((namespace, name), _)) = self.model.policies.pop_first() else {
                    return;
                };
                let key = ObjectKey::NetworkPolicy(PolicyKey { namespace, name });
                self.state.apply(Change::Remove(key.clone()));
                key
            }
            3 => {
                let name = *random.pick(&generate::NAMESPACES);
                let labels = random.labels();
                self.put_namespace(name, labels)
            }
            4 => {
                let pod = generate::pod(self, random);
                self.put_pod(pod)
            }
            5 if self.model.pods.len() > 2 => {
                let gone = self.model.pods.remove(random.below(self.model.pods.len()));
                let key = pod_key(&gone);
                self.state.remove_endpoint(&attachment(&key));
                self.state
                    .apply(Change::Remove(ObjectKey::Pod(key.clone())));
                ObjectKey::Pod(key)
            }
            _ => {
                let mut pod = self.model.pods[random.below(self.model.pods.len())].clone();
                match random.below(3) {
                    0 => pod.labels = generate::pod_labels(&pod.name, random),
                    1 => pod.ports = random.named_ports(),
                    _ => pod.addresses = generate::addresses(self, pod.is_local),
                }
                self.put_pod(pod)
            }
        };
        self.tell(&[key].into());
    }

    fn tell(&mut self, changed: &BTreeSet<ObjectKey>) {
        self.identities.clear();
        for pod in self.state.pods() {
            let labels = LabelSet::of_pod(pod, self.state.namespace(&pod.key.namespace));
            let next = IdentityId::FIRST_DYNAMIC + self.numbers.len() as u32;
            let id = self.numbers.entry(labels);
            let id = *id.or_insert_with(|| IdentityId::new(next).unwrap());
            self.identities.insert(pod.key.clone(), id);
        }
        self.policies.update(&self.state, &self.identities, changed);
    }

    pub fn identity(&self, pod: usize) -> IdentityId {
        self.identities[&pod_key(&self.model.pods[pod])]
    }

    /// What each local pod allows, by its name.
    pub fn endpoints(&mut self) -> BTreeMap<PodKey, EndpointPolicy> {
        let mut found = self.policies.endpoints(&self.state);
        let local = self
            .model
            .pods
            .iter()
            .filter(|pod| pod.is_local)
            .map(pod_key);
        let by_pod: BTreeMap<_, _> = local
            .map(|key| {
                let policy = found.remove(&attachment(&key));
                (key, policy.expect("its pod is known"))
            })
            .collect();
        assert!(found.is_empty(), "endpoints that are gone");
        by_pod
    }

    fn put(&mut self, manifest: &Value) -> ObjectKey {
        let (_, object) = manifest::parse(&manifest.to_string())
            .unwrap()
            .pop()
            .unwrap();
        let key = object.key();
        self.state.apply(Change::Set(object));
        key
    }

    fn put_namespace(&mut self, name: &str, labels: Vec<(String, String)>) -> ObjectKey {
        let map: serde_json::Map<_, _> = (labels.iter().cloned())
            .map(|(name, value)| (name, Value::String(value)))
            .collect();
        self.model.namespaces.insert(name.into(), labels);
        self.put(&json!({
            "apiVersion": "v1", "kind": "Namespace",
            "metadata": { "name": name, "labels": map },
        }))
    }

    fn put_pod(&mut self, pod: PodModel) -> ObjectKey {
        if pod.is_local {
            self.state.set_endpoint(endpoint_of(&pod));
        }
        let key = self.put(&manifest_of(&pod));
        self.model
            .pods
            .retain(|other| pod_key(other) != pod_key(&pod));
        self.model.pods.push(pod);
        key
    }

    fn put_policy(&mut self, policy: Value) -> ObjectKey {
        let key = self.put(&policy);
        let ObjectKey::NetworkPolicy(name) = key.clone() else {
            panic!("not a policy: {key}");
        };
        (self.model.policies).insert((name.namespace, name.name), policy);
        key
    }

    /// All that a failure is understood by.
    pub fn manifests(&self) -> String {
        let pods = self.model.pods.iter().map(manifest_of);
        let all: Vec<_> = pods.chain(self.model.policies.values().cloned()).collect();
        let namespaces = format!("{:?}\n", self.model.namespaces);
        namespaces + &serde_json::to_string_pretty(&all).unwrap()
    }
}

//! What must hold beside the right verdicts: what is shared, what is left alone, what is said.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use skein_cni::agent::{Attachment, PodRef};
use skein_dataplane::ids::IdentityId;
use skein_dataplane::policy::{EndpointPolicy, Judgement, PeerOf, Side};
use skein_dataplane::wire::protocol::TCP;

use super::Policies;
use crate::identity::LabelSet;
use crate::mac::MacAddr;
use crate::state::{Change, ClusterState, Endpoint, Object, ObjectKey, Pod, PodKey};
use crate::watch::manifest;

#[derive(Default)]
struct Cluster {
    state: ClusterState,
    policies: Policies,
    numbers: HashMap<LabelSet, IdentityId>,
}

fn key(name: &str) -> PodKey {
    PodKey {
        namespace: "shop".into(),
        name: name.into(),
    }
}

fn attachment(name: &str) -> Attachment {
    Attachment {
        container_id: name.into(),
        ifname: "eth0".into(),
    }
}

impl Cluster {
    fn number(&mut self, labels: &LabelSet) -> IdentityId {
        let next = IdentityId::FIRST_DYNAMIC + self.numbers.len() as u32;
        let id = self.numbers.entry(labels.clone());
        *id.or_insert_with(|| IdentityId::new(next).unwrap())
    }

    fn identity(&mut self, pod: &Pod) -> IdentityId {
        let namespace = self.state.namespace(&pod.key.namespace);
        let labels = LabelSet::of_pod(pod, namespace);
        self.number(&labels)
    }

    fn put(&mut self, kind: &str, body: &str) -> ObjectKey {
        let text = format!("{kind}\n{body}\n");
        let (_, object) = manifest::parse(&text).unwrap().pop().unwrap();
        let key = object.key();
        self.state.apply(Change::Set(object));
        self.tell(key.clone());
        key
    }

    fn tell(&mut self, key: ObjectKey) {
        let pods: Vec<Pod> = self.state.pods().cloned().collect();
        let identities: BTreeMap<_, _> = (pods.iter())
            .map(|pod| (pod.key.clone(), self.identity(pod)))
            .collect();
        self.policies
            .update(&self.state, &identities, &[key].into());
    }

    fn pod(&mut self, name: &str, labels: &str, ports: &str) {
        let body = format!(
            "metadata: {{name: {name}, namespace: shop, labels: {{{labels}}}}}\n\
             spec: {{containers: [{{ports: [{ports}]}}]}}"
        );
        self.put("apiVersion: v1\nkind: Pod", &body);
    }

    fn local(&mut self, name: &str, labels: &str, ports: &str, address: &str) {
        self.state.set_endpoint(Endpoint {
            attachment: attachment(name),
            network: "skein".into(),
            netns: "/n".into(),
            pod: Some(PodRef {
                namespace: "shop".into(),
                name: name.into(),
                uid: String::new(),
            }),
            ips: vec![address.parse().unwrap()],
            host_ifname: "sk".into(),
            pod_mac: MacAddr::ZERO,
            host_mac: MacAddr::ZERO,
            device_mtu: 1450,
            route_mtu: 1450,
            queues: 1,
            full_checksums: false,
            ifindex: Some(1),
        });
        self.pod(name, labels, ports);
    }

    fn policy(&mut self, name: &str, spec: &str) -> ObjectKey {
        let body = format!("metadata: {{name: {name}, namespace: shop}}\nspec: {spec}");
        let kind = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy";
        self.put(kind, &body)
    }

    fn endpoint(&mut self, name: &str) -> EndpointPolicy {
        let mut found = self.policies.endpoints(&self.state);
        found.remove(&attachment(name)).unwrap()
    }

    fn notes(&mut self) -> Vec<String> {
        self.policies.endpoints(&self.state);
        self.policies
            .notes()
            .iter()
            .map(ToString::to_string)
            .collect()
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

const FROM_CLIENTS: &str = "{podSelector: {matchLabels: {app: web}}, \
    ingress: [{from: [{podSelector: {matchLabels: {app: client}}}], ports: [{port: 80}]}]}";

#[test]
fn a_peer_is_judged_right_before_its_pod_is_known() {
    let mut cluster = Cluster::default();
    cluster.local("web", "app: web", "", "10.0.0.1");
    cluster.policy("web", FROM_CLIENTS);
    cluster.endpoint("web");
    let Object::Pod(stranger) = manifest::parse(
        "{apiVersion: v1, kind: Pod, \
         metadata: {name: c, namespace: shop, labels: {app: client}}}",
    )
    .unwrap()
    .pop()
    .unwrap()
    .1
    else {
        panic!("a pod");
    };
    let labels = LabelSet::of_pod(&stranger, None);
    let identity = cluster.number(&labels);
    let peer = PeerOf {
        identity,
        address: ip("10.0.9.9"),
    };
    let judge = |cluster: &mut Cluster| {
        let policy = cluster.endpoint("web");
        policy.judge(Side::Ingress, peer, TCP, 80)
    };
    assert_eq!(judge(&mut cluster), Judgement::Denied);
    cluster.policies.learn(identity, &labels);
    assert!(matches!(judge(&mut cluster), Judgement::Allowed(_)));
    cluster.policies.retain(|id| id != identity);
    assert_eq!(judge(&mut cluster), Judgement::Denied);
}

#[test]
fn tables_are_shared_and_made_anew_by_what_concerns_them_alone() {
    let mut cluster = Cluster::default();
    cluster.local("web", "app: web", "", "10.0.0.1");
    cluster.local("twin", "app: web, n: two", "", "10.0.0.2");
    cluster.local("other", "app: other", "", "10.0.0.3");
    cluster.policy("web", FROM_CLIENTS);
    cluster.policy(
        "other",
        "{podSelector: {matchLabels: {app: other}}, ingress: [{from: [{podSelector: {}}]}]}",
    );
    let rules = |cluster: &mut Cluster, name| cluster.endpoint(name).ingress.unwrap();
    let (web, other) = (rules(&mut cluster, "web"), rules(&mut cluster, "other"));
    assert!(Arc::ptr_eq(&web, &rules(&mut cluster, "twin")));
    assert!(!Arc::ptr_eq(&web, &other));
    assert!(cluster.endpoint("web").egress.is_none());

    // A new identity that one of the two means.
    cluster.pod("bystander", "app: none", "");
    assert!(Arc::ptr_eq(&web, &rules(&mut cluster, "web")));
    assert!(!Arc::ptr_eq(&other, &rules(&mut cluster, "other")));
    // One more pod of an identity that is known.
    let other = rules(&mut cluster, "other");
    cluster.pod("bystander2", "app: none", "");
    assert!(Arc::ptr_eq(&other, &rules(&mut cluster, "other")));
    // The other's policy.
    cluster.policy("other", "{podSelector: {matchLabels: {app: other}}}");
    assert!(Arc::ptr_eq(&web, &rules(&mut cluster, "web")));
    assert!(!Arc::ptr_eq(&other, &rules(&mut cluster, "other")));
    // A client.
    cluster.pod("client", "app: client", "");
    assert!(!Arc::ptr_eq(&web, &rules(&mut cluster, "web")));
    assert_eq!(cluster.policies.groups.len(), 2);
    assert_eq!(cluster.policies.peers.len(), 2);
}

#[test]
fn a_rule_keeps_its_number_and_no_number_means_another() {
    let mut cluster = Cluster::default();
    cluster.local("web", "app: web", "", "10.0.0.1");
    let world = PeerOf {
        identity: IdentityId::WORLD_IPV4,
        address: ip("198.51.100.1"),
    };
    let judge = |cluster: &mut Cluster| {
        let found = cluster.endpoint("web").judge(Side::Ingress, world, TCP, 80);
        let Judgement::Allowed(rule) = found else {
            panic!("{found:?}");
        };
        rule
    };
    let first = cluster.policy(
        "p",
        "{ingress: [{ports: [{port: 1}]}, {ports: [{port: 80}]}]}",
    );
    let rule = judge(&mut cluster);
    let name = cluster.policies.rule(rule).unwrap().to_string();
    assert_eq!(name, "shop/p spec.ingress[1]");
    cluster.policy("p", "{ingress: [{ports: [{port: 2}]}, {}]}");
    assert_eq!(judge(&mut cluster), rule);
    cluster.policy("p", "{ingress: [{}]}");
    assert_ne!(judge(&mut cluster), rule);
    assert_eq!(cluster.policies.rule(rule), None);
    cluster.state.apply(Change::Remove(first.clone()));
    cluster.tell(first);
    assert!(cluster.policies.is_empty());
    cluster.policy("p", "{ingress: [{ports: [{port: 1}]}, {}]}");
    assert_ne!(judge(&mut cluster), rule);
}

#[test]
fn policies_that_do_less_than_they_say_are_noted() {
    let mut cluster = Cluster::default();
    cluster.policy("a", "{podSelector: {matchLabels: {app: web}}}");
    assert_eq!(cluster.notes(), ["policy shop/a selects no pod"]);
    assert_eq!(cluster.policies.selecting_nothing(), 1);
    cluster.local(
        "web",
        "app: web",
        "{name: http, containerPort: 80}",
        "10.0.0.1",
    );
    assert_eq!(cluster.notes(), [""; 0]);
    cluster.policy(
        "b",
        "{podSelector: {}, ingress: [{ports: [{port: http}, {port: dns, protocol: UDP}]}], \
         egress: [{ports: [{port: https}]}, {ports: [{port: http}]}]}",
    );
    let expected = [
        "policy shop/b spec.egress[0] names port TCP 'https', which none of its peers has",
        "policy shop/b spec.ingress[0] names port UDP 'dns', which pod shop/web does not have",
    ];
    assert_eq!(cluster.notes(), expected);
}

#[test]
fn what_applies_is_told_in_words() {
    let mut cluster = Cluster::default();
    cluster.local("web", "app: web", "", "10.0.0.1");
    assert_eq!(cluster.policies.applied(&key("web"), Side::Ingress), []);
    cluster.policy(
        "web",
        "{podSelector: {}, policyTypes: [Ingress, Egress], ingress: [{ports: [{port: 80}], \
         from: [{podSelector: {matchLabels: {app: client}}}, \
                {namespaceSelector: {}}, \
                {namespaceSelector: {matchLabels: {team: a}}, podSelector: {}}, \
                {ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16, 10.2.0.0/16]}}]}, {}]}",
    );
    let [applied] = &cluster.policies.applied(&key("web"), Side::Ingress)[..] else {
        panic!("one policy");
    };
    let expected = [
        "TCP 80 from pods with app=client of this namespace, or every pod of any namespace, or \
         every pod of namespaces with team=a, or 10.0.0.0/8 except 10.1.0.0/16 and 10.2.0.0/16",
        "everything from anyone",
    ];
    assert_eq!(applied.policy.to_string(), "shop/web");
    assert_eq!(applied.rules, expected);
    let egress = cluster.policies.applied(&key("web"), Side::Egress);
    assert_eq!(egress[0].rules, [""; 0]);
}

//! Kubernetes manifests: YAML or JSON text → objects, or a fault with its line.
//!
//! Kinds that Skein does not read are passed over when Kubernetes knows them, and are faults
//! otherwise: a typing error must not look like success.

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::objects::{NamespaceManifest, NodeManifest, PodManifest};
use super::policy::PolicyManifest;
use super::service::{EndpointSliceManifest, ServiceCidrManifest, ServiceManifest};
use crate::state::Object;

/// A document that is refused: its line in the text, counted from one, and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The line.
    pub line: u64,
    /// Why.
    pub reason: String,
}

/// Groups whose kinds are passed over, by apiVersion: `(apiVersion, kinds)`.
const PASSED_OVER: &[(&str, &[&str])] = &[
    (
        "v1",
        &[
            "Binding",
            "ConfigMap",
            "Endpoints",
            "Event",
            "LimitRange",
            "PersistentVolume",
            "PersistentVolumeClaim",
            "PodTemplate",
            "ReplicationController",
            "ResourceQuota",
            "Secret",
            "ServiceAccount",
        ],
    ),
    (
        "apps/v1",
        &[
            "ControllerRevision",
            "DaemonSet",
            "Deployment",
            "ReplicaSet",
            "StatefulSet",
        ],
    ),
    ("batch/v1", &["CronJob", "Job"]),
    ("autoscaling/v1", &["HorizontalPodAutoscaler"]),
    ("autoscaling/v2", &["HorizontalPodAutoscaler"]),
    ("policy/v1", &["PodDisruptionBudget"]),
    (
        "networking.k8s.io/v1",
        &["Ingress", "IngressClass", "IPAddress"],
    ),
    ("coordination.k8s.io/v1", &["Lease"]),
    ("scheduling.k8s.io/v1", &["PriorityClass"]),
    ("node.k8s.io/v1", &["RuntimeClass"]),
    (
        "storage.k8s.io/v1",
        &[
            "CSIDriver",
            "CSINode",
            "CSIStorageCapacity",
            "StorageClass",
            "VolumeAttachment",
        ],
    ),
    (
        "rbac.authorization.k8s.io/v1",
        &["ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"],
    ),
    ("apiextensions.k8s.io/v1", &["CustomResourceDefinition"]),
    ("apiregistration.k8s.io/v1", &["APIService"]),
    (
        "admissionregistration.k8s.io/v1",
        &[
            "MutatingWebhookConfiguration",
            "ValidatingAdmissionPolicy",
            "ValidatingAdmissionPolicyBinding",
            "ValidatingWebhookConfiguration",
        ],
    ),
];

/// Reads every document of a text; all its faults, or all its objects with their lines.
pub fn parse(text: &str) -> Result<Vec<(u64, Object)>, Vec<Fault>> {
    let mut objects = Vec::new();
    let mut faults = Vec::new();
    for (first_line, document) in documents(text) {
        if let Err(fault) = parse_document(first_line, &document, &mut objects) {
            faults.push(fault);
        }
    }
    if faults.is_empty() {
        Ok(objects)
    } else {
        Err(faults)
    }
}

/// Cuts a text at its document markers (YAML 1.2 section 9.1.2), which stand in the first
/// column and nowhere else: block scalars are indented, quoted ones may not hold them.
fn documents(text: &str) -> Vec<(u64, String)> {
    let mut documents = Vec::new();
    let mut current = String::new();
    let mut first = 1;
    let marker = |line: &str, word: &str| {
        line.strip_prefix(word)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']))
    };
    for (number, line) in (1..).zip(text.split_inclusive('\n')) {
        if marker(line, "---") {
            documents.push((first, std::mem::take(&mut current)));
            first = number;
            // Content may follow the marker on its line; the marker itself is blanked, so that
            // columns stay.
            current.push_str("   ");
            current.push_str(&line[3..]);
        } else if marker(line, "...") {
            documents.push((first, std::mem::take(&mut current)));
            first = number + 1;
        } else {
            current.push_str(line);
        }
    }
    documents.push((first, current));
    documents.retain(|(_, document)| {
        document.lines().any(|line| {
            let line = line.trim();
            !line.is_empty() && !line.starts_with('#') && !line.starts_with('%')
        })
    });
    documents
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TypeMeta {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
}

#[derive(Deserialize)]
struct ItemList {
    #[serde(default)]
    items: Vec<serde_json::Value>,
}

fn parse_document(
    line: u64,
    document: &str,
    objects: &mut Vec<(u64, Object)>,
) -> Result<(), Fault> {
    let TypeMeta { api_version, kind } = from_yaml(line, document)?;
    if (api_version.as_str(), kind.as_str()) == ("v1", "List") {
        let list: ItemList = from_yaml(line, document)?;
        for (index, item) in list.items.into_iter().enumerate() {
            let fault = |reason| Fault {
                line,
                reason: format!("item {}: {reason}", index + 1),
            };
            let meta: TypeMeta =
                serde_json::from_value(item.clone()).map_err(|e| fault(e.to_string()))?;
            let read = FromValue(item);
            if let Some(object) = object(&meta.api_version, &meta.kind, read).map_err(fault)? {
                objects.push((line, object));
            }
        }
        return Ok(());
    }
    let read = FromText { line, document };
    let found = object(&api_version, &kind, read).map_err(|error| error.located(line))?;
    objects.extend(found.map(|object| (line, object)));
    Ok(())
}

/// A reason, with a line where the reader knows one.
trait Reason: From<String> {
    fn located(self, line: u64) -> Fault;
}

impl Reason for Fault {
    fn located(self, line: u64) -> Fault {
        Fault {
            line: if self.line == 0 { line } else { self.line },
            reason: self.reason,
        }
    }
}

impl From<String> for Fault {
    fn from(reason: String) -> Self {
        Self { line: 0, reason }
    }
}

impl Reason for String {
    fn located(self, line: u64) -> Fault {
        Fault { line, reason: self }
    }
}

/// A document that can be read as a type.
trait Read {
    type Error: Reason;
    fn read<T: DeserializeOwned>(self) -> Result<T, Self::Error>;
}

struct FromText<'a> {
    line: u64,
    document: &'a str,
}

impl Read for FromText<'_> {
    type Error = Fault;
    fn read<T: DeserializeOwned>(self) -> Result<T, Fault> {
        from_yaml(self.line, self.document)
    }
}

struct FromValue(serde_json::Value);

impl Read for FromValue {
    type Error = String;
    fn read<T: DeserializeOwned>(self) -> Result<T, String> {
        serde_json::from_value(self.0).map_err(|error| error.to_string())
    }
}

fn from_yaml<T: DeserializeOwned>(first_line: u64, document: &str) -> Result<T, Fault> {
    serde_saphyr::from_str(document).map_err(|error| {
        let error = error.without_snippet();
        let line = error
            .location()
            .map_or(1, |location| location.line().max(1));
        let mut reason = error.to_string();
        // The text counts lines from the document's start; the fault, from the file's.
        if let Some(place) = reason.rfind(" at line ") {
            reason.truncate(place);
        }
        Fault {
            line: first_line + line - 1,
            reason,
        }
    })
}

/// Reads an object of a kind; `None` for a kind that is passed over.
fn object<R: Read>(api_version: &str, kind: &str, source: R) -> Result<Option<Object>, R::Error> {
    let object = match (api_version, kind) {
        ("", _) | (_, "") => {
            return Err("apiVersion or kind is missing: no Kubernetes object"
                .to_owned()
                .into());
        }
        ("v1", "Node") => Object::Node(source.read::<NodeManifest>()?.check()?),
        ("v1", "Namespace") => Object::Namespace(source.read::<NamespaceManifest>()?.check()?),
        ("v1", "Pod") => Object::Pod(source.read::<PodManifest>()?.check()?),
        ("networking.k8s.io/v1", "NetworkPolicy") => {
            Object::NetworkPolicy(source.read::<PolicyManifest>()?.check()?)
        }
        ("v1", "Service") => Object::Service(source.read::<ServiceManifest>()?.check()?),
        ("discovery.k8s.io/v1", "EndpointSlice") => {
            Object::EndpointSlice(source.read::<EndpointSliceManifest>()?.check()?)
        }
        ("networking.k8s.io/v1", "ServiceCIDR") => {
            Object::ServiceCidr(source.read::<ServiceCidrManifest>()?.check()?)
        }
        _ => {
            let known = |(version, kinds): &(&str, &[&str])| {
                *version == api_version && kinds.contains(&kind)
            };
            if PASSED_OVER.iter().any(known) {
                return Ok(None);
            }
            let reason = format!("unknown apiVersion '{api_version}' and kind '{kind}'");
            return Err(reason.into());
        }
    };
    Ok(Some(object))
}

#[cfg(test)]
mod tests {
    use skein_dataplane::snapshot::PortProtocol;

    use super::*;

    const NODE: &str = "\
apiVersion: v1
kind: Node
metadata:
  name: node1
spec:
  podCIDR: 10.1.0.0/24
  podCIDRs: [10.1.0.0/24, 'fd00:1::/64']
status:
  addresses:
  - {type: Hostname, address: node1}
  - {type: InternalIP, address: 192.168.0.1}
  - type: InternalIP
    address: fd01::1
";

    const POD: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, uid: u1, labels: {app: web, n: \"1\"}}
spec:
  nodeName: node1
  containers:
  - {name: c, image: i}
status: {phase: Running, podIPs: [{ip: 10.1.0.5}, {ip: 'fd00:1::5'}]}
";

    fn one(text: &str) -> Object {
        parse(text).unwrap().pop().unwrap().1
    }

    #[test]
    fn objects_are_read() {
        let Object::Node(node) = one(NODE) else {
            panic!("no node")
        };
        assert_eq!(node.pod_cidrs.len(), 2);
        assert_eq!(node.internal_ips.len(), 2);
        let Object::Pod(pod) = one(POD) else {
            panic!("no pod")
        };
        assert_eq!(pod.key.to_string(), "shop/web");
        assert_eq!(pod.service_account, "default");
        assert_eq!(pod.ips.len(), 2);
        assert_eq!(pod.labels["n"], "1");
        let text = "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop, labels: {a: b}}\n";
        let Object::Namespace(namespace) = one(text) else {
            panic!("no namespace")
        };
        assert_eq!(namespace.labels["kubernetes.io/metadata.name"], "shop");
        assert_eq!(namespace.labels["a"], "b");
    }

    #[test]
    fn ports_have_the_names_that_the_pods_containers_give_them() {
        let text = "\
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  initContainers:
  - {name: early, ports: [{name: early, containerPort: 1}]}
  - name: sidecar
    restartPolicy: Always
    ports: [{name: http, containerPort: 8081}, {name: side, containerPort: 9}]
  containers:
  - name: c
    ports:
    - {name: http, containerPort: 8080}
    - {name: http, containerPort: 8443, protocol: UDP}
    - {containerPort: 99}
";
        let Object::Pod(pod) = one(text) else {
            panic!("no pod")
        };
        let named = |protocol, name: &str| (protocol, name.to_owned());
        let expected = [
            (named(PortProtocol::Tcp, "http"), 8080),
            (named(PortProtocol::Tcp, "side"), 9),
            (named(PortProtocol::Udp, "http"), 8443),
        ];
        assert_eq!(pod.named_ports, expected.into());
        let bad = text.replace("protocol: UDP", "protocol: GRE");
        assert!(parse(&bad).unwrap_err()[0].reason.contains("'GRE'"));
    }

    #[test]
    fn services_are_read_with_the_apis_defaults() {
        let Object::Service(service) = one("\
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  clusterIP: 10.96.0.10
  sessionAffinity: ClientIP
  ports: [{port: 80, targetPort: http}]
")
        else {
            panic!("no service")
        };
        assert_eq!(service.key.to_string(), "default/web");
        assert_eq!(service.affinity_seconds, Some(10_800));
        assert!(!service.internal_local && !service.external_local && !service.headless);
        assert_eq!(service.ports[0].protocol.number(), 6);
        let Object::EndpointSlice(slice) = one("\
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}, {name: all}]
endpoints:
- addresses: [10.1.0.5]
  targetRef: {kind: Pod, name: web}
- {addresses: [10.1.0.6], conditions: {ready: false, terminating: true}}
")
        else {
            panic!("no slice")
        };
        assert_eq!(slice.service.unwrap().to_string(), "shop/web");
        assert_eq!(slice.ports.len(), 1);
        let conditions: Vec<_> = (slice.endpoints.iter())
            .map(|one| (one.ready, one.serving, one.terminating))
            .collect();
        assert_eq!(conditions, [(true, true, false), (false, false, true)]);
        let pod = slice.endpoints[0].pod.as_ref().unwrap();
        assert_eq!(pod.to_string(), "shop/web");
    }

    #[test]
    fn what_no_service_can_be_is_a_fault_with_its_reason() {
        let spec = |spec: &str| {
            format!("apiVersion: v1\nkind: Service\nmetadata: {{name: web}}\nspec: {spec}\n")
        };
        let slice = |rest: &str| {
            format!(
                "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: a}}\n{rest}\n"
            )
        };
        let cases = [
            (spec("{type: Cluster}"), "spec.type: 'Cluster' is none of"),
            (spec("{clusterIP: x}"), "'x' is no IP address"),
            (
                spec("{clusterIPs: [10.0.0.1, 10.0.0.2]}"),
                "one address of each family",
            ),
            (spec("{ports: [{port: 0}]}"), "0 is no port"),
            (spec("{ports: [{port: 65536}]}"), ""),
            (spec("{ports: [{port: 1}, {port: 2}]}"), "needs a name"),
            (
                spec("{ports: [{name: a, port: 1}, {name: b, port: 1}]}"),
                "TCP 1 stands twice",
            ),
            (
                spec("{ports: [{port: 1, protocol: tcp}]}"),
                "'tcp' is none of TCP, UDP, SCTP",
            ),
            (spec("{sessionAffinity: Client}"), "none of None, ClientIP"),
            (
                spec(
                    "{sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 0}}}",
                ),
                "0 is not between 1 and 86400",
            ),
            (
                spec("{externalTrafficPolicy: local}"),
                "none of Cluster, Local",
            ),
            (
                spec("{loadBalancerSourceRanges: [10.0.0.0]}"),
                "no range of addresses",
            ),
            (spec("{trafficDistribution: Near}"), "none of PreferClose"),
            (slice("addressType: IPv5"), "addressType: 'IPv5'"),
            (slice("ports: []"), "addressType"),
            (
                slice("addressType: IPv4\nendpoints: [{addresses: ['fd00::1']}]"),
                "not of the addressType",
            ),
            (
                slice("addressType: IPv4\nendpoints: [{addresses: []}]"),
                "without an address",
            ),
            (
                "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: a}\n\
                 spec: {cidrs: [10.96.0.1/16]}\n"
                    .into(),
                "10.96.0.0/16",
            ),
        ];
        for (text, reason) in cases {
            let faults = parse(&text).unwrap_err();
            assert!(faults[0].reason.contains(reason), "{text}: {faults:?}");
        }
    }

    #[test]
    fn json_and_lists_and_many_documents_are_read() {
        let json = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}"#;
        let list = format!(
            "apiVersion: v1\nkind: List\nitems:\n- {json}\n- {{apiVersion: v1, kind: Secret}}\n"
        );
        let text = format!("# head\n---\n{NODE}---\n\n---\n{POD}...\n---\n{list}--- {json}\n");
        let objects = parse(&text).unwrap();
        let lines: Vec<_> = objects.iter().map(|(line, _)| *line).collect();
        assert_eq!(objects.len(), 4);
        assert_eq!(lines[0], 2);
        let keys: Vec<_> = objects
            .iter()
            .map(|(_, object)| object.key().to_string())
            .collect();
        assert_eq!(
            keys,
            [
                "Node node1",
                "Pod shop/web",
                "Pod default/p",
                "Pod default/p"
            ]
        );
    }

    #[test]
    fn kinds_that_kubernetes_knows_are_passed_over() {
        let text = "apiVersion: apps/v1\nkind: Deployment\nspec: {anything: [1, 2]}\n";
        assert_eq!(parse(text).unwrap(), vec![]);
        assert_eq!(parse("").unwrap(), vec![]);
        assert_eq!(parse("# nothing\n---\n# still\n").unwrap(), vec![]);
    }

    #[test]
    fn each_fault_has_its_line_and_reason() {
        let cases = [
            (
                "apiVersion: v1\nkind: Pdo\nmetadata: {name: a}\n",
                1,
                "kind 'Pdo'",
            ),
            (
                "apiVersion: v2\nkind: Pod\nmetadata: {name: a}\n",
                1,
                "'v2'",
            ),
            ("kind: Pod\n", 1, "apiVersion or kind is missing"),
            (
                "apiVersion: v1\nkind: Pod\nmetadata: {}\n",
                1,
                "metadata.name is missing",
            ),
            ("apiVersion: v1\nkind: Pod\n", 2, "metadata"),
            ("apiVersion: v1\nkind: Pod\nmetadata:\n  name: [a]\n", 4, ""),
            (
                "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n  b: {\n",
                4,
                "",
            ),
            (
                "apiVersion: v1\nkind: Pod\nmetadata: {name: A_b}\n",
                1,
                "no Kubernetes name",
            ),
            (
                "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nstatus: {podIP: x}\n",
                1,
                "'x' is no IP address",
            ),
            (
                "apiVersion: v1\nkind: Node\nmetadata: {name: a}\nspec: {podCIDR: 10.0.0.1/8}\n",
                1,
                "10.0.0.0/8",
            ),
            (
                "apiVersion: v1\nkind: Node\nmetadata: {name: a}\nspec: {podCIDRs: [10.0.0.0/8, 10.1.0.0/16]}\n",
                1,
                "overlaps",
            ),
            ("just text\n", 1, ""),
            (
                "apiVersion: v1\nkind: List\nitems: [{kind: Pod}]\n",
                1,
                "item 1: apiVersion",
            ),
        ];
        for (text, line, reason) in cases {
            // The same behind another document: lines count from the file's start.
            let shifted = format!("{NODE}---\n{text}");
            for (text, offset) in [(text.to_owned(), 0), (shifted, 14)] {
                let faults = parse(&text).unwrap_err();
                assert_eq!(faults.len(), 1, "{text}");
                assert!(faults[0].reason.contains(reason), "{text}: {faults:?}");
                // A document's own line is that of its marker where it has one.
                let document_line = if line == 1 && offset > 0 {
                    14
                } else {
                    line + offset
                };
                let near = faults[0].line.abs_diff(document_line) <= 1;
                assert!(near, "{text}: line {line}+{offset}: {faults:?}");
            }
        }
    }

    #[test]
    fn aliases_that_unfold_without_bound_are_refused() {
        let mut text =
            String::from("apiVersion: v1\nkind: Pod\nmetadata: {name: a}\na0: &a0 [x]\n");
        for level in 1..40 {
            let below = format!("*a{}", level - 1);
            text += &format!("a{level}: &a{level} [{below}, {below}, {below}, {below}]\n");
        }
        assert!(parse(&text).is_err());
    }

    proptest::proptest! {
        #[test]
        fn no_text_panics(text in "(?s).{0,200}") {
            let _ = parse(&text);
        }

        #[test]
        fn no_near_manifest_panics(cut in 0usize..400, put in "[-:{}\\[\\]\\n\"' &*a]{0,6}") {
            let mut text = format!("{NODE}---\n{POD}");
            let at = cut.min(text.len());
            text.insert_str(at, &put);
            let _ = parse(&text);
        }
    }
}

//! NetworkPolicy as manifests write it → as control knows it.
//!
//! What the API server would refuse is refused here too, since with source `directory` there is
//! no API server before us; and its defaults are filled in. A range with bits set behind its
//! prefix is taken, as the API server takes it.

use std::net::IpAddr;

use serde::Deserialize;
use skein_dataplane::snapshot::PortProtocol;

use super::objects::Metadata;
use crate::cidr::Cidr;
use crate::policy::{
    NetworkPolicy, Operator, Peer, PolicyKey, Port, PortNumber, Requirement, Rule, Selector,
};
use crate::state::Labels;

#[derive(Deserialize)]
pub(super) struct PolicyManifest {
    metadata: Metadata,
    #[serde(default)]
    spec: Option<PolicySpec>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PolicySpec {
    pod_selector: Option<LabelSelector>,
    policy_types: Option<Vec<String>>,
    ingress: Option<Vec<IngressRule>>,
    egress: Option<Vec<EgressRule>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct IngressRule {
    from: Option<Vec<PolicyPeer>>,
    ports: Option<Vec<PolicyPort>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct EgressRule {
    to: Option<Vec<PolicyPeer>>,
    ports: Option<Vec<PolicyPort>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PolicyPeer {
    #[serde(default)]
    pod_selector: Option<LabelSelector>,
    #[serde(default)]
    namespace_selector: Option<LabelSelector>,
    #[serde(default)]
    ip_block: Option<IpBlock>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct IpBlock {
    cidr: String,
    except: Option<Vec<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PolicyPort {
    protocol: Option<String>,
    port: Option<NumberOrName>,
    end_port: Option<i64>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum NumberOrName {
    Number(i64),
    Name(String),
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct LabelSelector {
    match_labels: Option<Labels>,
    match_expressions: Option<Vec<Expression>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Expression {
    key: String,
    operator: String,
    values: Option<Vec<String>>,
}

impl PolicyManifest {
    pub(super) fn check(self) -> Result<NetworkPolicy, String> {
        let key = PolicyKey {
            name: self.metadata.named()?,
            namespace: self.metadata.in_namespace(),
        };
        let spec = self.spec.unwrap_or_default();
        let pods = selector("spec.podSelector", spec.pod_selector.unwrap_or_default())?;
        let ingress = (spec.ingress.unwrap_or_default().into_iter().enumerate())
            .map(|(index, rule)| {
                check_rule(
                    &format!("spec.ingress[{index}]"),
                    "from",
                    rule.from,
                    rule.ports,
                )
            })
            .collect::<Result<Vec<_>, _>>()?;
        let egress = (spec.egress.unwrap_or_default().into_iter().enumerate())
            .map(|(index, rule)| {
                check_rule(&format!("spec.egress[{index}]"), "to", rule.to, rule.ports)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let types = spec.policy_types.unwrap_or_default();
        if types.len() > 2 {
            return Err("spec.policyTypes: at most Ingress and Egress".into());
        }
        if let Some(other) = types
            .iter()
            .find(|name| *name != "Ingress" && *name != "Egress")
        {
            return Err(format!(
                "spec.policyTypes: '{other}' is neither Ingress nor Egress"
            ));
        }
        // Without types a policy is always about ingress, and about egress where it has rules.
        let is_about = |name: &str, default: bool| match types.as_slice() {
            [] => default,
            types => types.iter().any(|of| of == name),
        };
        let about_egress = is_about("Egress", !egress.is_empty());
        Ok(NetworkPolicy {
            key,
            pods,
            ingress: is_about("Ingress", true).then_some(ingress),
            egress: about_egress.then_some(egress),
        })
    }
}

fn check_rule(
    field: &str,
    peers_field: &str,
    peers: Option<Vec<PolicyPeer>>,
    ports: Option<Vec<PolicyPort>>,
) -> Result<Rule, String> {
    let peers = (peers.unwrap_or_default().into_iter().enumerate())
        .map(|(index, peer)| check_peer(&format!("{field}.{peers_field}[{index}]"), peer))
        .collect::<Result<_, _>>()?;
    let ports = (ports.unwrap_or_default().into_iter().enumerate())
        .map(|(index, port)| check_port(&format!("{field}.ports[{index}]"), port))
        .collect::<Result<_, _>>()?;
    Ok(Rule { peers, ports })
}

fn check_peer(field: &str, peer: PolicyPeer) -> Result<Peer, String> {
    match (peer.namespace_selector, peer.pod_selector, peer.ip_block) {
        (None, None, None) => Err(format!(
            "{field}: names no peer; write a podSelector, a namespaceSelector or an ipBlock"
        )),
        (None, None, Some(block)) => check_block(&format!("{field}.ipBlock"), &block),
        (_, _, Some(_)) => Err(format!(
            "{field}: an ipBlock stands alone, without podSelector or namespaceSelector"
        )),
        (namespaces, pods, None) => Ok(Peer::Pods {
            namespaces: (namespaces)
                .map(|found| selector(&format!("{field}.namespaceSelector"), found))
                .transpose()?,
            pods: pods
                .map(|found| selector(&format!("{field}.podSelector"), found))
                .transpose()?,
        }),
    }
}

fn check_block(field: &str, block: &IpBlock) -> Result<Peer, String> {
    if block.cidr.is_empty() {
        return Err(format!("{field}.cidr is missing"));
    }
    let range = cidr(&format!("{field}.cidr"), &block.cidr)?;
    let mut except = Vec::new();
    for (index, text) in block.except.iter().flatten().enumerate() {
        let field = format!("{field}.except[{index}]");
        let hole = cidr(&field, text)?;
        if hole.prefix() <= range.prefix() || !range.contains(hole.address()) {
            return Err(format!("{field}: {hole} is no part of {range}"));
        }
        except.push(hole);
    }
    Ok(Peer::Block { range, except })
}

fn cidr(field: &str, text: &str) -> Result<Cidr, String> {
    let fault = || format!("{field}: '{text}' is not a range like 10.0.0.0/24 or fd00::/64");
    let (address, bits) = text.split_once('/').ok_or_else(fault)?;
    let address: IpAddr = address.parse().map_err(|_| fault())?;
    let bits = bits.parse().map_err(|_| fault())?;
    Cidr::containing(address, bits).ok_or_else(fault)
}

fn check_port(field: &str, port: PolicyPort) -> Result<Port, String> {
    let protocol = protocol(&format!("{field}.protocol"), port.protocol.as_deref())?;
    let checked = |field: &str, number: i64| {
        (u16::try_from(number).ok().filter(|&number| number != 0))
            .ok_or_else(|| format!("{field}: {number} is not between 1 and 65535"))
    };
    let number = match (port.port, port.end_port) {
        (None, None) => PortNumber::Every,
        (None, Some(_)) => return Err(format!("{field}.endPort: only beside a port")),
        (Some(NumberOrName::Name(_)), Some(_)) => {
            return Err(format!("{field}.endPort: only beside a port's number"));
        }
        (Some(NumberOrName::Name(name)), None) => {
            port_name(&format!("{field}.port"), &name)?;
            PortNumber::Named(name)
        }
        (Some(NumberOrName::Number(first)), last) => {
            let first = checked(&format!("{field}.port"), first)?;
            let field = format!("{field}.endPort");
            let last = last.map_or(Ok(first), |last| checked(&field, last))?;
            if last < first {
                return Err(format!("{field}: {last} is below port {first}"));
            }
            PortNumber::Range(first, last)
        }
    };
    Ok(Port { protocol, number })
}

/// A protocol that has ports; TCP when a manifest leaves it out.
pub(super) fn protocol(field: &str, text: Option<&str>) -> Result<PortProtocol, String> {
    match text {
        None | Some("" | "TCP") => Ok(PortProtocol::Tcp),
        Some("UDP") => Ok(PortProtocol::Udp),
        Some("SCTP") => Ok(PortProtocol::Sctp),
        Some(other) => Err(format!("{field}: '{other}' is none of TCP, UDP, SCTP")),
    }
}

/// Checks the name of a port (RFC 6335 section 5.1): at most 15 lower-case letters, digits and
/// single hyphens within, at least one letter.
fn port_name(field: &str, name: &str) -> Result<(), String> {
    let valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let ok = !name.is_empty()
        && name.len() <= 15
        && name.chars().all(valid)
        && name.chars().any(|c| c.is_ascii_lowercase())
        && !name.starts_with('-')
        && !name.ends_with('-')
        && !name.contains("--");
    if ok {
        Ok(())
    } else {
        Err(format!(
            "{field}: '{name}' is neither a number nor a port's name"
        ))
    }
}

fn selector(field: &str, found: LabelSelector) -> Result<Selector, String> {
    let mut requirements = Vec::new();
    for (label, value) in found.match_labels.unwrap_or_default() {
        let field = format!("{field}.matchLabels");
        label_name(&field, &label)?;
        label_value(&field, &value)?;
        let operator = Operator::In([value].into());
        requirements.push(Requirement { label, operator });
    }
    let expressions = found.match_expressions.unwrap_or_default();
    for (index, expression) in expressions.into_iter().enumerate() {
        let field = format!("{field}.matchExpressions[{index}]");
        label_name(&format!("{field}.key"), &expression.key)?;
        let values = expression.values.unwrap_or_default();
        let some = !values.is_empty();
        for value in &values {
            label_value(&format!("{field}.values"), value)?;
        }
        let operator = match (expression.operator.as_str(), some) {
            ("In", true) => Operator::In(values.into_iter().collect()),
            ("NotIn", true) => Operator::NotIn(values.into_iter().collect()),
            ("Exists", false) => Operator::Exists,
            ("DoesNotExist", false) => Operator::DoesNotExist,
            ("In" | "NotIn", false) => {
                return Err(format!(
                    "{field}.values: {} needs some",
                    expression.operator
                ));
            }
            ("Exists" | "DoesNotExist", true) => {
                return Err(format!(
                    "{field}.values: {} takes none",
                    expression.operator
                ));
            }
            (other, _) => {
                return Err(format!(
                    "{field}.operator: '{other}' is none of In, NotIn, Exists, DoesNotExist"
                ));
            }
        };
        requirements.push(Requirement {
            label: expression.key,
            operator,
        });
    }
    Ok(Selector::new(requirements))
}

/// Whether it is what a label's name (behind its prefix) and value consist of.
fn is_label_text(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    text.len() <= 63
        && text.chars().all(inner)
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.ends_with(|c: char| c.is_ascii_alphanumeric())
}

fn label_name(field: &str, name: &str) -> Result<(), String> {
    let (prefix, short) = match name.split_once('/') {
        Some((prefix, short)) => (Some(prefix), short),
        None => (None, name),
    };
    let domain = |prefix: &str| {
        let valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let part = |part: &str| {
            let ends = !part.starts_with('-') && !part.ends_with('-');
            !part.is_empty() && ends && part.chars().all(valid)
        };
        prefix.len() <= 253 && prefix.split('.').all(part)
    };
    if is_label_text(short) && prefix.is_none_or(domain) {
        Ok(())
    } else {
        Err(format!("{field}: '{name}' is no label's name"))
    }
}

fn label_value(field: &str, value: &str) -> Result<(), String> {
    if value.is_empty() || is_label_text(value) {
        Ok(())
    } else {
        Err(format!("{field}: '{value}' is no label's value"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::manifest::parse;
    use super::*;
    use crate::state::Object;

    const HEAD: &str = "\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: shop}
";

    fn read(spec: &str) -> Result<NetworkPolicy, String> {
        let mut objects =
            parse(&format!("{HEAD}spec: {spec}\n")).map_err(|faults| faults[0].reason.clone())?;
        match objects.pop() {
            Some((_, Object::NetworkPolicy(policy))) => Ok(policy),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_policy_is_read_whole() {
        let spec = "
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Ingress, Egress]
  ingress:
  - from:
    - podSelector: {matchExpressions: [{key: tier, operator: NotIn, values: [a]}]}
      namespaceSelector: {}
    - ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16]}
    ports:
    - {port: http}
    - {protocol: SCTP, port: 80, endPort: 90}
    - {protocol: UDP}
";
        let policy = read(spec).unwrap();
        assert_eq!(policy.key.to_string(), "shop/web");
        assert_eq!(policy.pods.to_string(), "app=web");
        let [rule] = policy
            .rules(skein_dataplane::policy::Side::Ingress)
            .unwrap()
        else {
            panic!("one rule");
        };
        let ports: Vec<_> = rule.ports.iter().map(ToString::to_string).collect();
        assert_eq!(ports, ["TCP 'http'", "SCTP 80-90", "UDP"]);
        let Peer::Pods {
            namespaces: Some(namespaces),
            pods: Some(pods),
        } = &rule.peers[0]
        else {
            panic!("both selectors");
        };
        assert_eq!(*namespaces, Selector::default());
        assert_eq!(pods.to_string(), "tier not in (a)");
        let expected = Peer::Block {
            range: "10.0.0.0/8".parse().unwrap(),
            except: vec!["10.1.0.0/16".parse().unwrap()],
        };
        assert_eq!(rule.peers[1], expected);
        assert_eq!(policy.egress, Some(vec![]));
    }

    #[test]
    fn what_is_absent_has_the_defaults_of_the_api() {
        let about = |spec: &str| {
            let policy = read(spec).unwrap();
            (policy.ingress.is_some(), policy.egress.is_some())
        };
        assert_eq!(about("{podSelector: {}}"), (true, false));
        assert_eq!(about("{podSelector: {}, policyTypes: []}"), (true, false));
        assert_eq!(about("{podSelector: {}, egress: []}"), (true, false));
        assert_eq!(about("{podSelector: {}, egress: [{}]}"), (true, true));
        assert_eq!(about("{policyTypes: [Egress]}"), (false, true));
        // Rules of a direction that the policy is not about are passed over.
        let spec = "{policyTypes: [Egress], ingress: [{}]}";
        assert_eq!(about(spec), (false, true));
        let policy = read("{ingress: [{from: [], ports: []}, {}]}").unwrap();
        assert_eq!(policy.ingress, Some(vec![Rule::default(), Rule::default()]));
        // The API server takes ranges with bits behind the prefix, and masks them.
        let policy = read("{ingress: [{from: [{ipBlock: {cidr: 10.1.2.3/8}}]}]}").unwrap();
        let Some([Rule { peers, .. }]) = policy.ingress.as_deref() else {
            panic!("one rule");
        };
        assert!(
            matches!(&peers[0], Peer::Block { range, .. } if range.to_string() == "10.0.0.0/8")
        );
        let alone = parse(HEAD).unwrap();
        assert_eq!(
            alone.len(),
            1,
            "a policy without spec isolates its namespace"
        );
    }

    #[test]
    fn what_the_api_server_refuses_is_refused() {
        let from = |peer: &str| format!("{{ingress: [{{from: [{peer}]}}]}}");
        let ports = |port: &str| format!("{{egress: [{{}}, {{ports: [{port}]}}]}}");
        let selector = |selector: &str| format!("{{podSelector: {selector}}}");
        let cases = [
            (from("{}"), "spec.ingress[0].from[0]: names no peer"),
            (
                from("{podSelector: {}, ipBlock: {cidr: 10.0.0.0/8}}"),
                "an ipBlock stands alone",
            ),
            (from("{ipBlock: {}}"), "cidr is missing"),
            (
                from("{ipBlock: {cidr: 10.0.0.1}}"),
                "'10.0.0.1' is not a range",
            ),
            (
                from("{ipBlock: {cidr: 10.0.0.0/8, except: [10.0.0.0/8]}}"),
                "except[0]: 10.0.0.0/8 is no part of 10.0.0.0/8",
            ),
            (
                from("{ipBlock: {cidr: 10.0.0.0/8, except: ['fd00::/64']}}"),
                "is no part of",
            ),
            (ports("{port: 0}"), "spec.egress[1].ports[0].port: 0 is not"),
            (ports("{port: 65536}"), "65536 is not between"),
            (ports("{port: '80'}"), "'80' is neither a number nor"),
            (ports("{port: Http}"), "'Http' is neither"),
            (ports("{port: a-name-too-long-1}"), "is neither"),
            (ports("{port: a--b}"), "is neither"),
            (ports("{endPort: 80}"), "endPort: only beside a port"),
            (
                ports("{port: http, endPort: 80}"),
                "only beside a port's number",
            ),
            (ports("{port: 80, endPort: 79}"), "79 is below port 80"),
            (ports("{protocol: ICMP}"), "'ICMP' is none of TCP"),
            ("{policyTypes: [ingress]}".into(), "'ingress' is neither"),
            (
                "{policyTypes: [Ingress, Egress, Egress]}".into(),
                "at most Ingress and Egress",
            ),
            (
                selector("{matchLabels: {'a b': c}}"),
                "spec.podSelector.matchLabels: 'a b' is no label's name",
            ),
            (
                selector("{matchLabels: {a: 'b c'}}"),
                "'b c' is no label's value",
            ),
            (selector("{matchLabels: {'-/a': c}}"), "is no label's name"),
            (
                selector("{matchExpressions: [{key: a, operator: In}]}"),
                "matchExpressions[0].values: In needs some",
            ),
            (
                selector("{matchExpressions: [{key: a, operator: Exists, values: [b]}]}"),
                "Exists takes none",
            ),
            (
                selector("{matchExpressions: [{key: a, operator: Gt, values: ['1']}]}"),
                "'Gt' is none of",
            ),
        ];
        for (spec, reason) in cases {
            let found = read(&spec).expect_err(&spec);
            assert!(found.contains(reason), "{spec}: {found}");
        }
    }
}

//! NetworkPolicy (networking.k8s.io/v1) as control knows it: checked, with every default filled
//! in, so that what reads it need not ask what an absent field means.
//!
//! Deliberately absent: what a policy means for an endpoint, which is [`crate::compile`]'s.

use std::collections::BTreeSet;
use std::fmt;

use skein_dataplane::policy::Side;
use skein_dataplane::snapshot::PortProtocol;

use crate::cidr::Cidr;
use crate::state::Labels;

/// Name of a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PolicyKey {
    /// `metadata.namespace`
    pub namespace: String,
    /// `metadata.name`
    pub name: String,
}

impl fmt::Display for PolicyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkPolicy {
    /// Namespace and name
    pub key: PolicyKey,
    /// `spec.podSelector`: the pods of its namespace that it isolates
    pub pods: Selector,
    /// What those pods may take; `None` when the policy is not about that
    pub ingress: Option<Vec<Rule>>,
    /// What those pods may send; `None` when the policy is not about that
    pub egress: Option<Vec<Rule>>,
}

impl NetworkPolicy {
    /// Its rules in a direction; `None` when it isolates nobody there.
    #[must_use]
    pub fn rules(&self, side: Side) -> Option<&[Rule]> {
        match side {
            Side::Ingress => self.ingress.as_deref(),
            Side::Egress => self.egress.as_deref(),
        }
    }
}

/// What a policy allows: any of these peers on any of these ports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// `from` or `to`; none: everyone
    pub peers: Vec<Peer>,
    /// `ports`; none: every protocol
    pub ports: Vec<Port>,
}

/// Who is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Pods with those labels.
    Pods {
        /// `namespaceSelector`; `None`: the policy's own namespace
        namespaces: Option<Selector>,
        /// `podSelector`; `None`: every pod there
        pods: Option<Selector>,
    },
    /// The addresses of a range.
    Block {
        /// `ipBlock.cidr`
        range: Cidr,
        /// `ipBlock.except`: ranges within it that are not meant
        except: Vec<Cidr>,
    },
}

/// Which port is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// `protocol`
    pub protocol: PortProtocol,
    /// `port` and `endPort`
    pub number: PortNumber,
}

/// How a port is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortNumber {
    /// Not at all: every port of the protocol.
    Every,
    /// From the first to the last, both included.
    Range(u16, u16),
    /// As the pod that takes the packet calls it.
    Named(String),
}

/// Which labels something must have. One without requirements is content with all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector(Vec<Requirement>);

/// One requirement of a selector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// The label's name
    pub label: String,
    /// What must be true of it
    pub operator: Operator,
}

/// What must be true of a label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operator {
    /// It is there and has one of these values.
    In(BTreeSet<String>),
    /// It is not there, or has none of these values.
    NotIn(BTreeSet<String>),
    /// It is there.
    Exists,
    /// It is not there.
    DoesNotExist,
}

impl Selector {
    /// The selector of these requirements, all of which must hold.
    #[must_use]
    pub fn new(requirements: Vec<Requirement>) -> Self {
        Self(requirements)
    }

    /// Whether something with these labels is selected.
    #[must_use]
    pub fn matches(&self, labels: &Labels) -> bool {
        self.0.iter().all(|requirement| {
            let value = labels.get(&requirement.label);
            match &requirement.operator {
                Operator::In(values) => value.is_some_and(|value| values.contains(value)),
                Operator::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
                Operator::Exists => value.is_some(),
                Operator::DoesNotExist => value.is_none(),
            }
        })
    }

    /// The requirements.
    #[must_use]
    pub fn requirements(&self) -> &[Requirement] {
        &self.0
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, requirement) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str(" and ")?;
            }
            write!(f, "{requirement}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |values: &BTreeSet<String>| {
            let values: Vec<_> = values.iter().map(String::as_str).collect();
            values.join(", ")
        };
        let label = &self.label;
        match &self.operator {
            Operator::In(values) if values.len() == 1 => write!(f, "{label}={}", list(values)),
            Operator::In(values) => write!(f, "{label} in ({})", list(values)),
            Operator::NotIn(values) => write!(f, "{label} not in ({})", list(values)),
            Operator::Exists => write!(f, "{label} set"),
            Operator::DoesNotExist => write!(f, "{label} not set"),
        }
    }
}

/// A protocol as manifests write it.
#[must_use]
pub fn protocol_name(protocol: PortProtocol) -> &'static str {
    match protocol {
        PortProtocol::Tcp => "TCP",
        PortProtocol::Udp => "UDP",
        PortProtocol::Sctp => "SCTP",
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(protocol_name(self.protocol))?;
        match &self.number {
            PortNumber::Every => Ok(()),
            PortNumber::Range(first, last) if first == last => write!(f, " {first}"),
            PortNumber::Range(first, last) => write!(f, " {first}-{last}"),
            PortNumber::Named(name) => write!(f, " '{name}'"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(text: &str) -> Labels {
        (text.split_terminator(','))
            .filter_map(|pair| pair.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect()
    }

    #[test]
    fn requirements_hold_as_the_api_says() {
        let values = || BTreeSet::from(["a".to_owned(), "b".to_owned()]);
        let cases = [
            (Operator::In(values()), "x=a", true),
            (Operator::In(values()), "x=c", false),
            (Operator::In(values()), "y=a", false),
            (Operator::NotIn(values()), "x=a", false),
            (Operator::NotIn(values()), "x=c", true),
            (Operator::NotIn(values()), "", true),
            (Operator::Exists, "x=", true),
            (Operator::Exists, "y=", false),
            (Operator::DoesNotExist, "x=c", false),
            (Operator::DoesNotExist, "y=c", true),
        ];
        for (operator, of, expected) in cases {
            let requirement = Requirement {
                label: "x".into(),
                operator,
            };
            let selector = Selector::new(vec![requirement]);
            assert_eq!(selector.matches(&labels(of)), expected, "{selector}: {of}");
        }
        assert!(Selector::default().matches(&labels("")));
    }

    #[test]
    fn selectors_and_ports_read_like_words() {
        let of = |label: &str, operator| Requirement {
            label: label.into(),
            operator,
        };
        let selector = Selector::new(vec![
            of("app", Operator::In(BTreeSet::from(["web".to_owned()]))),
            of(
                "tier",
                Operator::NotIn(BTreeSet::from(["a".to_owned(), "b".to_owned()])),
            ),
            of("old", Operator::DoesNotExist),
        ]);
        assert_eq!(
            selector.to_string(),
            "app=web and tier not in (a, b) and old not set"
        );
        let port = |number| {
            let protocol = PortProtocol::Tcp;
            Port { protocol, number }.to_string()
        };
        assert_eq!(port(PortNumber::Every), "TCP");
        assert_eq!(port(PortNumber::Range(80, 80)), "TCP 80");
        assert_eq!(port(PortNumber::Range(80, 90)), "TCP 80-90");
        assert_eq!(port(PortNumber::Named("http".into())), "TCP 'http'");
    }
}

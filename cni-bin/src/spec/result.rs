//! The result of ADD, and `prevResult`: one form inside, four shapes outside.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{IpPrefix, Version};

/// What an ADD made, or what earlier plugins of a chain made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CniResult {
    /// Interfaces; addresses refer to them by position.
    #[serde(deserialize_with = "null_is_default")]
    pub interfaces: Vec<Interface>,
    /// Addresses.
    #[serde(deserialize_with = "null_is_default")]
    pub ips: Vec<IpConfig>,
    /// Routes.
    #[serde(deserialize_with = "null_is_default")]
    pub routes: Vec<RouteConfig>,
    /// Name servers.
    #[serde(deserialize_with = "null_is_default")]
    pub dns: Dns,
}

/// An interface of a result.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Interface {
    /// Name.
    pub name: String,
    /// Ethernet address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Device MTU in bytes (from 1.1.0).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Namespace path; `None` on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// Socket of a user-space interface (from 1.1.0).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket_path: Option<String>,
    /// PCI device (from 1.1.0).
    #[serde(rename = "pciID", skip_serializing_if = "Option::is_none")]
    pub pci_id: Option<String>,
}

/// An address of a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpConfig {
    /// Address and prefix length.
    pub address: IpPrefix,
    /// Gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
    /// Position of its interface in the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<u32>,
}

/// A route of a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteConfig {
    /// Destination.
    pub dst: IpPrefix,
    /// Next hop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gw: Option<IpAddr>,
    /// Path MTU in bytes (this and the rest from 1.1.0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Largest TCP segment to advertise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advmss: Option<u32>,
    /// Metric.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
    /// Routing table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<u32>,
    /// Scope as the kernel numbers it: 0 universe, 253 link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<u8>,
}

impl RouteConfig {
    /// A route with nothing but its destination and next hop.
    pub fn new(dst: IpPrefix, gw: Option<IpAddr>) -> Self {
        Self {
            dst,
            gw,
            mtu: None,
            advmss: None,
            priority: None,
            table: None,
            scope: None,
        }
    }
}

/// Name servers of a result.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Dns {
    /// Addresses of name servers, best first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,
    /// Local domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Search domains, best first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// Resolver options.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

impl CniResult {
    /// Appends what another plugin of the chain made; its positions move behind ours.
    pub fn append(&mut self, other: Self) {
        let offset = u32::try_from(self.interfaces.len()).unwrap_or(u32::MAX);
        self.interfaces.extend(other.interfaces);
        self.ips.extend(other.ips.into_iter().map(|ip| IpConfig {
            interface: ip.interface.map(|at| at.saturating_add(offset)),
            ..ip
        }));
        self.routes.extend(other.routes);
        if other.dns != Dns::default() {
            self.dns = other.dns;
        }
    }

    /// The JSON of that version of the specification.
    pub fn to_json(&self, version: Version) -> String {
        // Plain strings, numbers and lists: serialising them cannot fail.
        let mut document = serde_json::to_value(self).unwrap_or_default();
        document["cniVersion"] = version.as_str().into();
        for ip in list(&mut document, "ips") {
            if version < Version::V1_0_0 {
                let is_v6 = ip["address"]
                    .as_str()
                    .is_some_and(|text| text.contains(':'));
                ip["version"] = if is_v6 { "6" } else { "4" }.into();
            }
        }
        if version < Version::V1_1_0 {
            for interface in list(&mut document, "interfaces") {
                remove(interface, &["mtu", "socketPath", "pciID"]);
            }
            for route in list(&mut document, "routes") {
                remove(route, &["mtu", "advmss", "priority", "table", "scope"]);
            }
        }
        document.to_string()
    }
}

fn list<'a>(document: &'a mut Value, key: &str) -> impl Iterator<Item = &'a mut Value> {
    document
        .get_mut(key)
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
}

fn remove(object: &mut Value, keys: &[&str]) {
    if let Some(map) = object.as_object_mut() {
        for key in keys {
            map.remove(*key);
        }
    }
}

/// Go writes an empty list as `null`.
fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> CniResult {
        CniResult {
            interfaces: vec![Interface {
                name: "eth0".into(),
                mac: Some("02:00:00:00:00:02".into()),
                mtu: Some(65535),
                sandbox: Some("/run/netns/a".into()),
                ..Interface::default()
            }],
            ips: vec![
                IpConfig {
                    address: "10.0.0.2/32".parse().unwrap(),
                    gateway: Some("169.254.1.1".parse().unwrap()),
                    interface: Some(0),
                },
                IpConfig {
                    address: "fd00::2/128".parse().unwrap(),
                    gateway: Some("fe80::1".parse().unwrap()),
                    interface: Some(0),
                },
            ],
            routes: vec![RouteConfig {
                mtu: Some(1450),
                ..RouteConfig::new(
                    "0.0.0.0/0".parse().unwrap(),
                    Some("169.254.1.1".parse().unwrap()),
                )
            }],
            dns: Dns::default(),
        }
    }

    #[test]
    fn golden_by_version() {
        let old = |version: &str| {
            format!(
                "{}{version}{}",
                r#"{"cniVersion":""#,
                concat!(
                    r#"","dns":{},"interfaces":[{"mac":"02:00:00:00:00:02","name":"eth0","#,
                    r#""sandbox":"/run/netns/a"}],"ips":[{"address":"10.0.0.2/32","#,
                    r#""gateway":"169.254.1.1","interface":0,"version":"4"},"#,
                    r#"{"address":"fd00::2/128","gateway":"fe80::1","interface":0,"#,
                    r#""version":"6"}],"routes":[{"dst":"0.0.0.0/0","gw":"169.254.1.1"}]}"#
                )
            )
        };
        assert_eq!(sample().to_json(Version::V0_3_1), old("0.3.1"));
        assert_eq!(sample().to_json(Version::V0_4_0), old("0.4.0"));
        assert_eq!(
            sample().to_json(Version::V1_0_0),
            old("1.0.0")
                .replace(r#","version":"4""#, "")
                .replace(r#","version":"6""#, "")
        );
        assert_eq!(
            sample().to_json(Version::V1_1_0),
            concat!(
                r#"{"cniVersion":"1.1.0","dns":{},"interfaces":[{"mac":"02:00:00:00:00:02","#,
                r#""mtu":65535,"name":"eth0","sandbox":"/run/netns/a"}],"#,
                r#""ips":[{"address":"10.0.0.2/32","gateway":"169.254.1.1","interface":0},"#,
                r#"{"address":"fd00::2/128","gateway":"fe80::1","interface":0}],"#,
                r#""routes":[{"dst":"0.0.0.0/0","gw":"169.254.1.1","mtu":1450}]}"#
            )
        );
    }

    #[test]
    fn a_result_of_any_version_reads_back() {
        for version in Version::ALL {
            let back: CniResult = serde_json::from_str(&sample().to_json(version)).unwrap();
            assert_eq!(back.ips, sample().ips);
            assert_eq!(back.interfaces.len(), 1);
        }
        let nulls =
            r#"{"cniVersion":"1.0.0","interfaces":null,"ips":null,"routes":null,"dns":null}"#;
        assert_eq!(
            serde_json::from_str::<CniResult>(nulls).unwrap(),
            CniResult::default()
        );
    }

    #[test]
    fn appending_moves_positions() {
        let mut chain = sample();
        chain.append(sample());
        assert_eq!(chain.interfaces.len(), 2);
        let positions: Vec<_> = chain.ips.iter().map(|ip| ip.interface).collect();
        assert_eq!(positions, [Some(0), Some(0), Some(1), Some(1)]);
    }
}

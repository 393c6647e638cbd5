//! The network configuration that a runtime writes to standard input.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use serde::Deserialize;
use serde_json::Value;

use super::{CniError, CniResult, Dns, IpPrefix, Version, code};
use crate::agent::{Attachment, DEFAULT_SOCKET};
use crate::mac::MacAddr;

/// The MTUs that a network configuration may ask for: IPv6 needs 1280 (RFC 8200 §5), a
/// device takes 65535.
const MTU_RANGE: std::ops::RangeInclusive<u32> = 1280..=65535;

/// The longest path of a unix socket: `sun_path` with its NUL.
const SOCKET_PATH_BYTES: usize = 107;

/// A checked network configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct NetConf {
    /// Version of the specification to answer in.
    pub version: Version,
    /// The network's name.
    pub name: String,
    /// The agent's socket.
    pub socket: PathBuf,
    /// Where to write a line for each call.
    pub log_file: Option<PathBuf>,
    /// Name of the IPAM plugin; `None`: the agent's own pool.
    pub ipam: Option<String>,
    /// MTU of the pod's routes, bytes; `None`: the agent's choice.
    pub mtu: Option<u32>,
    /// What the runtime adds for this container, by capability.
    pub runtime: RuntimeConfig,
    /// Capabilities that the configuration declares.
    pub capabilities: BTreeMap<String, bool>,
    /// Name servers that the result shall name.
    pub dns: Dns,
    /// Result of the plugins before in the chain, or of ADD.
    pub prev_result: Option<CniResult>,
    /// GC: what the runtime still has; `None` where it says nothing.
    pub valid_attachments: Option<Vec<Attachment>>,
}

/// `runtimeConfig`, checked. Port mappings and bandwidth are read and checked here for every
/// caller, but it is the agent that acts on them, from the Pod itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeConfig {
    /// Addresses that the container shall have.
    pub ips: Vec<IpAddr>,
    /// The Ethernet address that it shall have.
    pub mac: Option<MacAddr>,
    /// Host ports to forward.
    pub port_mappings: Vec<PortMapping>,
    /// Limits of its rate.
    pub bandwidth: Option<Bandwidth>,
}

/// One host port forwarded to the container.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PortMapping {
    /// Port on the host.
    pub host_port: u16,
    /// Port in the container.
    pub container_port: u16,
    /// `tcp`, `udp` or `sctp`.
    #[serde(default = "tcp")]
    pub protocol: String,
    /// Host address; empty for all.
    #[serde(default, rename = "hostIP")]
    pub host_ip: String,
}

/// Rate limits; 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Bandwidth {
    /// Into the container, bits a second.
    pub ingress_rate: u64,
    /// Into the container, bits.
    pub ingress_burst: u64,
    /// Out of the container, bits a second.
    pub egress_rate: u64,
    /// Out of the container, bits.
    pub egress_burst: u64,
}

/// The document as it stands; `null` counts as absent, unknown keys are others' business.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawConf {
    name: Option<String>,
    socket: Option<PathBuf>,
    log_file: Option<PathBuf>,
    ipam: Option<Value>,
    mtu: Option<u32>,
    runtime_config: Option<RawRuntime>,
    capabilities: Option<BTreeMap<String, bool>>,
    dns: Option<Dns>,
    prev_result: Option<CniResult>,
    #[serde(rename = "cni.dev/valid-attachments")]
    valid_attachments: Option<Vec<RawAttachment>>,
    /// The same under the name that early 1.1 runtimes use.
    #[serde(rename = "cni.dev/attachments")]
    attachments: Option<Vec<RawAttachment>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawRuntime {
    ips: Option<Vec<String>>,
    mac: Option<String>,
    port_mappings: Option<Vec<PortMapping>>,
    bandwidth: Option<Bandwidth>,
}

#[derive(Deserialize)]
struct RawAttachment {
    #[serde(rename = "containerID")]
    container_id: String,
    ifname: String,
}

/// The part that is read before anything else, for the version to answer in.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct OnlyVersion {
    cni_version: Option<String>,
}

impl NetConf {
    /// The `cniVersion` of a document, whatever else it holds.
    pub fn version_of(document: &[u8]) -> Result<Option<String>, CniError> {
        let only: OnlyVersion = serde_json::from_slice(document).map_err(|e| decoding(&e))?;
        Ok(only.cni_version)
    }

    /// Reads and checks a document.
    pub fn parse(document: &[u8]) -> Result<Self, CniError> {
        let version = Version::negotiate(Self::version_of(document)?.as_deref())?;
        let raw: RawConf = serde_json::from_slice(document).map_err(|e| decoding(&e))?;
        let name = raw.name.unwrap_or_default();
        if !is_identifier(&name) {
            return Err(invalid(
                &format!("name {name:?}"),
                "a network name is letters, digits, '_', '.' and '-', a letter or digit first",
            ));
        }
        let socket = raw.socket.unwrap_or_else(|| DEFAULT_SOCKET.into());
        if !socket.is_absolute() || socket.as_os_str().len() > SOCKET_PATH_BYTES {
            return Err(invalid(
                &format!("socket {}", socket.display()),
                "it is an absolute path of at most 107 bytes",
            ));
        }
        if let Some(path) = raw.log_file.as_ref().filter(|path| !path.is_absolute()) {
            return Err(invalid(
                &format!("logFile {}", path.display()),
                "it is an absolute path",
            ));
        }
        let mtu = raw.mtu.filter(|mtu| *mtu != 0);
        if let Some(mtu) = mtu.filter(|mtu| !MTU_RANGE.contains(mtu)) {
            return Err(invalid(
                &format!("mtu {mtu}"),
                "it lies between 1280 and 65535, or is 0 for the agent's choice",
            ));
        }
        Ok(Self {
            version,
            name,
            socket,
            log_file: raw.log_file,
            ipam: raw
                .ipam
                .filter(|ipam| !is_empty_object(ipam))
                .map(|ipam| check_ipam(&ipam))
                .transpose()?,
            mtu,
            runtime: raw
                .runtime_config
                .map(RuntimeConfig::check)
                .transpose()?
                .unwrap_or_default(),
            capabilities: raw.capabilities.unwrap_or_default(),
            dns: raw.dns.unwrap_or_default(),
            prev_result: raw.prev_result,
            valid_attachments: raw
                .valid_attachments
                .or(raw.attachments)
                .map(check_attachments)
                .transpose()?,
        })
    }

    /// Reads only what DEL needs. A configuration that ADD refuses must not keep a container
    /// from being removed.
    pub fn parse_for_removal(document: &[u8]) -> Result<Self, CniError> {
        const NEEDED: [&str; 5] = ["cniVersion", "name", "socket", "logFile", "ipam"];
        let mut document: BTreeMap<String, Value> =
            serde_json::from_slice(document).map_err(|e| decoding(&e))?;
        document.retain(|key, value| {
            // An IPAM plugin that could never be run has given no addresses.
            NEEDED.contains(&key.as_str()) && (key != "ipam" || check_ipam(value).is_ok())
        });
        let document = serde_json::to_vec(&document).map_err(|e| decoding(&e))?;
        Self::parse(&document)
    }
}

impl RuntimeConfig {
    fn check(raw: RawRuntime) -> Result<Self, CniError> {
        let mut ips = Vec::new();
        for text in raw.ips.unwrap_or_default() {
            // With or without a prefix length: both occur, and pods have host addresses.
            let ip = text
                .parse()
                .or_else(|_| text.parse().map(IpPrefix::ip))
                .map_err(|e| invalid(&format!("runtimeConfig.ips {text:?}"), &e.to_string()))?;
            if ips.contains(&ip) {
                let what = format!("runtimeConfig.ips {text:?}");
                return Err(invalid(&what, "it stands there twice"));
            }
            ips.push(ip);
        }
        let mac = raw
            .mac
            .filter(|text| !text.is_empty())
            .map(|text| check_mac(&text))
            .transpose()?;
        let port_mappings = raw.port_mappings.unwrap_or_default();
        for mapping in &port_mappings {
            check_port_mapping(mapping)?;
        }
        Ok(Self {
            ips,
            mac,
            port_mappings,
            bandwidth: raw.bandwidth,
        })
    }
}

/// The name of the IPAM plugin: a file's, no path's.
fn check_ipam(ipam: &Value) -> Result<String, CniError> {
    let name = ipam["type"].as_str().unwrap_or_default();
    if !is_identifier(name) {
        return Err(invalid(
            &format!("ipam {ipam}"),
            "ipam.type is the name of a plugin in CNI_PATH; \
             without ipam the Skein agent gives pods their addresses",
        ));
    }
    Ok(name.to_owned())
}

fn check_mac(text: &str) -> Result<MacAddr, CniError> {
    let what = format!("runtimeConfig.mac {text:?}");
    let mac: MacAddr = text
        .parse()
        .map_err(|e: crate::mac::InvalidMac| invalid(&what, &e.to_string()))?;
    if !mac.is_station() {
        return Err(invalid(&what, "an interface needs a unicast address"));
    }
    Ok(mac)
}

fn check_port_mapping(mapping: &PortMapping) -> Result<(), CniError> {
    let what = format!("runtimeConfig.portMappings {mapping:?}");
    let protocol = mapping.protocol.to_ascii_lowercase();
    if !matches!(protocol.as_str(), "tcp" | "udp" | "sctp") {
        return Err(invalid(&what, "the protocol is tcp, udp or sctp"));
    }
    if mapping.host_port == 0 || mapping.container_port == 0 {
        return Err(invalid(&what, "ports are 1 to 65535"));
    }
    if !mapping.host_ip.is_empty() && mapping.host_ip.parse::<IpAddr>().is_err() {
        return Err(invalid(&what, "hostIP is an IP address"));
    }
    Ok(())
}

fn check_attachments(raw: Vec<RawAttachment>) -> Result<Vec<Attachment>, CniError> {
    raw.into_iter()
        .map(|raw| {
            if !is_identifier(&raw.container_id) || raw.ifname.is_empty() {
                let what = format!(
                    "cni.dev/valid-attachments {:?}, {:?}",
                    raw.container_id, raw.ifname
                );
                return Err(invalid(&what, "a containerID and an ifname are needed"));
            }
            Ok(Attachment {
                container_id: raw.container_id,
                ifname: raw.ifname,
            })
        })
        .collect()
}

/// The specification's rule for network names and container ids.
pub(crate) fn is_identifier(text: &str) -> bool {
    text.bytes()
        .next()
        .is_some_and(|b| b.is_ascii_alphanumeric())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

fn is_empty_object(value: &Value) -> bool {
    value.as_object().is_some_and(serde_json::Map::is_empty)
}

fn tcp() -> String {
    "tcp".to_owned()
}

fn decoding(error: &serde_json::Error) -> CniError {
    CniError::new(
        code::DECODING_FAILURE,
        "the network configuration on standard input cannot be read",
        error.to_string(),
    )
}

fn invalid(what: &str, why: &str) -> CniError {
    CniError::new(
        code::INVALID_CONFIG,
        format!("bad network configuration: {what}"),
        why,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(document: &Value) -> Result<NetConf, CniError> {
        NetConf::parse(document.to_string().as_bytes())
    }

    fn with(key: &str, value: Value) -> Value {
        let mut document = json!({"cniVersion": "1.1.0", "name": "skein", "type": "skein-cni"});
        document[key] = value;
        document
    }

    #[test]
    fn a_full_document_is_read() {
        let conf = parse(&json!({
            "cniVersion": "1.1.0", "name": "skein", "type": "skein-cni",
            "socket": "/run/other.sock", "logFile": "/var/log/skein-cni.log", "mtu": 1400,
            "capabilities": {"ips": true, "portMappings": true}, "ipam": {},
            "runtimeConfig": {
                "ips": ["10.1.2.3/24", "fd00::3"], "mac": "02:00:00:00:00:07",
                "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "udp"}],
                "bandwidth": {"ingressRate": 1000, "ingressBurst": 10}
            },
            "prevResult": {"cniVersion": "1.1.0", "ips": [{"address": "192.0.2.1/24"}]},
            "cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth0"}],
            "args": {"cni": {}}, "somebodyElses": [1, 2]
        }))
        .unwrap();
        assert_eq!(conf.version, Version::V1_1_0);
        assert_eq!(conf.socket, PathBuf::from("/run/other.sock"));
        assert_eq!(conf.mtu, Some(1400));
        assert_eq!(conf.ipam, None);
        assert_eq!(conf.runtime.ips.len(), 2);
        assert_eq!(conf.runtime.port_mappings[0].container_port, 80);
        assert_eq!(conf.runtime.bandwidth.unwrap().ingress_rate, 1000);
        assert_eq!(conf.prev_result.unwrap().ips.len(), 1);
        assert_eq!(conf.valid_attachments.unwrap()[0].container_id, "c1");
    }

    #[test]
    fn a_bare_document_has_defaults() {
        let conf = parse(&with("ipam", Value::Null)).unwrap();
        assert_eq!(conf.socket, PathBuf::from(DEFAULT_SOCKET));
        assert_eq!((conf.mtu, conf.log_file, conf.ipam), (None, None, None));
        assert_eq!(conf.runtime, RuntimeConfig::default());
    }

    #[test]
    fn bad_values_are_named() {
        for (key, value) in [
            ("name", json!("")),
            ("name", json!("../x")),
            ("socket", json!("run/skein.sock")),
            ("socket", json!(format!("/{}", "x".repeat(107)))),
            ("logFile", json!("skein.log")),
            ("mtu", json!(1279)),
            ("mtu", json!(65536)),
            ("runtimeConfig", json!({"ips": ["10.0.0.300"]})),
            ("runtimeConfig", json!({"ips": ["10.0.0.3", "10.0.0.3/24"]})),
            ("runtimeConfig", json!({"mac": "01:00:00:00:00:07"})),
            (
                "runtimeConfig",
                json!({"portMappings": [{"hostPort": 0, "containerPort": 1}]}),
            ),
            (
                "runtimeConfig",
                json!({"portMappings": [
                {"hostPort": 1, "containerPort": 1, "protocol": "icmp"}]}),
            ),
            (
                "cni.dev/valid-attachments",
                json!([{"containerID": "", "ifname": "eth0"}]),
            ),
        ] {
            let error = parse(&with(key, value.clone())).unwrap_err();
            assert_eq!(error.code, code::INVALID_CONFIG, "{key}: {value}");
            assert!(error.msg.contains(key), "{key} is not in: {}", error.msg);
        }
    }

    #[test]
    fn what_is_no_configuration_is_a_decoding_failure() {
        for document in ["", "{", "[]", "7", r#"{"cniVersion": 1}"#] {
            let error = NetConf::parse(document.as_bytes()).unwrap_err();
            assert_eq!(error.code, code::DECODING_FAILURE, "{document}");
        }
        let error = parse(&with("mtu", json!("large"))).unwrap_err();
        assert_eq!(error.code, code::DECODING_FAILURE);
    }

    #[test]
    fn removal_reads_past_what_add_refuses() {
        let document = with("mtu", json!(1)).to_string();
        assert!(NetConf::parse(document.as_bytes()).is_err());
        let conf = NetConf::parse_for_removal(document.as_bytes()).unwrap();
        assert_eq!(conf.mtu, None);
    }
}

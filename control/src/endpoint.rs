//! This node's endpoints: names, addresses, and the records that a restarted agent reads.
//!
//! An ADD reserves ([`Endpoints::reserve`]), then attaches ([`Endpoints::attach`]): only the
//! second leaves a record. What was reserved and never attached is given back when its
//! connection ends, or when the agent starts again. Deliberately absent: sockets and tables.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use skein_cni::agent::{AgentError, Attachment, PodRef, Reservation};

use crate::durable;
use crate::ipam::{Ipam, IpamError};
use crate::mac::{self, MacAddr, fnv1a64};
use crate::state::Endpoint;

/// CNI error codes; 100 to 109 are the plugin's own.
pub mod code {
    /// Try again later.
    pub const TRY_AGAIN: u32 = 11;
    /// STATUS: no ADD can succeed now.
    pub const NOT_READY: u32 = 50;
    /// The request contradicts itself or what stands.
    pub const REFUSED: u32 = 110;
    /// No address is left, or the one asked for is taken.
    pub const ADDRESS: u32 = 111;
    /// The state directory cannot be written.
    pub const STATE: u32 = 112;
    /// The datapath could not take the link.
    pub const DATAPATH: u32 = 113;
    /// There is no such endpoint.
    pub const UNKNOWN: u32 = 114;
}

/// Offloads of the pod's end that are turned off: all but the last would hand the datapath
/// segments merged into one frame, the last packets without their checksum.
pub(crate) const DISABLE_FEATURES: &[&str] = &[
    "tx-tcp-segmentation",
    "tx-tcp-ecn-segmentation",
    "tx-tcp-mangleid-segmentation",
    "tx-tcp6-segmentation",
    "tx-udp-segmentation",
    "tx-udp_tnl-segmentation",
    "tx-udp_tnl-csum-segmentation",
    "tx-sctp-segmentation",
    "tx-gso-list",
    // SCTP's CRC32c covers the whole packet; the pod's kernel computes it as cheaply as anyone.
    "tx-checksum-sctp",
];

/// The offload that leaves a packet's checksum to the interface: veth has no other.
const CHECKSUM_FEATURE: &str = "tx-checksum-ip-generic";

/// The device MTU that lets every IP packet cross in one piece, in bytes. What a pod sends by
/// itself is as large as its routes say, which is the path's MTU.
const LARGE_MTU: u32 = 65_535;

/// An error of the agent, with its CNI code.
#[must_use]
pub fn agent_error(code: u32, msg: impl Into<String>, details: impl Into<String>) -> AgentError {
    AgentError {
        code,
        msg: msg.into(),
        details: details.into(),
    }
}

impl From<IpamError> for AgentError {
    fn from(error: IpamError) -> Self {
        let code = match error {
            IpamError::NoRange => code::TRY_AGAIN,
            IpamError::Io { .. } | IpamError::Damaged { .. } => code::STATE,
            IpamError::Exhausted { .. } | IpamError::InUse { .. } | IpamError::Unusable { .. } => {
                code::ADDRESS
            }
        };
        agent_error(code, "no address for the pod", error.to_string())
    }
}

/// What the first half of an ADD asks for.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Container and interface.
    pub attachment: Attachment,
    /// The CNI network's name.
    pub network: String,
    /// Path of the network namespace.
    pub netns: String,
    /// The pod, where the runtime names one.
    pub pod: Option<PodRef>,
    /// Addresses; empty: chosen here.
    pub ips: Vec<IpAddr>,
    /// The MAC of the pod's end.
    pub mac: Option<String>,
    /// The route MTU, in bytes.
    pub mtu: Option<u32>,
}

/// What an interface shall be like, as the node and the pod would have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The largest IP packet that crosses to every peer, in bytes.
    pub path_mtu: u32,
    /// Frames of up to 64 KiB cross the interface in one piece.
    pub large_frames: bool,
    /// The pod's kernel computes checksums itself.
    pub full_checksums: bool,
}

/// Why records could not be read.
#[derive(Debug, thiserror::Error)]
pub enum EndpointsError {
    /// The addresses.
    #[error(transparent)]
    Ipam(#[from] IpamError),
    /// The records.
    #[error("endpoint records {path}: {source}")]
    Io {
        /// The folder or file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// The endpoints of this node.
#[derive(Debug)]
pub struct Endpoints {
    folder: PathBuf,
    ipam: Ipam,
    endpoints: BTreeMap<Attachment, Endpoint>,
    damaged: Vec<String>,
}

impl Endpoints {
    /// Reads what an earlier agent left in the state directory. Addresses without a record were
    /// reserved by an ADD that never ended: they are given back.
    pub fn open(state_directory: &Path) -> Result<Self, EndpointsError> {
        let folder = state_directory.join("endpoints");
        let fault = |path: &Path, source| EndpointsError::Io {
            path: path.to_owned(),
            source,
        };
        fs::create_dir_all(&folder).map_err(|source| fault(&folder, source))?;
        let mut endpoints = BTreeMap::new();
        let mut damaged = Vec::new();
        for entry in fs::read_dir(&folder).map_err(|source| fault(&folder, source))? {
            let path = entry.map_err(|source| fault(&folder, source))?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let bytes = fs::read(&path).map_err(|source| fault(&path, source))?;
            match serde_json::from_slice::<Endpoint>(&bytes) {
                Ok(endpoint) => {
                    endpoints.insert(endpoint.attachment.clone(), endpoint);
                }
                Err(error) => damaged.push(format!("{}: {error}", path.display())),
            }
        }
        let mut ipam = Ipam::open(state_directory)?;
        let unfinished: Vec<_> = (ipam.holders())
            .filter(|holder| !endpoints.contains_key(holder))
            .cloned()
            .collect();
        // A record that cannot be read still holds its addresses: better none free than one
        // twice.
        if damaged.is_empty() {
            for attachment in unfinished {
                ipam.release(&attachment)?;
            }
        }
        Ok(Self {
            folder,
            ipam,
            endpoints,
            damaged,
        })
    }

    /// Records that could not be read, each with its reason.
    #[must_use]
    pub fn damaged(&self) -> &[String] {
        &self.damaged
    }

    /// The node's addresses.
    pub fn ipam(&mut self) -> &mut Ipam {
        &mut self.ipam
    }

    /// All endpoints, those between the halves of an ADD included.
    pub fn iter(&self) -> impl Iterator<Item = &Endpoint> {
        self.endpoints.values()
    }

    /// An endpoint.
    #[must_use]
    pub fn find(&self, attachment: &Attachment) -> Option<&Endpoint> {
        self.endpoints.get(attachment)
    }

    /// Reserves addresses and names. The same attachment again gets the same ones.
    pub fn reserve(&mut self, wanted: Wanted, shape: Shape) -> Result<&Endpoint, AgentError> {
        let refused = |details: String| agent_error(code::REFUSED, "ADD refused", details);
        let Attachment {
            container_id,
            ifname,
        } = &wanted.attachment;
        if container_id.is_empty() || ifname.is_empty() || wanted.netns.is_empty() {
            let details = "container id, interface name and network namespace must be given";
            return Err(refused(details.into()));
        }
        let hash = |what: &str| {
            let texts = [container_id.as_str(), ifname.as_str(), what];
            fnv1a64(texts.into_iter().flat_map(|text| text.bytes().chain([0])))
        };
        // Fifteen bytes are the longest name (IFNAMSIZ less its end); 52 bits of hash.
        let host_ifname = format!("sk{:013x}", hash("name") >> 12);
        let clash = self.endpoints.values().find(|other| {
            other.host_ifname == host_ifname && other.attachment != wanted.attachment
        });
        if let Some(other) = clash {
            let other = &other.attachment.container_id;
            return Err(refused(format!(
                "host device name {host_ifname} belongs to container {other}"
            )));
        }
        let pod_mac = match &wanted.mac {
            None => mac::from_hash(hash("pod")),
            Some(text) => text
                .parse::<MacAddr>()
                .ok()
                .filter(|mac| !mac.is_multicast() && *mac != MacAddr::ZERO)
                .ok_or_else(|| refused(format!("'{text}' is no MAC address of one station")))?,
        };
        let route_mtu = match wanted.mtu {
            None => shape.path_mtu,
            Some(mtu) if (1280..=shape.path_mtu).contains(&mtu) => mtu,
            Some(mtu) => {
                let path_mtu = shape.path_mtu;
                return Err(refused(format!(
                    "MTU {mtu} is not between 1280 and the path's {path_mtu}"
                )));
            }
        };
        let ips = self.ipam.allocate(&wanted.attachment, &wanted.ips)?;
        let endpoint = Endpoint {
            attachment: wanted.attachment.clone(),
            network: wanted.network,
            netns: wanted.netns,
            pod: wanted.pod,
            ips,
            host_ifname,
            pod_mac,
            host_mac: mac::from_hash(hash("host")),
            device_mtu: if shape.large_frames {
                LARGE_MTU
            } else {
                route_mtu
            },
            route_mtu,
            full_checksums: shape.full_checksums,
            queues: 1,
            ifindex: None,
        };
        self.endpoints.insert(wanted.attachment.clone(), endpoint);
        Ok(&self.endpoints[&wanted.attachment])
    }

    /// Notes the veth's host end, and writes the record.
    pub fn attach(
        &mut self,
        attachment: &Attachment,
        ifindex: u32,
    ) -> Result<&Endpoint, AgentError> {
        let path = self.record_of(attachment)?;
        let Some(endpoint) = self.endpoints.get_mut(attachment) else {
            return Err(unknown(attachment));
        };
        endpoint.ifindex = Some(ifindex);
        serde_json::to_vec_pretty(endpoint)
            .map_err(io::Error::other)
            .and_then(|bytes| durable::write(&path, &bytes))
            .map_err(|error| record_error(&path, &error))?;
        Ok(endpoint)
    }

    /// Removes an endpoint and gives its addresses back; one that is not there is no fault.
    pub fn release(&mut self, attachment: &Attachment) -> Result<Option<Endpoint>, AgentError> {
        if self.endpoints.contains_key(attachment) {
            let path = self.record_of(attachment)?;
            durable::remove(&path).map_err(|error| record_error(&path, &error))?;
        }
        self.ipam.release(attachment)?;
        Ok(self.endpoints.remove(attachment))
    }

    fn record_of(&self, attachment: &Attachment) -> Result<PathBuf, AgentError> {
        let endpoint = self.find(attachment).ok_or_else(|| unknown(attachment))?;
        Ok(self.folder.join(format!("{}.json", endpoint.host_ifname)))
    }
}

fn record_error(path: &Path, error: &io::Error) -> AgentError {
    let details = format!("{}: {error}", path.display());
    agent_error(
        code::STATE,
        "the endpoint's record cannot be written",
        details,
    )
}

/// There is no such endpoint.
#[must_use]
pub fn unknown(attachment: &Attachment) -> AgentError {
    let Attachment {
        container_id,
        ifname,
    } = attachment;
    let msg = format!("no endpoint for container {container_id} interface {ifname}");
    agent_error(code::UNKNOWN, msg, "it was never added, or is deleted")
}

/// What the plugin needs to make the interface.
#[must_use]
pub fn reservation(endpoint: &Endpoint) -> Reservation {
    Reservation {
        host_ifname: endpoint.host_ifname.clone(),
        pod_mac: endpoint.pod_mac.to_string(),
        host_mac: endpoint.host_mac.to_string(),
        ips: endpoint.ips.clone(),
        device_mtu: endpoint.device_mtu,
        route_mtu: endpoint.route_mtu,
        disable_features: (DISABLE_FEATURES.iter())
            .chain(endpoint.full_checksums.then_some(&CHECKSUM_FEATURE))
            .map(|name| (*name).to_owned())
            .collect(),
        queues: endpoint.queues,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        path_mtu: 1450,
        large_frames: false,
        full_checksums: false,
    };

    fn wanted(container: &str) -> Wanted {
        Wanted {
            attachment: Attachment {
                container_id: container.into(),
                ifname: "eth0".into(),
            },
            network: "skein".into(),
            netns: "/run/netns/x".into(),
            pod: None,
            ips: vec![],
            mac: None,
            mtu: None,
        }
    }

    fn open(folder: &Path) -> Endpoints {
        let mut endpoints = Endpoints::open(folder).unwrap();
        endpoints
            .ipam()
            .set_ranges(&["10.1.0.0/24".parse().unwrap()]);
        endpoints
    }

    #[test]
    fn names_and_addresses_follow_the_attachment() {
        let folder = tempfile::tempdir().unwrap();
        let mut endpoints = open(folder.path());
        let one = endpoints.reserve(wanted("one"), SHAPE).unwrap().clone();
        let two = endpoints.reserve(wanted("two"), SHAPE).unwrap().clone();
        assert_eq!(one.host_ifname.len(), 15);
        assert!(one.host_ifname.starts_with("sk"));
        let macs = [one.pod_mac, one.host_mac, two.pod_mac, two.host_mac];
        for (index, mac) in macs.iter().enumerate() {
            assert!(!macs[..index].contains(mac));
        }
        assert_ne!(one.host_ifname, two.host_ifname);
        let again = endpoints.reserve(wanted("one"), SHAPE).unwrap();
        assert_eq!(*again, one);
        assert_eq!(reservation(&one).device_mtu, 1450);
    }

    #[test]
    fn the_interface_has_the_shape_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let mut endpoints = open(folder.path());
        let plain = reservation(endpoints.reserve(wanted("plain"), SHAPE).unwrap());
        assert_eq!((plain.device_mtu, plain.route_mtu), (1450, 1450));
        assert_eq!(plain.disable_features, DISABLE_FEATURES);
        let shape = Shape {
            large_frames: true,
            full_checksums: true,
            ..SHAPE
        };
        let mut narrow = wanted("large");
        narrow.mtu = Some(1400);
        let large = reservation(endpoints.reserve(narrow, shape).unwrap());
        assert_eq!((large.device_mtu, large.route_mtu), (65_535, 1400));
        let more = &large.disable_features[DISABLE_FEATURES.len()..];
        assert_eq!(more, [CHECKSUM_FEATURE]);
    }

    #[test]
    fn what_was_attached_survives_and_what_was_not_is_given_back() {
        let folder = tempfile::tempdir().unwrap();
        let mut endpoints = open(folder.path());
        endpoints.reserve(wanted("kept"), SHAPE).unwrap();
        let kept = endpoints
            .attach(&wanted("kept").attachment, 7)
            .unwrap()
            .clone();
        endpoints.reserve(wanted("lost"), SHAPE).unwrap();
        drop(endpoints);
        let mut endpoints = open(folder.path());
        assert_eq!(endpoints.iter().collect::<Vec<_>>(), [&kept]);
        assert_eq!(endpoints.ipam().usage(true).used, 1);
        assert!(endpoints.release(&kept.attachment).unwrap().is_some());
        assert!(endpoints.release(&kept.attachment).unwrap().is_none());
        drop(endpoints);
        assert_eq!(open(folder.path()).iter().count(), 0);
    }

    #[test]
    fn a_damaged_record_keeps_its_addresses() {
        let folder = tempfile::tempdir().unwrap();
        let mut endpoints = open(folder.path());
        endpoints.reserve(wanted("one"), SHAPE).unwrap();
        let one = endpoints.attach(&wanted("one").attachment, 7).unwrap();
        let record = folder
            .path()
            .join(format!("endpoints/{}.json", one.host_ifname));
        fs::write(&record, "{").unwrap();
        let mut endpoints = open(folder.path());
        assert_eq!(endpoints.damaged().len(), 1);
        assert_eq!(endpoints.ipam().usage(true).used, 1);
    }

    type Change = fn(&mut Wanted);

    #[test]
    fn contradictions_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut endpoints = open(folder.path());
        let cases: [(&str, Change); 5] = [
            ("must be given", |w| w.netns.clear()),
            ("no MAC address", |w| {
                w.mac = Some("01:00:00:00:00:00".into());
            }),
            ("no MAC address", |w| w.mac = Some("x".into())),
            ("MTU 9000 is not between", |w| w.mtu = Some(9000)),
            ("MTU 500 is not between", |w| w.mtu = Some(500)),
        ];
        for (reason, change) in cases {
            let mut wanted = wanted("one");
            change(&mut wanted);
            let error = endpoints.reserve(wanted, SHAPE).unwrap_err();
            assert_eq!(error.code, code::REFUSED);
            assert!(error.to_string().contains(reason), "{error}");
        }
        assert_eq!(endpoints.ipam().usage(true).used, 0);
        let mut chosen = wanted("one");
        chosen.mac = Some("02:00:00:00:00:07".into());
        chosen.ips = vec!["10.1.0.9".parse().unwrap()];
        chosen.mtu = Some(1400);
        let endpoint = endpoints.reserve(chosen, SHAPE).unwrap();
        assert_eq!(endpoint.pod_mac.to_string(), "02:00:00:00:00:07");
        assert_eq!(endpoint.route_mtu, 1400);
        assert!(endpoints.attach(&wanted("none").attachment, 1).is_err());
    }
}

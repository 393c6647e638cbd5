//! What the CNI plugin, `skeinctl` and the node agent say to each other.
//!
//! One unix socket, one request and one reply at a time on a connection. A message is a
//! four-byte big-endian length and that many bytes of JSON. The caller sets a deadline; the
//! agent never keeps state for a connection, except an ADD between its two halves (below).
//!
//! An ADD has two halves, since only the plugin stands in the pod's network namespace and only
//! the agent holds the datapath:
//!
//! ```text
//! plugin                                   agent
//!   Add{container, ifname, pod}      ─▶      reserve addresses
//!   ◀─ Reserved{addresses, MACs, MTU}
//!   (makes the veth, addresses, routes)
//!   Attach{container, ifname, ifindex} ─▶    XDP program, AF_XDP socket, host end up,
//!                                            tables published and seen by every worker
//!   ◀─ Attached
//! ```
//!
//! If the connection ends between the halves, the agent gives the addresses back.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The agent's socket where no configuration names another.
pub const DEFAULT_SOCKET: &str = "/run/skein/skein.sock";

/// The largest request that the agent reads, in bytes.
pub const MAX_REQUEST_BYTES: u32 = 1 << 20;

/// The largest reply that a client reads, in bytes: the tables of a large cluster.
pub const MAX_REPLY_BYTES: u32 = 256 << 20;

/// The pod's IPv4 gateway, answered by the datapath itself.
pub const GATEWAY_V4: std::net::Ipv4Addr = std::net::Ipv4Addr::new(169, 254, 1, 1);

/// The pod's IPv6 gateway, answered by the datapath itself.
pub const GATEWAY_V6: std::net::Ipv6Addr = std::net::Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// One interface of one container: the key of everything that an ADD makes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Attachment {
    /// The runtime's container (sandbox) id.
    pub container_id: String,
    /// The interface's name inside the container.
    pub ifname: String,
}

/// The Kubernetes pod that a container belongs to, from `CNI_ARGS`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PodRef {
    /// `K8S_POD_NAMESPACE`
    pub namespace: String,
    /// `K8S_POD_NAME`
    pub name: String,
    /// `K8S_POD_UID`; empty where an old runtime leaves it out.
    #[serde(default)]
    pub uid: String,
}

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// First half of CNI ADD: reserve addresses and names.
    Add {
        /// The interface to make.
        attachment: Attachment,
        /// The CNI network's name.
        network: String,
        /// The container's network namespace, a path.
        netns: String,
        /// The pod, where the runtime names one.
        pod: Option<PodRef>,
        /// Addresses that an IPAM plugin or `runtimeConfig.ips` chose; empty: the agent chooses.
        #[serde(default)]
        ips: Vec<IpAddr>,
        /// A MAC that `runtimeConfig.mac` asks for.
        #[serde(default)]
        mac: Option<String>,
        /// The route MTU that the network configuration asks for.
        #[serde(default)]
        mtu: Option<u32>,
    },
    /// Second half of CNI ADD: the veth stands; connect it and wait for the workers.
    Attach {
        /// The interface of the first half.
        attachment: Attachment,
        /// Index of the host end of the veth.
        ifindex: u32,
    },
    /// CNI DEL: idempotent, succeeds for what the agent has never heard of.
    Del {
        /// The interface to remove.
        attachment: Attachment,
    },
    /// CNI CHECK: the endpoint as the agent knows it.
    Check {
        /// The interface to look up.
        attachment: Attachment,
    },
    /// CNI GC: remove every attachment of a network that is not listed.
    Gc {
        /// The CNI network's name.
        network: String,
        /// What the runtime still has.
        valid: Vec<Attachment>,
    },
    /// CNI STATUS: can an ADD succeed now?
    Status,
    /// A question of `skeinctl`; the reply is a JSON document of that view.
    View {
        /// `status`, `endpoints`, `ipcache`, `drops`, `workers`, …
        name: String,
    },
    /// The same, of a view that takes arguments.
    Ask {
        /// `conntrack`, `flows`, `trace`
        name: String,
        /// By name.
        #[serde(default)]
        arguments: BTreeMap<String, String>,
    },
}

/// What the agent answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// Answer to `Add` and `Check`.
    Reserved(Reservation),
    /// Answer to `Attach`: every worker forwards for this pod now.
    Attached,
    /// Answer to `Del`, `Gc` and `Status`: done, or able.
    Done,
    /// Answer to `View`.
    View {
        /// The document; its field names are in `docs/reference.md`.
        document: serde_json::Value,
    },
    /// It did not work.
    Error(AgentError),
}

/// What the agent reserved for an interface: all that the plugin needs to make it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reservation {
    /// Name of the host end of the veth.
    pub host_ifname: String,
    /// MAC of the pod's end, `aa:bb:cc:dd:ee:ff`.
    pub pod_mac: String,
    /// MAC of the host end: what the pod takes for its gateway's.
    pub host_mac: String,
    /// The pod's addresses, each a host route (/32 or /128).
    pub ips: Vec<IpAddr>,
    /// MTU of the veth device, both ends.
    pub device_mtu: u32,
    /// MTU of the pod's routes: the path's.
    pub route_mtu: u32,
    /// Offloads of the pod's end to turn off, by their `ethtool -k` kernel names.
    pub disable_features: Vec<String>,
    /// RX and TX queues of the veth.
    pub queues: u32,
}

/// An error with the code that the CNI specification gives it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{msg}{}", if details.is_empty() { String::new() } else { format!(": {details}") })]
pub struct AgentError {
    /// CNI error code: 11 try again later, 50 and 51 for STATUS, 100 and above ours.
    pub code: u32,
    /// What happened, to what.
    pub msg: String,
    /// The cause, and what to do.
    #[serde(default)]
    pub details: String,
}

/// Why a call to the agent gave no reply.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// Nobody listens: the agent is down or still starting.
    #[error("the Skein agent does not answer on {socket}: {source}; is skeind running?")]
    Connect {
        /// The socket's path.
        socket: String,
        /// What connect said.
        source: io::Error,
    },
    /// The connection broke or the deadline passed.
    #[error("the connection to the Skein agent on {socket} failed: {source}")]
    Io {
        /// The socket's path.
        socket: String,
        /// What read or write said.
        source: io::Error,
    },
}

/// A client's connection to the agent.
pub struct Client {
    stream: UnixStream,
    socket: String,
}

impl Client {
    /// Connects to the agent; every later read and write ends after `deadline`.
    pub fn connect(socket: &Path, deadline: Duration) -> Result<Self, CallError> {
        let name = socket.display().to_string();
        let stream = UnixStream::connect(socket)
            .and_then(|stream| {
                stream.set_read_timeout(Some(deadline))?;
                stream.set_write_timeout(Some(deadline))?;
                Ok(stream)
            })
            .map_err(|source| CallError::Connect {
                socket: name.clone(),
                source,
            })?;
        Ok(Self {
            stream,
            socket: name,
        })
    }

    /// Sends one request and waits for its reply.
    pub fn call(&mut self, request: &Request) -> Result<Reply, CallError> {
        write_message(&mut self.stream, request)
            .and_then(|()| read_message(&mut self.stream, MAX_REPLY_BYTES))
            .map_err(|source| CallError::Io {
                socket: self.socket.clone(),
                source,
            })
    }
}

/// Writes one framed message.
pub fn write_message<T: Serialize>(writer: &mut impl Write, message: &T) -> io::Result<()> {
    let body = serde_json::to_vec(message)?;
    let length = u32::try_from(body.len())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "message above 4 GiB"))?;
    writer.write_all(&length.to_be_bytes())?;
    writer.write_all(&body)?;
    writer.flush()
}

/// Reads one framed message of at most `limit` bytes.
pub fn read_message<T: DeserializeOwned>(reader: &mut impl Read, limit: u32) -> io::Result<T> {
    let mut header = [0; 4];
    reader.read_exact(&mut header)?;
    let length = u32::from_be_bytes(header);
    if length > limit {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("message of {length} bytes, the limit is {limit}"),
        ));
    }
    let mut body = vec![0; length as usize];
    reader.read_exact(&mut body)?;
    serde_json::from_slice(&body).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_survives_the_wire() {
        let request = Request::Del {
            attachment: Attachment {
                container_id: "c1".into(),
                ifname: "eth0".into(),
            },
        };
        let mut wire = Vec::new();
        write_message(&mut wire, &request).unwrap();
        let back: Request = read_message(&mut wire.as_slice(), MAX_REQUEST_BYTES).unwrap();
        assert_eq!(back, request);
    }

    #[test]
    fn a_message_above_the_limit_is_refused_before_it_is_read() {
        let wire = u32::MAX.to_be_bytes();
        let error = read_message::<Request>(&mut wire.as_slice(), MAX_REQUEST_BYTES).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}

//! The agent's configuration: one TOML file, each key overridable from the environment.
//!
//! Every key has a default that works. A variable `SKEIN_<SECTION>_<KEY>` wins over the file;
//! lists are separated by commas there. Unknown keys in the file are faults; unknown variables
//! are not looked at, since Kubernetes itself puts `SKEIN_SERVICE_HOST` and the like into a
//! container beside a Service of that name. Deliberately absent: looking anything up on the
//! machine, except in [`Config::resolve`].

mod check;
mod read;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::cidr::Cidr;
pub use read::{Environment, Fault, variable_of};

/// Features that `debug.disable` takes away, so that tests run every fall-back on one kernel.
pub const FEATURES: &[&str] = &[
    "multi-buffer",
    "tx-metadata",
    "native-xdp",
    "managed-neighbours",
];

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
        pub enum $name {
            $($(#[$variant_doc])* #[serde(rename = $word)] $variant),+
        }
        impl $name {
            const WORDS: &[(&str, Self)] = &[$(($word, Self::$variant)),+];
        }
    };
}

words! {
    /// XDP mode of the uplink.
    UplinkXdpMode {
        /// Native where the driver can, else generic.
        Auto = "auto",
        /// In the driver; refused without it.
        Native = "native",
        /// After the driver, on any device.
        Generic = "generic",
    }
}
words! {
    /// How overlay packets leave and reach the node.
    UplinkIo {
        /// AF_XDP sockets on the uplink.
        Xsk = "xsk",
        /// A kernel UDP socket with segmentation offload.
        Udp = "udp",
    }
}
words! {
    /// Where the cluster's objects come from.
    Source {
        /// The API server.
        Kubernetes = "kubernetes",
        /// A folder of manifests.
        Directory = "directory",
    }
}
words! {
    /// How packets cross between nodes.
    OverlayMode {
        /// VXLAN (RFC 7348).
        Vxlan = "vxlan",
        /// Routed by the network itself.
        Native = "native",
    }
}
words! {
    /// XDP mode of pod veths and of the host link.
    PodXdpMode {
        /// The pod keeps its segmentation offload.
        Generic = "generic",
        /// In the veth driver.
        Native = "native",
    }
}
words! {
    /// How a worker waits for packets.
    PollMode {
        /// Spins while there is work, then sleeps.
        Adaptive = "adaptive",
        /// Never sleeps.
        Busy = "busy",
        /// Sleeps whenever there is nothing to do.
        Interrupt = "interrupt",
    }
}
words! {
    /// Form of the log.
    LogFormat {
        /// A line for people.
        Text = "text",
        /// A JSON object a line.
        Json = "json",
    }
}
words! {
    /// The least important log line that is written.
    LogLevel {
        /// What goes on.
        Info = "info",
        /// What failed.
        Error = "error",
        /// What may fail.
        Warn = "warn",
        /// What it decides and why.
        Debug = "debug",
        /// Everything.
        Trace = "trace",
    }
}

impl LogLevel {
    /// The level's name.
    #[must_use]
    pub fn word(self) -> &'static str {
        Self::WORDS
            .iter()
            .find(|(_, level)| *level == self)
            .map_or("info", |(word, _)| word)
    }
}

/// An inclusive range of ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    /// The first port.
    pub first: u16,
    /// The last port.
    pub last: u16,
}

/// `[node]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Node {
    /// The node's name; empty until [`Config::resolve`] unless configured.
    pub name: String,
}

/// `[uplink]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Uplink {
    /// Devices towards other nodes; empty until [`Config::resolve`] unless configured.
    pub interfaces: Vec<String>,
    /// XDP mode.
    pub xdp_mode: UplinkXdpMode,
    /// How overlay packets leave.
    pub io: UplinkIo,
}

/// `[cluster]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cluster {
    /// Where objects come from.
    pub source: Source,
    /// API servers, `host:port`, tried in turn.
    pub api_servers: Vec<String>,
    /// A kubeconfig file; empty: in-cluster, then `KUBECONFIG`.
    pub kubeconfig: String,
    /// The folder of manifests.
    pub directory: PathBuf,
}

/// `[overlay]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Overlay {
    /// Encapsulation.
    pub mode: OverlayMode,
    /// UDP port.
    pub port: u16,
    /// MTU of the underlay, in bytes; 0: the uplink's.
    pub mtu: u32,
}

/// `[pods]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pods {
    /// MTU of pods' routes, in bytes; 0: the path's.
    pub mtu: u32,
    /// Whether pods send and take TCP frames above the MTU.
    pub large_frames: bool,
    /// XDP mode of pod veths.
    pub xdp_mode: PodXdpMode,
}

/// `[services]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Services {
    /// Whether Skein serves Services.
    pub enabled: bool,
    /// Ports of NodePort Services.
    pub node_port_range: PortRange,
    /// Ranges of Service addresses.
    pub ranges: Vec<Cidr>,
    /// cgroup2 path of host processes; empty: the root.
    pub host_cgroup: String,
}

/// `[masquerade]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Masquerade {
    /// Whether packets that leave the cluster take the node's address.
    pub enabled: bool,
    /// Ranges reached without it.
    pub exclude: Vec<Cidr>,
    /// Source ports.
    pub ports: PortRange,
}

/// `[conntrack]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Conntrack {
    /// The most connections; 0: from memory.
    pub max: u32,
}

/// `[workers]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Workers {
    /// One worker an entry; empty: chosen from the affinity mask.
    pub cpus: Vec<u32>,
    /// How they wait.
    pub poll: PollMode,
}

/// `[api]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Api {
    /// The unix socket of the plugin and of `skeinctl`.
    pub socket: PathBuf,
    /// Where metrics and health are served.
    pub metrics: SocketAddr,
}

/// `[state]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct State {
    /// What a restart picks up.
    pub directory: PathBuf,
}

/// `[log]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Log {
    /// Form.
    pub format: LogFormat,
    /// The least important line written.
    pub level: LogLevel,
}

/// `[debug]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Debug {
    /// Kernel features to do without, of [`FEATURES`].
    pub disable: Vec<String>,
}

/// The whole configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[expect(missing_docs, reason = "each field is documented at its type")]
pub struct Config {
    pub node: Node,
    pub uplink: Uplink,
    pub cluster: Cluster,
    pub overlay: Overlay,
    pub pods: Pods,
    pub services: Services,
    pub masquerade: Masquerade,
    pub conntrack: Conntrack,
    pub workers: Workers,
    pub api: Api,
    pub state: State,
    pub log: Log,
    pub debug: Debug,
}

/// What a configuration needs from the machine.
pub trait Machine {
    /// The host's name.
    fn hostname(&self) -> std::io::Result<String>;
    /// Names of the devices of the default routes, the preferred one first.
    fn default_route_interfaces(&self) -> std::io::Result<Vec<String>>;
}

impl Config {
    /// Reads a file; a file that cannot be read is a fault like any other.
    pub fn load(path: &Path, environment: Environment<'_>) -> Result<Self, Vec<Fault>> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            vec![Fault {
                key: String::new(),
                place: String::new(),
                message: format!("cannot be read: {error}"),
            }]
        })?;
        Self::parse(&text, environment)
    }

    /// Reads a text; all faults at once.
    pub fn parse(text: &str, environment: Environment<'_>) -> Result<Self, Vec<Fault>> {
        check::parse(text, environment)
    }

    /// Finds the node's name and uplink where they are not configured.
    pub fn resolve(
        &mut self,
        environment: Environment<'_>,
        machine: &dyn Machine,
    ) -> Result<(), Vec<Fault>> {
        let mut faults = Vec::new();
        let mut fault = |key: &str, message: String| {
            faults.push(Fault {
                key: key.to_owned(),
                place: String::new(),
                message,
            });
        };
        if self.node.name.is_empty() {
            let name = match environment("NODE_NAME").filter(|name| !name.is_empty()) {
                Some(name) => Ok(name),
                None => machine.hostname(),
            };
            match name {
                Ok(name) if check::is_dns_name(&name) => self.node.name = name,
                Ok(name) => fault(
                    "node.name",
                    format!("the host's name '{name}' is no Kubernetes node name; set this key"),
                ),
                Err(error) => fault(
                    "node.name",
                    format!("the host's name cannot be read ({error}); set this key"),
                ),
            }
        }
        if self.uplink.interfaces.is_empty() {
            match machine.default_route_interfaces() {
                Ok(interfaces) if !interfaces.is_empty() => {
                    self.uplink.interfaces = interfaces.into_iter().take(1).collect();
                }
                Ok(_) => fault(
                    "uplink.interfaces",
                    "there is no default route to find the uplink by; name the device".to_owned(),
                ),
                Err(error) => fault(
                    "uplink.interfaces",
                    format!("routes cannot be read ({error}); name the device"),
                ),
            }
        }
        if faults.is_empty() {
            Ok(())
        } else {
            Err(faults)
        }
    }
}

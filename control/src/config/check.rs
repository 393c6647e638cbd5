//! Each key of the configuration: its default, its form, and what must hold between keys.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use super::read::{Environment, Fault, Reader};
use super::*;

/// The longest path of a unix socket, in bytes (`sun_path` with its end).
const MAX_SOCKET_PATH: usize = 107;

/// CPU numbers that an affinity mask holds (`CPU_SETSIZE`).
const MAX_CPUS: u32 = 1024;

/// Smallest MTU that carries IPv6 (RFC 8200 section 5), in bytes.
const MIN_MTU: u32 = 1280;

pub(super) fn parse(text: &str, environment: Environment<'_>) -> Result<Config, Vec<Fault>> {
    let mut r = Reader::new(text, environment);
    let config = Config {
        node: node(&mut r),
        uplink: uplink(&mut r),
        cluster: cluster(&mut r),
        overlay: Overlay {
            mode: r.choice("overlay.mode", OverlayMode::WORDS),
            port: port(&mut r, "overlay.port", 8472),
            mtu: r.number("overlay.mtu", 0, (MIN_MTU + 70, 65535), true),
        },
        pods: Pods {
            mtu: r.number("pods.mtu", 0, (MIN_MTU, 65485), true),
            large_frames: r.boolean("pods.large_frames", true),
            xdp_mode: r.choice("pods.xdp_mode", PodXdpMode::WORDS),
        },
        services: Services {
            enabled: r.boolean("services.enabled", true),
            node_port_range: ports(&mut r, "services.node_port_range", "30000-32767"),
            ranges: cidrs(&mut r, "services.ranges"),
            host_cgroup: r.text("services.host_cgroup", ""),
        },
        masquerade: Masquerade {
            enabled: r.boolean("masquerade.enabled", true),
            exclude: cidrs(&mut r, "masquerade.exclude"),
            ports: ports(&mut r, "masquerade.ports", "61000-64999"),
        },
        conntrack: Conntrack {
            max: r.number("conntrack.max", 0, (1024, 1 << 28), true),
        },
        workers: workers(&mut r),
        api: api(&mut r),
        state: State {
            directory: absolute(&mut r, "state.directory", "/run/skein"),
        },
        log: Log {
            format: r.choice("log.format", LogFormat::WORDS),
            level: r.choice("log.level", LogLevel::WORDS),
        },
        debug: Debug {
            disable: r.list("debug.disable", "feature", |text| {
                if FEATURES.contains(&text) {
                    Ok(text.to_owned())
                } else {
                    Err(format!("'{text}' is not one of: {}", FEATURES.join(", ")))
                }
            }),
        },
    };
    between(&config, &mut r);
    let faults = r.finish();
    if faults.is_empty() {
        Ok(config)
    } else {
        Err(faults)
    }
}

fn node(r: &mut Reader<'_>) -> Node {
    let name = r.text("node.name", "");
    if !name.is_empty() && !is_dns_name(&name) {
        let message = format!(
            "'{name}' is no node name: lower case letters, digits, '-' and '.', at most 253"
        );
        r.refuse("node.name", message);
    }
    Node { name }
}

fn uplink(r: &mut Reader<'_>) -> Uplink {
    let interfaces = r.list("uplink.interfaces", "device name", |text| {
        // dev_valid_name() of the kernel.
        let valid = (1..=15).contains(&text.len())
            && text != "."
            && text != ".."
            && !text.contains(|c: char| c == '/' || c == ':' || c.is_whitespace());
        if valid {
            Ok(text.to_owned())
        } else {
            Err(format!("'{text}' is no device name"))
        }
    });
    duplicates(r, "uplink.interfaces", &interfaces);
    Uplink {
        interfaces,
        xdp_mode: r.choice("uplink.xdp_mode", UplinkXdpMode::WORDS),
        io: r.choice("uplink.io", UplinkIo::WORDS),
    }
}

fn cluster(r: &mut Reader<'_>) -> Cluster {
    let source = r.choice("cluster.source", Source::WORDS);
    let api_servers = r.list("cluster.api_servers", "\"host:port\"", |text| {
        let port = text.rsplit_once(':').filter(|(host, _)| !host.is_empty());
        match port.and_then(|(_, port)| port.parse::<u16>().ok()) {
            Some(port) if port != 0 => Ok(text.to_owned()),
            _ => Err(format!("'{text}' is not host:port")),
        }
    });
    Cluster {
        source,
        api_servers,
        kubeconfig: r.text("cluster.kubeconfig", ""),
        directory: absolute(r, "cluster.directory", "/etc/skein/cluster"),
    }
}

fn workers(r: &mut Reader<'_>) -> Workers {
    let cpus = r.list("workers.cpus", "CPU number", |text| {
        (text.parse::<u32>().ok())
            .filter(|&cpu| cpu < MAX_CPUS)
            .ok_or_else(|| format!("'{text}' is no CPU number below {MAX_CPUS}"))
    });
    if cpus.len() > 64 {
        r.refuse(
            "workers.cpus",
            format!("{} workers; the most is 64", cpus.len()),
        );
    }
    Workers {
        cpus,
        poll: r.choice("workers.poll", PollMode::WORDS),
    }
}

fn api(r: &mut Reader<'_>) -> Api {
    let socket = absolute(r, "api.socket", skein_cni::agent::DEFAULT_SOCKET);
    if socket.as_os_str().len() > MAX_SOCKET_PATH {
        r.refuse(
            "api.socket",
            format!("the path of a unix socket has at most {MAX_SOCKET_PATH} bytes"),
        );
    }
    let metrics = r.parsed::<SocketAddr>(
        "api.metrics",
        "127.0.0.1:9962",
        "an address and port like 127.0.0.1:9962 or [::1]:9962",
    );
    Api {
        socket,
        metrics: metrics.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 9962))),
    }
}

/// What must hold between keys.
fn between(config: &Config, r: &mut Reader<'_>) {
    let node_ports = config.services.node_port_range;
    let masquerade = config.masquerade.ports;
    if node_ports.overlaps(masquerade) {
        r.refuse(
            "masquerade.ports",
            format!("{masquerade} overlaps services.node_port_range {node_ports}"),
        );
    }
    for (key, range) in [
        ("services.node_port_range", node_ports),
        ("masquerade.ports", masquerade),
    ] {
        if range.contains(config.overlay.port) {
            r.refuse(
                key,
                format!("{range} contains overlay.port {}", config.overlay.port),
            );
        }
    }
    if config.overlay.mode == OverlayMode::Native && config.uplink.io == UplinkIo::Udp {
        r.refuse(
            "uplink.io",
            "udp carries the overlay; overlay.mode = \"native\" has none",
        );
    }
}

fn duplicates(r: &mut Reader<'_>, key: &str, items: &[String]) {
    for (index, item) in items.iter().enumerate() {
        if items[..index].contains(item) {
            r.refuse(key, format!("'{item}' stands there twice"));
        }
    }
}

fn absolute(r: &mut Reader<'_>, key: &str, default: &str) -> PathBuf {
    let text = r.text(key, default);
    if !text.starts_with('/') {
        r.refuse(key, format!("'{text}' is not an absolute path"));
    }
    text.into()
}

fn port(r: &mut Reader<'_>, key: &str, default: u16) -> u16 {
    let number = r.number(key, default.into(), (1, 65535), false);
    u16::try_from(number).unwrap_or(default)
}

fn ports(r: &mut Reader<'_>, key: &str, default: &str) -> PortRange {
    let form = "a range of ports like 30000-32767";
    let everything = PortRange { first: 0, last: 0 };
    r.parsed(key, default, form).unwrap_or(everything)
}

fn cidrs(r: &mut Reader<'_>, key: &str) -> Vec<Cidr> {
    r.list(key, "range", |text| {
        text.parse()
            .map_err(|error: crate::cidr::CidrError| error.to_string())
    })
}

/// A DNS subdomain as Kubernetes names nodes (RFC 1123).
pub(super) fn is_dns_name(name: &str) -> bool {
    let label = |label: &str| {
        !label.is_empty()
            && label.len() <= 63
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    name.len() <= 253 && name.split('.').all(label)
}

impl PortRange {
    /// Whether the port is in the range.
    #[must_use]
    pub fn contains(self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }

    /// Whether the two ranges share a port.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.first <= other.last && other.first <= self.last && self.first != 0 && other.first != 0
    }
}

impl FromStr for PortRange {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (first, last) = text.split_once('-').ok_or(())?;
        let first: u16 = first.trim().parse().map_err(|_| ())?;
        let last: u16 = last.trim().parse().map_err(|_| ())?;
        if first == 0 || first > last {
            return Err(());
        }
        Ok(Self { first, last })
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl Serialize for PortRange {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing(_: &str) -> Option<String> {
        None
    }

    fn faults(text: &str) -> Vec<String> {
        Config::parse(text, &nothing)
            .err()
            .unwrap_or_default()
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn an_empty_file_is_all_defaults() {
        let config = Config::parse("", &nothing).unwrap();
        assert_eq!(config.overlay.port, 8472);
        assert_eq!(config.cluster.source, Source::Kubernetes);
        assert_eq!(config.services.node_port_range.to_string(), "30000-32767");
        assert_eq!(config.masquerade.ports.to_string(), "61000-64999");
        assert_eq!(config.api.metrics.to_string(), "127.0.0.1:9962");
        assert_eq!(config.state.directory, PathBuf::from("/run/skein"));
        assert!(config.pods.large_frames && config.services.enabled);
    }

    #[test]
    fn every_key_is_read() {
        let text = r#"
            [node]
            name = "node1"
            [uplink]
            interfaces = ["eth0", "eth1"]
            xdp_mode = "generic"
            io = "udp"
            [cluster]
            source = "directory"
            api_servers = ["10.0.0.1:6443", "[fd00::1]:6443"]
            kubeconfig = "/k"
            directory = "/d"
            [overlay]
            mode = "vxlan"
            port = 4789
            mtu = 9000
            [pods]
            mtu = 1400
            large_frames = false
            xdp_mode = "native"
            [services]
            enabled = false
            node_port_range = "20000-20010"
            ranges = ["10.96.0.0/12"]
            host_cgroup = "/c"
            [masquerade]
            enabled = false
            exclude = ["10.0.0.0/8", "fd00::/8"]
            ports = "40000-40010"
            [conntrack]
            max = 5000
            [workers]
            cpus = [0, 0, 1]
            poll = "busy"
            [api]
            socket = "/s"
            metrics = "[::1]:1"
            [state]
            directory = "/state"
            [log]
            format = "json"
            level = "debug"
            [debug]
            disable = ["multi-buffer"]
        "#;
        let config = Config::parse(text, &nothing).unwrap();
        let defaults = Config::parse("", &nothing).unwrap();
        let (set, default) = (
            serde_json::to_value(&config).unwrap(),
            serde_json::to_value(&defaults).unwrap(),
        );
        for (section, keys) in set.as_object().unwrap() {
            for (key, value) in keys.as_object().unwrap() {
                if section != "overlay" || key != "mode" {
                    assert_ne!(value, &default[section][key], "{section}.{key}");
                }
            }
        }
        assert_eq!(config.workers.cpus, [0, 0, 1]);
    }

    #[test]
    fn the_environment_wins_and_lists_are_separated_by_commas() {
        let environment = |name: &str| {
            let value = match name {
                "SKEIN_UPLINK_INTERFACES" => "eth7, eth8",
                "SKEIN_OVERLAY_PORT" => "4789",
                "SKEIN_PODS_LARGE_FRAMES" => "false",
                "SKEIN_WORKERS_CPUS" => "1,0",
                "SKEIN_SERVICE_HOST" => "10.96.0.1",
                _ => return None,
            };
            Some(value.to_owned())
        };
        let text = "[uplink]\ninterfaces = [\"eth0\"]\n";
        let config = Config::parse(text, &environment).unwrap();
        assert_eq!(config.uplink.interfaces, ["eth7", "eth8"]);
        assert_eq!(config.overlay.port, 4789);
        assert_eq!(config.workers.cpus, [1, 0]);
        assert!(!config.pods.large_frames);
        let bad = |name: &str| (name == "SKEIN_OVERLAY_PORT").then(|| "many".to_owned());
        let faults = Config::parse("", &bad).unwrap_err();
        assert!(
            faults[0]
                .to_string()
                .starts_with("SKEIN_OVERLAY_PORT: overlay.port: 'many'")
        );
    }

    /// A text with one fault, and what is said of it.
    const FAULTS: &[(&str, &str)] = &[
        ("[node]\nname = \"Node_1\"", "line 2: node.name: 'Node_1'"),
        (
            "[node]\nnmae = \"a\"",
            "line 2: node.nmae: unknown key; [node] has: name",
        ),
        (
            "[nod]\nname = \"a\"",
            "line 2: nod.name: unknown section [nod]",
        ),
        ("[nod]", "line 1: unknown section [nod]"),
        ("name = \"a\"", "line 1: name: unknown key"),
        (
            "[overlay]\nport = 0",
            "overlay.port: 0 is not a whole number from 1 to 65535",
        ),
        (
            "[overlay]\nport = \"1\"",
            "overlay.port: '1' is not a whole number",
        ),
        ("[overlay]\nport = 1.5", "it takes a whole number"),
        ("[overlay]\nmtu = 900", "overlay.mtu: 900 is not"),
        (
            "[overlay]\nport = 31000",
            "services.node_port_range: 30000-32767 contains",
        ),
        (
            "[uplink]\ninterfaces = [\"a/b\"]",
            "'a/b' is no device name",
        ),
        (
            "[uplink]\ninterfaces = [\"a\", \"a\"]",
            "'a' stands there twice",
        ),
        ("[uplink]\ninterfaces = \"a\"", "'a' is not a list"),
        (
            "[uplink]\nxdp_mode = \"fast\"",
            "not one of: auto, native, generic",
        ),
        (
            "[cluster]\napi_servers = [\"host\"]",
            "'host' is not host:port",
        ),
        (
            "[cluster]\ndirectory = \"d\"",
            "'d' is not an absolute path",
        ),
        ("[services]\nranges = [\"10.0.0.1/8\"]", "10.0.0.0/8"),
        (
            "[masquerade]\nports = \"9-1\"",
            "'9-1' is not a range of ports",
        ),
        (
            "[masquerade]\nports = \"32000-33000\"",
            "overlaps services.node_port_range",
        ),
        (
            "[masquerade]\nenabled = \"yes\"",
            "'yes' is not true or false",
        ),
        ("[workers]\ncpus = [-1]", "'-1' is no CPU number"),
        (
            "[api]\nmetrics = \"9962\"",
            "'9962' is not an address and port",
        ),
        (
            "[debug]\ndisable = [\"x\"]",
            "'x' is not one of: multi-buffer",
        ),
        ("[log]\nlevel = \"loud\"", "'loud' is not one of: info"),
        ("[node", "line 1: "),
    ];

    #[test]
    fn each_fault_names_its_line_and_key() {
        for (text, expected) in FAULTS {
            let faults = faults(text);
            assert_eq!(faults.len(), 1, "{text}: {faults:?}");
            assert!(faults[0].contains(expected), "{text}: {faults:?}");
        }
        let long = format!("[api]\nsocket = \"/{}\"", "s".repeat(107));
        assert!(faults(&long)[0].contains("at most 107 bytes"));
    }

    #[test]
    fn all_faults_come_at_once() {
        let text = "[node]\nname = \"A\"\nx = 1\n[overlay]\nport = 0\nmtu = 1\n[q]\nz = 1\n";
        assert_eq!(faults(text).len(), 5);
    }

    #[test]
    fn every_feature_of_the_datapath_can_be_done_without() {
        for name in skein_dataplane::io::features::FEATURE_NAMES {
            assert!(FEATURES.contains(&name), "{name}");
        }
    }

    struct Fake(Option<&'static str>, Vec<String>);

    impl Machine for Fake {
        fn hostname(&self) -> std::io::Result<String> {
            self.0
                .map(str::to_owned)
                .ok_or_else(|| std::io::Error::other("none"))
        }
        fn default_route_interfaces(&self) -> std::io::Result<Vec<String>> {
            Ok(self.1.clone())
        }
    }

    #[test]
    fn name_and_uplink_are_found() {
        let fresh = || Config::parse("", &nothing).unwrap();
        let mut config = fresh();
        let machine = Fake(Some("host1"), vec!["eth0".into(), "eth1".into()]);
        config.resolve(&nothing, &machine).unwrap();
        assert_eq!(config.node.name, "host1");
        assert_eq!(config.uplink.interfaces, ["eth0"]);

        let mut config = fresh();
        let named = |name: &str| (name == "NODE_NAME").then(|| "node7".to_owned());
        config.resolve(&named, &machine).unwrap();
        assert_eq!(config.node.name, "node7");

        let faults = fresh()
            .resolve(&nothing, &Fake(Some("Bad_Name"), vec![]))
            .unwrap_err();
        assert_eq!(faults.len(), 2);
        assert!(faults[1].to_string().contains("no default route"));
        assert!(
            fresh()
                .resolve(&nothing, &Fake(None, vec!["e".into()]))
                .is_err()
        );
    }
}

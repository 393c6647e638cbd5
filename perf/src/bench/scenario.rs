//! What is measured: names, metrics and units.

/// Where the two pods are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// On one node.
    Same,
    /// On two.
    Across,
}

impl Path {
    /// The index of the receiving pod: the first two are on node 1, the third on node 2.
    pub fn peer(self) -> usize {
        match self {
            Self::Same => 1,
            Self::Across => 2,
        }
    }

    /// What the kernel's pods go through.
    pub fn baseline(self) -> &'static str {
        match self {
            Self::Same => "kernel bridge",
            Self::Across => "kernel bridge + VXLAN",
        }
    }
}

/// How a run measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Datagrams of `size` payload bytes from one sender, one system call each.
    UdpRate {
        /// Payload, bytes.
        size: usize,
    },
    /// One TCP stream, 128 KiB writes.
    TcpRate,
    /// One-byte requests over TCP, one at a time.
    TcpRr,
    /// CNI ADD of one pod after the other.
    CniAdd,
}

impl Measure {
    /// Names and units of the values of a run.
    pub fn metrics(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::UdpRate { .. } => &[("rate", "kpps")],
            Self::TcpRate => &[("throughput", "Gbit/s")],
            Self::TcpRr => &[("p50", "µs"), ("p99", "µs")],
            Self::CniAdd => &[("p50", "ms"), ("p99", "ms")],
        }
    }
}

/// A path and a measurement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scenario {
    /// Short and stable: `udp64-same`, `tcp1-across-real`.
    pub id: String,
    /// For people.
    pub title: String,
    /// Where the pods are.
    pub path: Path,
    /// How a run measures.
    pub measure: Measure,
}

impl Scenario {
    /// What Skein is compared with.
    pub fn baseline(&self) -> &'static str {
        match self.measure {
            Measure::CniAdd => "plugins ptp and host-local",
            _ => self.path.baseline(),
        }
    }
}

/// All scenarios for a wire of the given kind.
pub fn all(wire: &str) -> Vec<Scenario> {
    let mut scenarios = Vec::new();
    for path in [Path::Same, Path::Across] {
        for (short, title, measure) in [
            (
                "udp64",
                "UDP 64 B, one sender",
                Measure::UdpRate { size: 64 },
            ),
            ("tcp1", "TCP, one stream", Measure::TcpRate),
            ("rr", "TCP request and response, 1 B", Measure::TcpRr),
        ] {
            let (id, place) = match path {
                Path::Same => (format!("{short}-same"), "same node".to_owned()),
                Path::Across => (
                    format!("{short}-across-{wire}"),
                    format!("across nodes, {wire} wire"),
                ),
            };
            scenarios.push(Scenario {
                id,
                title: format!("{title}, {place}"),
                path,
                measure,
            });
        }
    }
    scenarios.push(Scenario {
        id: "cni.add".to_owned(),
        title: "CNI ADD, one at a time".to_owned(),
        path: Path::Same,
        measure: Measure::CniAdd,
    });
    scenarios
}

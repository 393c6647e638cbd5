//! Small traffic programs: `skein-lab probe …`, run inside pods.
//!
//! Plain sockets of the standard library, so that what a check sees is the datapath and not the
//! habits of some tool. A server writes `ready PORT` once it listens; every program writes its
//! result as one line of JSON, which is the serialised form of a public struct here.

pub mod http;
pub mod name;
pub mod peer;
pub mod reach;
pub mod rr;
pub mod sizes;
pub mod sweep;
pub mod tcp;
pub mod udp;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;

/// How long a socket may stay silent before a probe gives up.
pub const SILENCE: Duration = Duration::from_secs(30);

/// One probe and its arguments.
#[derive(Debug, clap::Subcommand)]
pub enum Probe {
    /// Receive one TCP connection to its end; count and hash the bytes.
    TcpServe {
        /// Count only.
        #[arg(long)]
        no_hash: bool,
    },
    /// Send over TCP, either a number of bytes or for a time.
    TcpSend {
        /// Whom to send to.
        to: SocketAddr,
        /// How many bytes; hashed.
        #[arg(long, conflicts_with = "seconds")]
        bytes: Option<u64>,
        /// How long; not hashed.
        #[arg(long, default_value_t = 3.0)]
        seconds: f64,
    },
    /// Send every datagram back.
    UdpEcho,
    /// Send datagrams to an echo and compare what returns.
    UdpSend {
        /// The echo.
        to: SocketAddr,
        /// Payload sizes, bytes.
        #[arg(long, value_delimiter = ',', default_value = "1,64,1400")]
        sizes: Vec<usize>,
        /// Datagrams of each size.
        #[arg(long, default_value_t = 10)]
        count: u32,
    },
    /// Count datagrams until they stop coming.
    UdpSink,
    /// Send datagrams as fast as one thread can.
    UdpBlast {
        /// The sink.
        to: SocketAddr,
        /// Payload size, bytes.
        #[arg(long, default_value_t = 64)]
        size: usize,
        /// How long.
        #[arg(long, default_value_t = 3.0)]
        seconds: f64,
    },
    /// Answer one-byte requests over TCP.
    TcpRrServe {
        /// Seconds without a request after which the connection counts as dead.
        #[arg(long, default_value_t = SILENCE.as_secs_f64())]
        silence: f64,
    },
    /// Send one-byte requests over TCP, one at a time, and measure each answer.
    TcpRr {
        /// The server.
        to: SocketAddr,
        /// How long.
        #[arg(long, default_value_t = 3.0)]
        seconds: f64,
        /// Seconds between requests.
        #[arg(long, default_value_t = 0.0)]
        pause: f64,
        /// Seconds without an answer after which the connection counts as dead.
        #[arg(long, default_value_t = SILENCE.as_secs_f64())]
        silence: f64,
    },
    /// Answer on ports, over TCP and UDP.
    Answer {
        /// The ports.
        #[arg(required = true)]
        ports: Vec<u16>,
    },
    /// Ask many servers at once which of them answer.
    Reach {
        /// Whom: `tcp/10.0.0.1:80`, `udp/[fd00::1]:80`.
        #[arg(required = true)]
        targets: Vec<reach::Target>,
        /// How long to wait for answers.
        #[arg(long, default_value_t = 2.0)]
        seconds: f64,
    },
    /// Ping many addresses, each until it answers.
    Sweep {
        /// Whom to ping.
        targets: Vec<IpAddr>,
        /// How long to go on.
        #[arg(long, default_value_t = 10.0)]
        seconds: f64,
    },
    /// Send a packet of each size to an echo, and say what became of it.
    Sizes(sizes::Options),
    /// Tell a TCP client, then every UDP client, the address that it is seen by.
    TellPeer,
    /// Ask for the address that this end is seen by.
    AskPeer {
        /// The server.
        to: SocketAddr,
    },
    /// Tell every TCP and UDP client a name.
    NameServe {
        /// The name.
        name: String,
        /// The port; 0: of the kernel's choice.
        #[arg(long, default_value_t = 0)]
        port: u16,
    },
    /// Ask for the name of who serves, each time from another port.
    NameAsk {
        /// The server, or a Service.
        to: SocketAddr,
        /// How many times.
        #[arg(long, default_value_t = 20)]
        count: u32,
        /// Over UDP.
        #[arg(long)]
        udp: bool,
    },
    /// Send a datagram where nobody listens; fails unless an ICMP error says so.
    UdpRefused {
        /// The closed port.
        to: SocketAddr,
    },
    /// Fetch a page over HTTP/1.1; fails unless the status is 200.
    HttpGet {
        /// The server.
        to: SocketAddr,
        /// The page's path.
        page: String,
    },
}

/// Runs one probe to its end.
///
/// # Errors
/// The socket's, with the address; silence for [`SILENCE`].
pub fn run(probe: Probe) -> Result<()> {
    match probe {
        Probe::TcpServe { no_hash } => print(&tcp::serve(!no_hash)?),
        Probe::TcpSend {
            to,
            bytes: Some(bytes),
            ..
        } => print(&tcp::send(to, tcp::Amount::Bytes(bytes))?),
        Probe::TcpSend { to, seconds, .. } => {
            print(&tcp::send(to, tcp::Amount::Time(duration(seconds)?))?)
        }
        Probe::UdpEcho => udp::echo(),
        Probe::UdpSend { to, sizes, count } => print(&udp::send(to, &sizes, count)?),
        Probe::UdpSink => print(&udp::sink()?),
        Probe::UdpBlast { to, size, seconds } => print(&udp::blast(to, size, duration(seconds)?)?),
        Probe::TcpRrServe { silence } => rr::serve(duration(silence)?),
        Probe::TcpRr {
            to,
            seconds,
            pause,
            silence,
        } => {
            let (time, pause) = (duration(seconds)?, duration(pause)?);
            print(&rr::run(to, time, pause, duration(silence)?)?)
        }
        Probe::Answer { ports } => reach::answer(&ports),
        Probe::Reach { targets, seconds } => print(&reach::ask(&targets, duration(seconds)?)?),
        Probe::Sweep { targets, seconds } => print(&sweep::run(&targets, duration(seconds)?)?),
        Probe::Sizes(options) => print(&sizes::run(&options)?),
        Probe::TellPeer => peer::tell(),
        Probe::AskPeer { to } => print(&peer::ask(to)?),
        Probe::NameServe { name, port } => name::serve(&name, port),
        Probe::NameAsk { to, count, udp } => print(&name::ask(to, count, udp)),
        Probe::UdpRefused { to } => udp::refused(to),
        Probe::HttpGet { to, page } => http::get(to, &page).map(|body| print!("{body}")),
    }
}

fn print<T: Serialize>(result: &T) -> Result<()> {
    println!("{}", serde_json::to_string(result)?);
    Ok(())
}

fn duration(seconds: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(seconds).with_context(|| format!("{seconds} is no time to run"))
}

/// All addresses of the pod, IPv4 and IPv6, a port of the kernel's choice.
fn any_address() -> SocketAddr {
    SocketAddr::from((std::net::Ipv6Addr::UNSPECIFIED, 0))
}

fn say_ready(address: SocketAddr) {
    println!("ready {}", address.port());
}

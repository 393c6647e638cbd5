//! An agent's life: what is started in which order, and stopped in which.
//!
//! Start: lock, records, packet memory, workers, socket, endpoints of before, sources; only then
//! is the socket served: nobody is answered by half an agent. Stop (SIGTERM, SIGINT): sockets first, so that
//! nothing new begins; then the sources; then workers and AF_XDP sockets; the lock last. XDP
//! programs stay attached and pinned, so that until the next agent comes what is ours is
//! dropped, and everything else passes.

use std::fs;
use std::path::Path;

use skein_dataplane::io::pool::FrameStore;
use tokio::sync::mpsc;

use crate::agent::{Agent, Handle, Parts};
use crate::cni_server;
use crate::config::{Config, OverlayMode, Source, UplinkIo};
use crate::endpoint::Endpoints;
use crate::host::HostKernel;
use crate::identity::Allocator;
use crate::journal::{self, Journal, Restored};
use crate::lock::AgentLock;
use crate::netlink::{self, Netlink};
use crate::observe::{self, Counters, Shared};
use crate::open::{Opener, XdpOpener};
use crate::pods::PodIdentities;
use crate::reserved;
use crate::watch::directory::DirectorySource;
use crate::workers::{CHUNKS, Datapath};

/// Why an agent did not start, or did not end well: one line that says what to do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct RunError(String);

impl From<String> for RunError {
    fn from(text: String) -> Self {
        Self(text)
    }
}

fn said(error: impl std::fmt::Display) -> RunError {
    RunError(error.to_string())
}

/// Runs an agent with AF_XDP until SIGTERM or SIGINT.
pub fn run(config: Config) -> Result<(), RunError> {
    run_with(config, |config, store| {
        Ok(Box::new(XdpOpener::new(config, store)?))
    })
}

/// Makes what opens devices, over the packet memory.
pub type MakeOpener = fn(&Config, &std::sync::Arc<FrameStore>) -> Result<Box<dyn Opener>, String>;

/// Runs an agent whose devices are opened by `opener` until SIGTERM or SIGINT.
pub fn run_with(config: Config, opener: MakeOpener) -> Result<(), RunError> {
    refuse_what_is_to_come(&config)?;
    let _lock = AgentLock::take(&config.state.directory).map_err(said)?;
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| RunError(format!("control runtime: {error}")))?
        .block_on(live(config, opener))
}

/// What the configuration knows and this agent does not do: said, never passed over, where the
/// node's packets would go another way than was asked for.
fn refuse_what_is_to_come(config: &Config) -> Result<(), RunError> {
    let refused = |what, instead| {
        Err(RunError(format!(
            "{what} is not built into this agent yet; use {instead}"
        )))
    };
    if config.cluster.source == Source::Kubernetes {
        let instead = "\"directory\" with a folder of manifests";
        return refused("cluster.source = \"kubernetes\"", instead);
    }
    if config.overlay.mode == OverlayMode::Native {
        return refused("overlay.mode = \"native\"", "\"vxlan\"");
    }
    if config.uplink.io == UplinkIo::Udp {
        return refused("uplink.io = \"udp\"", "\"xsk\"");
    }
    Ok(())
}

async fn live(config: Config, opener: MakeOpener) -> Result<(), RunError> {
    // Before anything is made that a signal should not leave behind.
    let stop = stop_signal()?;
    let mut kernel = Netlink::new().map_err(|error| RunError(format!("netlink: {error}")))?;
    check_uplinks(&config, &mut kernel)?;
    let host = HostKernel::new().map_err(|error| RunError(format!("netlink: {error}")))?;
    let (notices, kernel_notices) = mpsc::channel(64);
    netlink::watch(notices).map_err(|error| RunError(format!("netlink: {error}")))?;
    let source = DirectorySource::open(&config.cluster.directory).map_err(said)?;
    let allocator = Allocator::new(&config.cluster.directory).map_err(said)?;
    let endpoints = Endpoints::open(&config.state.directory).map_err(said)?;

    let store = FrameStore::new(CHUNKS).map_err(said)?;
    let opener = opener(&config, &store)?;
    let datapath = Datapath::start(&config, store, opener)?;
    let journal = go_on(&config, &datapath)?;
    let counters = datapath.group().shared_stats().into_iter();
    let shared = Shared::new(
        counters
            .map(|stats| Box::new(stats) as Box<dyn Counters>)
            .collect(),
    );
    tracing::info!(
        node = config.node.name,
        uplinks = ?config.uplink.interfaces,
        workers = datapath.group().len(),
        features = datapath.features(),
        "skeind {} starts", env!("CARGO_PKG_VERSION")
    );

    let (events, source_events) = mpsc::channel(64);
    std::thread::Builder::new()
        .name("skein-manifests".into())
        .spawn(move || source.run(events))
        .map_err(|error| RunError(format!("thread: {error}")))?;
    let metrics = observe::listen(config.api.metrics).await?;
    // Once the packet memory has shown that no other agent is here, whose socket it would be; and
    // before the endpoints' devices are looked at: a DEL that found no socket has removed its
    // device by then, and one that finds it waits in its queue.
    let socket = cni_server::listen(&config.api.socket).map_err(said)?;
    let socket_path = config.api.socket.clone();
    let (handle, commands) = Handle::new();
    let servers = [
        tokio::spawn(observe::serve(metrics, shared.clone())),
        tokio::spawn(cni_server::serve(socket, handle)),
    ];
    let parts = Parts {
        config,
        endpoints,
        identities: PodIdentities::new(allocator),
        netlink: kernel,
        host,
    };
    let stopped = async {
        stop.await;
        for server in &servers {
            server.abort();
        }
        remove_socket(&socket_path);
        tracing::info!("skeind stops");
    };
    let (free, total) = Agent::new(parts, datapath, shared)
        .run(commands, source_events, kernel_notices, stopped)
        .await;
    drop(journal);
    if free == total {
        tracing::info!("frames: {free} of {total}");
        Ok(())
    } else {
        Err(RunError(format!(
            "frames: {free} of {total}: {} were lost; please report this with the log",
            total.abs_diff(free)
        )))
    }
}

/// Brings back the connections of an earlier agent, before any device is open, and keeps them.
fn go_on(config: &Config, datapath: &Datapath) -> Result<Journal, RunError> {
    let directory = &config.state.directory;
    match journal::restore(directory, datapath.shared()) {
        Ok(found) if found == Restored::default() => {}
        Ok(Restored { restored, refused }) => {
            tracing::info!(restored, refused, "connections of an earlier agent go on");
        }
        Err(error) => tracing::warn!(%error, "the journal of connections cannot be read"),
    }
    if config.masquerade.enabled
        && let Err(error) = reserved::reserve(config.masquerade.ports)
    {
        tracing::warn!(%error, ports = %config.masquerade.ports, "the ports of masquerade are not reserved: programs of the node may be given them; add them to net.ipv4.ip_local_reserved_ports");
    }
    Journal::start(directory, datapath.shared().clone())
        .map_err(|error| RunError(format!("thread: {error}")))
}

fn check_uplinks(config: &Config, kernel: &mut Netlink) -> Result<(), RunError> {
    let devices = kernel
        .devices()
        .map_err(|error| RunError(format!("netlink: {error}")))?;
    for name in &config.uplink.interfaces {
        if !devices.iter().any(|device| device.name == *name) {
            let others: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
            return Err(RunError(format!(
                "uplink {name} does not exist; devices here: {}; set uplink.interfaces",
                others.join(", ")
            )));
        }
    }
    Ok(())
}

/// Ends at the first SIGTERM or SIGINT from now on.
fn stop_signal() -> Result<impl Future<Output = ()>, RunError> {
    use tokio::signal::unix::{SignalKind, signal};
    let failed = |error| RunError(format!("signals: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

fn remove_socket(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        tracing::warn!(path = %path.display(), %error, "the socket stays");
    }
}

//! What the kernel tells: uplinks that come and go, routes, neighbours, pods' devices; and what
//! a restart finds.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::Agent;
use crate::compile::tunnel;
use crate::leftovers;
use crate::netlink::{Device, Notice};
use crate::open::remove_stale_pins;
use crate::state::Endpoint;

impl Agent {
    pub(super) fn notice(&mut self, notice: Notice) {
        // One question answers many notices; that about routes answers both.
        if notice == Notice::Routes || self.ask.is_none() {
            self.ask = Some(notice);
        }
    }

    /// The addresses that packets to peers are sent to.
    fn tunnels(&self) -> BTreeSet<IpAddr> {
        let Some(own) = self.own() else {
            return BTreeSet::new();
        };
        (self.state.nodes())
            .filter(|node| node.name != own.name)
            .filter_map(|node| tunnel(own, node))
            .map(|(_, remote)| remote)
            .collect()
    }

    pub(super) fn ask_kernel(&mut self, notice: Notice) {
        let answer = match notice {
            Notice::Routes => {
                let tunnels = self.tunnels();
                self.underlay.ask_routes(&mut self.netlink, &tunnels)
            }
            Notice::Neighbours => self.underlay.ask_neighbours(&mut self.netlink),
        };
        match answer {
            Ok(changed) => {
                self.faults.kernel = None;
                if changed {
                    self.changed();
                }
            }
            Err(error) => {
                let text = format!("the kernel's routes and neighbours cannot be read: {error}");
                if self.faults.kernel.as_ref() != Some(&text) {
                    tracing::warn!("{text}");
                }
                self.faults.kernel = Some(text);
                return;
            }
        }
        if notice == Notice::Routes {
            self.reconcile_uplinks();
            self.reconcile_host();
            // Somebody may have changed or removed what was written.
            self.routes = None;
            self.route_host();
            if let Ok(devices) = self.netlink.devices() {
                self.find_lost(&devices);
                self.find_leftovers(&devices);
            }
        }
    }

    /// Opens uplinks that are there and not open, closes those that are gone or another device
    /// by now.
    pub(super) fn reconcile_uplinks(&mut self) {
        let Some(overlay) = self.overlay() else {
            return;
        };
        if let Err(error) = self.datapath.set_overlay(overlay) {
            tracing::warn!(error, "the uplinks' programs keep the old addresses");
        }
        let names = self.config.uplink.interfaces.clone();
        for (position, name) in names.iter().enumerate() {
            // The configuration has no more than that.
            let Ok(position) = u8::try_from(position) else {
                return;
            };
            let device = self.underlay.uplinks().get(usize::from(position));
            let index = device
                .and_then(Option::as_ref)
                .map(|uplink| uplink.device.index);
            let open = self
                .datapath
                .uplinks()
                .get(&position)
                .map(|open| open.index);
            if open.is_some() && open != index {
                tracing::warn!(uplink = name, "the uplink is gone");
                if let Err(error) = self.datapath.close_uplink(position) {
                    tracing::warn!(uplink = name, error, "closing the uplink");
                }
                self.changed();
            }
            let Some(index) = index else {
                let text = format!("uplink {name} does not exist; see uplink.interfaces");
                self.faults.uplinks.insert(position, text);
                continue;
            };
            if open == Some(index) {
                continue;
            }
            match self.datapath.open_uplink(position, name, index, overlay) {
                Ok(()) => {
                    self.faults.uplinks.remove(&position);
                    self.settled = false;
                    if let Some(uplink) = self.datapath.uplinks().get(&position) {
                        let (mode, fallback) = uplink.mode();
                        let queues = uplink.links.len();
                        tracing::info!(uplink = name, mode, queues, "uplink open");
                        if let Some(reason) = fallback {
                            tracing::warn!(uplink = name, reason, "not in native mode");
                        }
                    }
                    self.changed();
                }
                Err(error) => {
                    if self.faults.uplinks.get(&position) != Some(&error) {
                        tracing::error!("{error}");
                    }
                    self.faults.uplinks.insert(position, error);
                }
            }
        }
    }

    /// Closes links whose devices are gone: the pod's namespace was removed without a DEL. The
    /// addresses stay taken until the DEL comes.
    fn find_lost(&mut self, devices: &[Device]) {
        let lost: Vec<Endpoint> = (self.datapath.pods().values())
            .map(|pod| &pod.endpoint)
            .filter(|endpoint| !is_there(endpoint, devices))
            .cloned()
            .collect();
        for endpoint in lost {
            let device = &endpoint.host_ifname;
            tracing::warn!(device, "a pod's device is gone without a DEL");
            if let Err(error) = self.datapath.close_pod(&endpoint.attachment) {
                tracing::warn!(device, error, "closing its link");
            }
            remove_stale_pins(device);
            self.forget_endpoint(&endpoint.attachment);
            self.complete.remove(&endpoint.attachment);
            let text = format!("device {device} is gone without a DEL");
            self.faults.endpoints.insert(endpoint.attachment, text);
            self.changed();
        }
    }

    /// Says which devices another network plugin has left.
    fn find_leftovers(&mut self, devices: &[Device]) {
        let found = leftovers::of(devices);
        for sentence in &found {
            if !self.faults.leftovers.contains(sentence) {
                tracing::warn!("{sentence}");
            }
        }
        self.faults.leftovers = found;
    }

    /// Opens again what an earlier agent left; what has no device any more is given back.
    pub(super) fn restore(&mut self) {
        for damaged in self.endpoints.damaged() {
            tracing::warn!(
                record = damaged,
                "an endpoint's record is damaged; add the pod anew"
            );
        }
        let devices = match self.netlink.devices() {
            Ok(devices) => devices,
            Err(error) => {
                tracing::error!(%error, "devices cannot be read; no endpoint is restored");
                return;
            }
        };
        let records: Vec<Endpoint> = self.endpoints.iter().cloned().collect();
        for endpoint in records {
            let device = &endpoint.host_ifname;
            if !is_there(&endpoint, &devices) {
                tracing::info!(device, "a pod went while no agent ran");
                remove_stale_pins(device);
                if let Err(error) = self.remove(&endpoint.attachment) {
                    tracing::warn!(device, %error, "its addresses stay taken");
                }
                continue;
            }
            match self.datapath.open_pod(&endpoint) {
                Ok(()) => {
                    tracing::info!(device, ips = ?endpoint.ips, "endpoint restored");
                    self.set_endpoint(endpoint);
                }
                Err(error) => {
                    tracing::error!(device, error, "an endpoint is not restored");
                    self.faults.endpoints.insert(endpoint.attachment, error);
                }
            }
        }
        self.changed();
    }

    /// Tries again to open what could not be restored.
    pub(super) fn reopen(&mut self) {
        let closed: Vec<Endpoint> = (self.endpoints.iter())
            .filter(|endpoint| self.faults.endpoints.contains_key(&endpoint.attachment))
            .filter(|endpoint| !self.datapath.pods().contains_key(&endpoint.attachment))
            .filter(|endpoint| !self.pending.contains_key(&endpoint.attachment))
            .cloned()
            .collect();
        if closed.is_empty() {
            return;
        }
        let Ok(devices) = self.netlink.devices() else {
            return;
        };
        for endpoint in closed.into_iter().filter(|gone| is_there(gone, &devices)) {
            match self.datapath.open_pod(&endpoint) {
                Ok(()) => {
                    tracing::info!(device = endpoint.host_ifname, "endpoint restored at last");
                    self.faults.endpoints.remove(&endpoint.attachment);
                    self.set_endpoint(endpoint);
                    self.changed();
                }
                Err(error) => {
                    self.faults.endpoints.insert(endpoint.attachment, error);
                }
            }
        }
    }
}

fn is_there(endpoint: &Endpoint, devices: &[Device]) -> bool {
    devices
        .iter()
        .any(|device| device.name == endpoint.host_ifname && Some(device.index) == endpoint.ifindex)
}

//! The host link: made or taken over, opened, and kept with the routes into it.

use super::Agent;
use crate::host;

impl Agent {
    /// Makes or finds the host link and opens it; an open one is only looked at.
    pub(super) fn reconcile_host(&mut self) {
        // Without addresses and uplink there is nowhere to go, and no MTU.
        let (Some(_), Some(mtu)) = (self.overlay(), self.route_mtu()) else {
            return;
        };
        let before = self.datapath.host().map(|open| open.device);
        match self.open_host(mtu) {
            Ok(()) => self.faults.host = None,
            Err(error) => {
                if self.faults.host.as_ref() != Some(&error) {
                    tracing::error!("host link: {error}");
                }
                self.faults.host = Some(format!("host link: {error}"));
            }
        }
        let now = self.datapath.host().map(|open| (open.device, open.mode()));
        if before != now.map(|(device, _)| device) {
            if let Some((device, mode)) = now {
                let (name, mtu) = (host::HOST_END, device.mtu);
                tracing::info!(name, mode, mtu, "host link open");
            }
            self.changed();
        }
    }

    fn open_host(&mut self, mtu: u32) -> Result<(), String> {
        // A peer's path may be larger than that of this node's own pods.
        let widest = self.routes.iter().flatten().map(|route| route.mtu).max();
        let mtu = mtu.max(widest.unwrap_or(0));
        let device = self.host.ensure(&self.config.node.name, mtu)?;
        let open = self.datapath.host().map(|open| open.device.our_index);
        if open != Some(device.our_index) {
            self.host.prepare(&device)?;
        }
        self.datapath.open_host(device)?;
        self.host.take_up(&device)
    }

    /// Writes the host's routes where they are not as the published tables say. Not before this
    /// node and the others are known: until then those of an earlier agent stand.
    pub(super) fn route_host(&mut self) {
        if !self.may_publish() || self.datapath.tables().node().addresses.is_empty() {
            return;
        }
        let (Some(open), Some(own), Some(mtu)) =
            (self.datapath.host(), self.own(), self.route_mtu())
        else {
            return;
        };
        let device = open.device;
        // Services are reached as this node's own pods are.
        let configured = &self.config.services.ranges;
        let mut ranges = own.pod_cidrs.clone();
        ranges.extend(self.services.ranges(&self.state, configured));
        let wanted = host::routes(self.datapath.tables(), &ranges, mtu);
        if self.routes.as_ref() == Some(&wanted) {
            return;
        }
        let faults = self.host.sync(&device, &wanted);
        for fault in &faults {
            if !self.faults.routes.contains(fault) {
                tracing::warn!("{fault}");
            }
        }
        self.routes = Some(wanted);
        self.faults.routes = faults;
    }
}

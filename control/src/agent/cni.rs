//! What the plugin asks for.

use std::time::Instant;

use skein_cni::agent::{AgentError, Attachment, Reply, Request};
use skein_dataplane::ids::Generation;
use tokio::sync::oneshot;

use super::{ATTACH_WITHIN, Agent, Command, Early, READY_WITHIN, Waiter};
use crate::cni_server::ConnectionId;
use crate::endpoint::{Wanted, agent_error, code, reservation, unknown};
use crate::open::remove_stale_pins;

/// Outer headers before the inner IP packet, in bytes: Ethernet 14, VXLAN 8, UDP 8, IP 20 or 40.
const OVERHEAD_IPV4: u32 = 50;
const OVERHEAD_IPV6: u32 = 70;

impl Agent {
    pub(super) fn command(&mut self, command: Command) {
        match command {
            Command::Abandon(connection, attachment, done) => {
                self.early.retain(|early| early.connection != connection);
                // Else a DEL has been here, and perhaps an ADD after it, whose all this is now.
                if self.pending.get(&attachment) == Some(&connection) {
                    self.pending.remove(&attachment);
                    if let Err(error) = self.remove(&attachment) {
                        tracing::warn!(container = attachment.container_id, %error,
                            "an ADD that ended halfway is not undone");
                    }
                }
                // Whoever waited for this is gone with its connection.
                let _ = done.send(());
            }
            Command::Call(
                connection,
                Request::Attach {
                    attachment,
                    ifindex,
                },
                reply,
            ) => {
                if self.pending.get(&attachment) == Some(&connection) {
                    self.attach(attachment, ifindex, reply);
                } else {
                    let _ = reply.send(Reply::Error(unknown(&attachment)));
                }
            }
            Command::Call(connection, request @ Request::Add { .. }, reply)
                if !self.not_ready().is_empty() =>
            {
                self.early.push(Early {
                    connection,
                    request,
                    deadline: Instant::now() + READY_WITHIN,
                    reply,
                });
            }
            Command::Call(connection, request, reply) => {
                let answer = self.call(connection, request);
                let answer = answer.unwrap_or_else(Reply::Error);
                let _ = reply.send(answer);
            }
        }
    }

    /// Takes up the ADDs that came before the agent was ready, once it is; those that waited too
    /// long hear what is missing.
    pub(super) fn answer_early(&mut self, now: Instant) {
        if self.early.is_empty() {
            return;
        }
        let is_ready = self.not_ready().is_empty();
        for early in std::mem::take(&mut self.early) {
            if is_ready || now >= early.deadline {
                let answer = self.call(early.connection, early.request);
                // A caller who is gone has its connection's end seen to elsewhere.
                drop(early.reply.send(answer.unwrap_or_else(Reply::Error)));
            } else {
                self.early.push(early);
            }
        }
    }

    fn call(&mut self, connection: ConnectionId, request: Request) -> Result<Reply, AgentError> {
        match request {
            Request::Add {
                attachment,
                network,
                netns,
                pod,
                ips,
                mac,
                mtu,
            } => {
                let wanted = Wanted {
                    attachment,
                    network,
                    netns,
                    pod,
                    ips,
                    mac,
                    mtu,
                };
                self.add(connection, wanted)
            }
            Request::Del { attachment } => {
                self.pending.remove(&attachment);
                self.remove(&attachment)?;
                Ok(Reply::Done)
            }
            Request::Check { attachment } => self.check(&attachment),
            Request::Gc { network, valid } => {
                // Other networks of this plugin have lists of their own.
                let stale: Vec<_> = (self.endpoints.iter())
                    .filter(|endpoint| endpoint.network == network)
                    .map(|endpoint| endpoint.attachment.clone())
                    .filter(|held| !valid.contains(held) && !self.pending.contains_key(held))
                    .collect();
                let mut result = Ok(Reply::Done);
                for attachment in stale {
                    if let Err(error) = self.remove(&attachment) {
                        result = Err(error);
                    }
                }
                result
            }
            Request::Status => match self.not_ready() {
                reasons if reasons.is_empty() => Ok(Reply::Done),
                reasons => Err(agent_error(
                    code::NOT_READY,
                    "no pod can be added now",
                    reasons.join("; "),
                )),
            },
            Request::View { name } => self.view(&name),
            Request::Ask { name, arguments } => self.ask(&name, &arguments),
            Request::Attach { .. } => Err(agent_error(code::REFUSED, "not here", "")),
        }
    }

    fn add(&mut self, connection: ConnectionId, wanted: Wanted) -> Result<Reply, AgentError> {
        let attachment = wanted.attachment.clone();
        if self.pending.contains_key(&attachment) {
            let details = "another ADD of the same interface is under way";
            return Err(agent_error(code::TRY_AGAIN, "ADD refused", details));
        }
        let reasons = self.not_ready();
        if !reasons.is_empty() {
            let details = reasons.join("; ");
            return Err(agent_error(
                code::TRY_AGAIN,
                "the agent is not ready",
                details,
            ));
        }
        // The same ADD again: the runtime makes the interface anew, under the same names and
        // addresses.
        if self.datapath.pods().contains_key(&attachment) {
            self.close(&attachment);
        }
        let route_mtu = self.route_mtu().ok_or_else(|| {
            agent_error(
                code::TRY_AGAIN,
                "the path's MTU is not known",
                "no uplink is there",
            )
        })?;
        let endpoint = self.endpoints.reserve(wanted, route_mtu)?;
        let reply = Reply::Reserved(reservation(endpoint));
        tracing::info!(container = attachment.container_id, ips = ?endpoint.ips,
            device = endpoint.host_ifname, "addresses reserved");
        self.pending.insert(attachment, connection);
        Ok(reply)
    }

    /// MTU of pods' routes, in bytes.
    pub(super) fn route_mtu(&self) -> Option<u32> {
        let devices = self.underlay.uplinks().iter().flatten();
        let mut outer = devices.map(|uplink| uplink.device.mtu).min()?;
        if self.config.overlay.mtu > 0 {
            outer = outer.min(self.config.overlay.mtu);
        }
        let ipv4 = self.overlay().is_some_and(|overlay| overlay.ipv4.is_some());
        let path = outer.saturating_sub(if ipv4 { OVERHEAD_IPV4 } else { OVERHEAD_IPV6 });
        Some(match self.config.pods.mtu {
            0 => path,
            configured => configured.min(path),
        })
    }

    /// The second half: opens the link, publishes, and leaves the answer to
    /// [`Agent::answer_waiting`].
    fn attach(&mut self, attachment: Attachment, ifindex: u32, reply: oneshot::Sender<Reply>) {
        let opened = self
            .endpoints
            .attach(&attachment, ifindex)
            .cloned()
            .and_then(|endpoint| {
                self.datapath.open_pod(&endpoint).map_err(|details| {
                    // The device goes with the failed ADD.
                    remove_stale_pins(&endpoint.host_ifname);
                    let msg = format!("device {} cannot be opened", endpoint.host_ifname);
                    agent_error(code::DATAPATH, msg, details)
                })?;
                Ok(endpoint)
            });
        match opened {
            Ok(endpoint) => {
                self.state.set_endpoint(endpoint);
                self.waiting.push(Waiter {
                    attachment,
                    deadline: Instant::now() + ATTACH_WITHIN,
                    reply,
                });
                // Somebody waits for exactly this: no debounce.
                self.publish_endpoints();
            }
            Err(error) => {
                tracing::warn!(container = attachment.container_id, %error, "ADD failed");
                let _ = reply.send(Reply::Error(error));
            }
        }
    }

    /// Whether a waiting ADD can be answered.
    pub(super) fn verdict(
        &self,
        waiter: &Waiter,
        acknowledged: Generation,
        now: Instant,
    ) -> Option<Reply> {
        let attachment = &waiter.attachment;
        let Some(pod) = self.datapath.pods().get(attachment) else {
            return Some(Reply::Error(unknown(attachment)));
        };
        if pod.stats.refused.value() > 0 {
            let errno = i32::try_from(pod.stats.errno.value()).unwrap_or(0);
            let details = std::io::Error::from_raw_os_error(errno).to_string();
            return Some(Reply::Error(agent_error(
                code::DATAPATH,
                "the worker cannot take the link",
                details,
            )));
        }
        let complete = self.complete.get(attachment);
        if complete.is_some_and(|&generation| generation <= acknowledged) {
            let container = &attachment.container_id;
            tracing::info!(container, "every worker forwards for it");
            return Some(Reply::Attached);
        }
        (now >= waiter.deadline).then(|| {
            let details = match (complete, &pod.endpoint.pod) {
                (None, Some(pod)) => format!(
                    "pod {}/{} (uid {}) is not known yet, or has no identity",
                    pod.namespace, pod.name, pod.uid
                ),
                _ => "not every worker has taken the new tables".to_owned(),
            };
            tracing::warn!(
                container = attachment.container_id,
                details,
                "ADD timed out"
            );
            Reply::Error(agent_error(
                code::TRY_AGAIN,
                "the pod is not connected yet",
                details,
            ))
        })
    }

    fn check(&self, attachment: &Attachment) -> Result<Reply, AgentError> {
        let endpoint = self
            .endpoints
            .find(attachment)
            .ok_or_else(|| unknown(attachment))?;
        let disconnected = |reason: String| {
            let msg = format!("device {} is not connected", endpoint.host_ifname);
            Err(agent_error(code::DATAPATH, msg, reason))
        };
        let Some(pod) = self.datapath.pods().get(attachment) else {
            let reason = self.faults.endpoints.get(attachment).cloned();
            return disconnected(reason.unwrap_or_default());
        };
        let entry = self.datapath.tables().endpoint(pod.placed.id);
        if entry.is_none_or(|entry| entry.addresses != endpoint.ips) {
            let details = "the datapath's tables do not have it with its addresses";
            return disconnected(details.to_owned());
        }
        Ok(Reply::Reserved(reservation(endpoint)))
    }

    /// Closes an endpoint's link and device; its addresses stay its own.
    fn close(&mut self, attachment: &Attachment) {
        if let Err(error) = self.datapath.close_pod(attachment) {
            tracing::warn!(container = attachment.container_id, error, "closing a link");
        }
        self.state.remove_endpoint(attachment);
        self.complete.remove(attachment);
        self.faults.endpoints.remove(attachment);
        // Its number is not another's before the tables are without it.
        self.publish_endpoints();
    }

    /// Removes an endpoint and all that is its own; one that is not there is no fault.
    pub(super) fn remove(&mut self, attachment: &Attachment) -> Result<(), AgentError> {
        if self.datapath.pods().contains_key(attachment) {
            self.close(attachment);
        }
        self.state.remove_endpoint(attachment);
        self.faults.endpoints.remove(attachment);
        if let Some(endpoint) = self.endpoints.release(attachment)? {
            tracing::info!(container = attachment.container_id, ips = ?endpoint.ips, "removed");
        }
        Ok(())
    }
}

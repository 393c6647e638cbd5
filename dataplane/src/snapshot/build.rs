//! Makes the next publication from the last: the only place where tables change.
//!
//! Each step either holds all invariants of [`Snapshot`] or refuses with a reason and changes
//! nothing; each moves the epochs of exactly what it changes.

use std::net::IpAddr;
use std::sync::Arc;

use super::{
    Endpoint, EpochSlot, LinkEntry, LinkRole, Node, Peer, Prefix, RemotePod, Service, ServiceError,
    ServiceId, Snapshot, Tracked,
};
use crate::ids::{EndpointId, LinkId, PeerId, WorkerId};
use crate::policy::EndpointPolicy;

/// The most links of a node: link numbers are dense, so this bounds the workers' tables.
pub const MAX_LINKS: u32 = 4096;

/// Why a step was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// A link number beyond what workers hold.
    #[error("link {} is beyond the {MAX_LINKS} links of a node", .0.0)]
    LinkRange(LinkId),
    /// The link is in the tables already, for something else.
    #[error("link {} is in use", .0.0)]
    LinkInUse(LinkId),
    /// Two owners claim one address.
    #[error("address {address} belongs to {owner} already")]
    AddressTaken {
        /// The address.
        address: IpAddr,
        /// Who has it.
        owner: String,
    },
    /// Two peers claim one range.
    #[error("range {prefix} belongs to peer {} already", .owner.0)]
    PrefixTaken {
        /// The range.
        prefix: Prefix,
        /// Who has it.
        owner: PeerId,
    },
    /// A policy of an endpoint that is not in the tables.
    #[error("endpoint {} is not known", .0.0)]
    UnknownEndpoint(EndpointId),
    /// A peer that is not in the tables.
    #[error("peer {} is not known", .0.0)]
    UnknownPeer(PeerId),
    /// A peer that pods still refer to.
    #[error("peer {} still has pods, {address} for one", .peer.0)]
    PeerInUse {
        /// The peer.
        peer: PeerId,
        /// An address that refers to it.
        address: IpAddr,
    },
}

/// The next publication in the making.
#[derive(Debug)]
pub struct SnapshotBuilder {
    pub(super) next: Snapshot,
    moved: Vec<IpAddr>,
}

impl SnapshotBuilder {
    /// Starts from the last publication; until changed, all is as it was.
    #[must_use]
    pub fn new(last: &Snapshot) -> Self {
        let mut next = last.clone();
        next.generation = last.generation.next();
        Self::continuing(next)
    }

    /// Goes on with a publication that nobody has seen yet.
    #[must_use]
    pub fn continuing(unpublished: Snapshot) -> Self {
        Self {
            next: unpublished,
            moved: Vec::new(),
        }
    }

    /// Addresses of pods, here or elsewhere, that the tables have gained or lost in the making.
    #[must_use]
    pub fn moved(&self) -> &[IpAddr] {
        &self.moved
    }

    /// The next publication.
    #[must_use]
    pub fn finish(self) -> Snapshot {
        self.next
    }

    /// The tables as they stand in the making.
    #[must_use]
    pub fn tables(&self) -> &Snapshot {
        &self.next
    }

    /// Sets what is common to the node.
    pub fn set_node(&mut self, node: Node) {
        if *self.next.node != node {
            self.next.node = Arc::new(node);
            self.next.epochs.bump(EpochSlot::NODE);
        }
    }

    /// Adds a queue of an uplink device, owned by a worker.
    pub fn add_uplink_link(
        &mut self,
        id: LinkId,
        worker: WorkerId,
        uplink: u8,
    ) -> Result<(), BuildError> {
        self.place_link(
            id,
            LinkEntry {
                worker,
                role: LinkRole::Uplink(uplink),
            },
        )?;
        let links = self.next.uplinks.entry(uplink).or_default();
        Arc::make_mut(links).push(id);
        self.next.epochs.bump(EpochSlot::NODE);
        Ok(())
    }

    /// Removes a queue of an uplink device; does nothing for another link.
    pub fn remove_uplink_link(&mut self, id: LinkId) {
        let Some(LinkEntry {
            role: LinkRole::Uplink(uplink),
            ..
        }) = self.next.link(id)
        else {
            return;
        };
        self.next.links[id.0 as usize] = None;
        if let Some(links) = self.next.uplinks.get_mut(&uplink) {
            Arc::make_mut(links).retain(|&link| link != id);
        }
        self.next.epochs.bump(EpochSlot::NODE);
    }

    /// Sets the node's own network stack with its link and the link's owner, or takes it away.
    pub fn set_host(&mut self, host: Option<(Endpoint, WorkerId)>) -> Result<(), BuildError> {
        let before = self.next.host.clone();
        let old = before.as_ref().map(|host| host.link);
        let Some((host, worker)) = host else {
            if let Some(link) = old {
                self.next.links[link.0 as usize] = None;
                self.next.host = None;
                self.next.epochs.bump(EpochSlot::NODE);
            }
            return Ok(());
        };
        let entry = LinkEntry {
            worker,
            role: LinkRole::Host,
        };
        if before.is_some_and(|before| *before == host) && self.next.link(host.link) == Some(entry)
        {
            return Ok(());
        }
        if old == Some(host.link) {
            self.next.links[host.link.0 as usize] = Some(entry);
        } else {
            self.place_link(host.link, entry)?;
            if let Some(link) = old {
                self.next.links[link.0 as usize] = None;
            }
        }
        self.next.host = Some(Arc::new(host));
        self.next.epochs.bump(EpochSlot::NODE);
        Ok(())
    }

    /// Adds an endpoint with its link, or changes it.
    pub fn set_endpoint(&mut self, endpoint: Endpoint, worker: WorkerId) -> Result<(), BuildError> {
        let id = endpoint.id;
        let entry = LinkEntry {
            worker,
            role: LinkRole::Pod(id),
        };
        let before = self.next.endpoint(id).cloned();
        let same_link = before
            .as_ref()
            .is_some_and(|before| before.link == endpoint.link);
        if same_link
            && before.as_ref().is_some_and(|before| ***before == endpoint)
            && self.next.link(endpoint.link) == Some(entry)
        {
            return Ok(());
        }
        for &address in &endpoint.addresses {
            self.check_address(address, id)?;
        }
        if same_link {
            self.next.links[endpoint.link.0 as usize] = Some(entry);
        } else {
            self.place_link(endpoint.link, entry)?;
        }
        if let Some(before) = &before {
            if !same_link {
                self.next.links[before.link.0 as usize] = None;
            }
            for address in &before.addresses {
                self.next.local.remove(address);
                self.moved.push(*address);
            }
        }
        for &address in &endpoint.addresses {
            self.next.local.insert(address, id);
            self.moved.push(address);
            // Flows that led elsewhere until now must notice.
            match self.next.peer_of(address) {
                Some(peer) => self.bump_peer(peer),
                None => self.next.epochs.bump(EpochSlot::OUTSIDE),
            }
        }
        let epoch = self.moved_epoch(before.map(|before| before.epoch));
        self.next.endpoints.insert(
            id,
            Tracked {
                value: Arc::new(endpoint),
                epoch,
            },
        );
        Ok(())
    }

    /// Removes an endpoint and its link; does nothing when it is not there.
    pub fn remove_endpoint(&mut self, id: EndpointId) {
        let Some(endpoint) = self.next.endpoints.remove(&id) else {
            return;
        };
        for address in &endpoint.addresses {
            self.next.local.remove(address);
            self.moved.push(*address);
        }
        self.next.links[endpoint.link.0 as usize] = None;
        self.next.policies.remove(&id);
        self.next.epochs.release(endpoint.epoch);
    }

    /// Sets the policies of an endpoint. Its flows are judged anew when they differ from those
    /// before, and are left alone otherwise.
    pub fn set_policy(&mut self, id: EndpointId, policy: EndpointPolicy) -> Result<(), BuildError> {
        let epoch = self.next.endpoint(id).map(Tracked::epoch);
        let epoch = epoch.ok_or(BuildError::UnknownEndpoint(id))?;
        if self.next.policy(id).is(&policy) {
            return Ok(());
        }
        if policy == EndpointPolicy::OPEN {
            self.next.policies.remove(&id);
        } else {
            self.next.policies.insert(id, Arc::new(policy));
        }
        self.next.epochs.bump(epoch);
        Ok(())
    }

    /// Adds a peer, or changes it.
    pub fn set_peer(&mut self, peer: Peer) -> Result<(), BuildError> {
        let before = self.next.peer(peer.id).cloned();
        if before.as_ref().is_some_and(|before| ***before == peer) {
            return Ok(());
        }
        for &address in &peer.addresses {
            if let Some(owner) = self
                .next
                .peer_by_address(address)
                .filter(|&id| id != peer.id)
            {
                let owner = format!("peer {}", owner.0);
                return Err(BuildError::AddressTaken { address, owner });
            }
        }
        for &prefix in &peer.pod_prefixes {
            let owner = self.next.peer_by_prefix.exact(prefix).copied();
            if let Some(owner) = owner.filter(|&id| id != peer.id) {
                return Err(BuildError::PrefixTaken { prefix, owner });
            }
        }
        let has_what_it_had = before.as_ref().is_some_and(|before| {
            before.addresses == peer.addresses && before.pod_prefixes == peer.pod_prefixes
        });
        if !has_what_it_had {
            // What was outside until now may be the peer's.
            self.next.epochs.bump(EpochSlot::OUTSIDE);
        }
        self.forget_peer_lookups(peer.id);
        for &address in &peer.addresses {
            self.next.peer_by_address.insert(address, peer.id);
        }
        for &prefix in &peer.pod_prefixes {
            // A longer range takes addresses from the next shorter one that holds it.
            if let Some(other) = self.holder_of(prefix) {
                self.bump_peer(other);
            }
            self.next.peer_by_prefix.insert(prefix, peer.id);
        }
        let epoch = self.moved_epoch(before.map(|before| before.epoch));
        self.next.peers.insert(
            peer.id,
            Tracked {
                value: Arc::new(peer),
                epoch,
            },
        );
        Ok(())
    }

    /// Removes a peer, once no pod refers to it; does nothing when it is not there.
    pub fn remove_peer(&mut self, id: PeerId) -> Result<(), BuildError> {
        if self.next.peer(id).is_none() {
            return Ok(());
        }
        if let Some((address, _)) = self.next.remote_pods().find(|(_, pod)| pod.peer == id) {
            return Err(BuildError::PeerInUse { peer: id, address });
        }
        self.forget_peer_lookups(id);
        if let Some(peer) = self.next.peers.remove(&id) {
            self.next.epochs.release(peer.epoch);
        }
        Ok(())
    }

    /// Adds a pod on another node, or changes it.
    pub fn set_remote_pod(&mut self, address: IpAddr, pod: RemotePod) -> Result<(), BuildError> {
        let before = self.next.remote_pod(address).cloned();
        if before.as_ref().is_some_and(|before| **before == pod) {
            return Ok(());
        }
        if self.next.peer(pod.peer).is_none() {
            return Err(BuildError::UnknownPeer(pod.peer));
        }
        if let Some(owner) = self.next.local.get(&address) {
            let owner = format!("endpoint {}", owner.0);
            return Err(BuildError::AddressTaken { address, owner });
        }
        // Flows that its range led elsewhere until now must notice, and so must those to and from
        // addresses without a pod; all others go on undisturbed.
        if before.is_none() {
            self.moved.push(address);
            match self.next.peer_of(address) {
                Some(peer) if peer == pod.peer => self.next.epochs.bump(EpochSlot::STRANGERS),
                Some(peer) => self.bump_peer(peer),
                None => self.next.epochs.bump(EpochSlot::OUTSIDE),
            }
        }
        let epoch = self.moved_epoch(before.map(|before| before.epoch));
        self.next
            .remote
            .insert(address, Tracked { value: pod, epoch });
        Ok(())
    }

    /// Removes a pod on another node; does nothing when it is not there.
    pub fn remove_remote_pod(&mut self, address: IpAddr) {
        if let Some(pod) = self.next.remote.remove(&address) {
            self.moved.push(address);
            self.next.epochs.release(pod.epoch);
        }
    }

    /// Adds a Service (one port of it, in one address family), or changes it; its epoch moves
    /// only when it differs.
    pub fn set_service(&mut self, id: ServiceId, service: Service) -> Result<(), ServiceError> {
        let Snapshot {
            services, epochs, ..
        } = &mut self.next;
        services.set(id, service, epochs)
    }

    /// Removes a Service with its frontends; does nothing when it is not there.
    pub fn remove_service(&mut self, id: ServiceId) {
        let Snapshot {
            services, epochs, ..
        } = &mut self.next;
        services.remove(id, epochs);
    }

    /// The slot of an entry that is about to change, moved on; a new one for a new entry.
    fn moved_epoch(&mut self, before: Option<EpochSlot>) -> EpochSlot {
        match before {
            Some(epoch) => {
                self.next.epochs.bump(epoch);
                epoch
            }
            None => self.next.epochs.allocate(),
        }
    }

    /// Whose addresses these are until the range is a peer's own.
    fn holder_of(&self, prefix: Prefix) -> Option<PeerId> {
        (0..prefix.len())
            .rev()
            .filter_map(|len| Prefix::new(prefix.address(), len))
            .find_map(|wider| self.next.peer_by_prefix.exact(wider).copied())
    }

    fn bump_peer(&mut self, id: PeerId) {
        if let Some(peer) = self.next.peers.get(&id) {
            self.next.epochs.bump(peer.epoch);
        }
    }

    fn forget_peer_lookups(&mut self, id: PeerId) {
        let Some(peer) = self.next.peers.get(&id).cloned() else {
            return;
        };
        for address in &peer.addresses {
            self.next.peer_by_address.remove(address);
        }
        for &prefix in &peer.pod_prefixes {
            self.next.peer_by_prefix.remove(prefix);
        }
    }

    fn place_link(&mut self, id: LinkId, entry: LinkEntry) -> Result<(), BuildError> {
        if id.0 >= MAX_LINKS {
            return Err(BuildError::LinkRange(id));
        }
        if self.next.link(id).is_some() {
            return Err(BuildError::LinkInUse(id));
        }
        while self.next.links.len() <= id.0 as usize {
            self.next.links.push_back(None);
        }
        self.next.links[id.0 as usize] = Some(entry);
        Ok(())
    }

    fn check_address(&self, address: IpAddr, own: EndpointId) -> Result<(), BuildError> {
        let owner = match self.next.local.get(&address) {
            Some(&owner) if owner != own => format!("endpoint {}", owner.0),
            _ => match self.next.remote_pod(address) {
                Some(pod) => format!("a pod on peer {}", pod.peer.0),
                None => return Ok(()),
            },
        };
        Err(BuildError::AddressTaken { address, owner })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{endpoint, node, peer, remote};
    use crate::ids::IdentityId;

    fn with_both() -> Snapshot {
        let mut builder = SnapshotBuilder::new(&Snapshot::empty(node(1)));
        builder.set_endpoint(endpoint(1, 1), WorkerId(0)).unwrap();
        builder.set_endpoint(endpoint(1, 2), WorkerId(0)).unwrap();
        builder.set_peer(peer(1, 2)).unwrap();
        builder.set_peer(peer(1, 3)).unwrap();
        builder.finish()
    }

    #[test]
    fn contradictions_are_refused_and_change_nothing() {
        let tables = with_both();
        let mut builder = SnapshotBuilder::new(&tables);
        let mut twin = endpoint(1, 3);
        twin.addresses = endpoint(1, 1).addresses;
        assert!(matches!(
            builder.set_endpoint(twin, WorkerId(0)),
            Err(BuildError::AddressTaken { .. })
        ));
        let mut crowd = endpoint(1, 3);
        crowd.link = endpoint(1, 1).link;
        assert_eq!(
            builder.set_endpoint(crowd.clone(), WorkerId(0)),
            Err(BuildError::LinkInUse(crowd.link))
        );
        let mut twin = peer(1, 4);
        twin.pod_prefixes = peer(1, 2).pod_prefixes;
        assert!(matches!(
            builder.set_peer(twin),
            Err(BuildError::PrefixTaken { .. })
        ));
        let (address, mut pod) = remote(2, 9);
        pod.peer = PeerId(77);
        assert_eq!(
            builder.set_remote_pod(address, pod),
            Err(BuildError::UnknownPeer(PeerId(77)))
        );
        assert_eq!(builder.finish().endpoints().count(), 2);
    }

    #[test]
    fn a_change_moves_its_own_epoch_alone() {
        let tables = with_both();
        let stamp = |tables: &Snapshot, slot| tables.epochs().stamp(slot);
        let one = stamp(&tables, tables.endpoint(EndpointId(1)).unwrap().epoch());
        let two = stamp(&tables, tables.endpoint(EndpointId(2)).unwrap().epoch());
        let far = stamp(&tables, tables.peer(PeerId(2)).unwrap().epoch());
        let mut builder = SnapshotBuilder::new(&tables);
        let mut changed = endpoint(1, 1);
        changed.identity = IdentityId::UNMANAGED;
        builder.set_endpoint(changed, WorkerId(0)).unwrap();
        let next = builder.finish();
        assert_eq!(next.generation(), tables.generation().next());
        assert!(!next.epochs().holds(one));
        assert!(next.epochs().holds(two));
        assert!(next.epochs().holds(far));
    }

    #[test]
    fn pods_elsewhere_come_and_go_without_touching_flows_to_their_neighbours() {
        let tables = with_both();
        let far = tables
            .epochs()
            .stamp(tables.peer(PeerId(2)).unwrap().epoch());
        let mut builder = SnapshotBuilder::new(&tables);
        let (address, pod) = remote(2, 9);
        builder.set_remote_pod(address, pod).unwrap();
        assert!(builder.tables().epochs().holds(far));
        let own = builder.tables().remote_pod(address).unwrap().epoch();
        let known = builder.tables().epochs().stamp(own);
        builder
            .set_remote_pod(
                address,
                RemotePod {
                    peer: PeerId(3),
                    ..pod
                },
            )
            .unwrap();
        assert!(!builder.tables().epochs().holds(known));
        assert!(builder.tables().epochs().holds(far));
        builder.remove_remote_pod(address);
        assert!(builder.tables().epochs().holds(far));
        // An address of its range turns up on another node than the range says: flows that
        // followed the range must notice.
        builder
            .set_remote_pod(
                address,
                RemotePod {
                    peer: PeerId(3),
                    ..pod
                },
            )
            .unwrap();
        assert!(!builder.tables().epochs().holds(far));
    }

    #[test]
    fn a_range_within_anothers_is_noticed_also_where_a_still_longer_one_begins_with_it() {
        let with_range = |number, range: &str| Peer {
            pod_prefixes: vec![range.parse().unwrap()],
            ..peer(1, number)
        };
        let mut builder = SnapshotBuilder::new(&Snapshot::empty(node(1)));
        builder.set_peer(with_range(2, "10.0.0.0/8")).unwrap();
        builder.set_peer(with_range(3, "10.0.0.0/24")).unwrap();
        let tables = builder.finish();
        let wide = tables
            .epochs()
            .stamp(tables.peer(PeerId(2)).unwrap().epoch());
        let mut builder = SnapshotBuilder::new(&tables);
        builder.set_peer(with_range(4, "10.0.0.0/16")).unwrap();
        let next = builder.finish();
        let moved = next.peer_of("10.0.7.1".parse().unwrap());
        assert_eq!(moved, Some(PeerId(4)));
        assert!(!next.epochs().holds(wide));
    }

    #[test]
    fn a_policy_moves_its_endpoints_epoch_when_it_differs_and_goes_with_it() {
        let tables = with_both();
        let stamp = |tables: &Snapshot, id| {
            let slot = tables.endpoint(EndpointId(id)).unwrap().epoch();
            tables.epochs().stamp(slot)
        };
        let (one, two) = (stamp(&tables, 1), stamp(&tables, 2));
        let closed = || EndpointPolicy {
            ingress: Some(Arc::default()),
            ..EndpointPolicy::OPEN
        };
        let mut builder = SnapshotBuilder::new(&tables);
        builder.set_policy(EndpointId(1), closed()).unwrap();
        builder
            .set_policy(EndpointId(2), EndpointPolicy::OPEN)
            .unwrap();
        let unknown = builder.set_policy(EndpointId(9), closed());
        assert_eq!(unknown, Err(BuildError::UnknownEndpoint(EndpointId(9))));
        let next = builder.finish();
        assert!(!next.epochs().holds(one));
        assert!(next.epochs().holds(two));
        assert_eq!(*next.policy(EndpointId(1)), closed());
        let same = stamp(&next, 1);
        let mut builder = SnapshotBuilder::new(&next);
        builder.set_policy(EndpointId(1), closed()).unwrap();
        assert!(builder.tables().epochs().holds(same));
        builder.remove_endpoint(EndpointId(1));
        builder.set_endpoint(endpoint(1, 1), WorkerId(0)).unwrap();
        assert_eq!(
            *builder.tables().policy(EndpointId(1)),
            EndpointPolicy::OPEN
        );
        builder.set_policy(EndpointId(1), closed()).unwrap();
        let shut = stamp(builder.tables(), 1);
        builder
            .set_policy(EndpointId(1), EndpointPolicy::OPEN)
            .unwrap();
        assert!(!builder.finish().epochs().holds(shut));
    }

    #[test]
    fn setting_the_same_again_moves_nothing() {
        let tables = with_both();
        let one = tables
            .epochs()
            .stamp(tables.endpoint(EndpointId(1)).unwrap().epoch());
        let mut builder = SnapshotBuilder::new(&tables);
        builder.set_endpoint(endpoint(1, 1), WorkerId(0)).unwrap();
        builder.set_peer(peer(1, 2)).unwrap();
        let next = builder.finish();
        assert!(next.epochs().holds(one));
    }

    #[test]
    fn the_host_comes_changes_and_goes_with_its_link() {
        let tables = with_both();
        let node = tables.epochs().stamp(EpochSlot::NODE);
        let host = crate::fixtures::host(1);
        let mut builder = SnapshotBuilder::new(&tables);
        let mut crowd = host.clone();
        crowd.link = endpoint(1, 1).link;
        assert_eq!(
            builder.set_host(Some((crowd.clone(), WorkerId(0)))),
            Err(BuildError::LinkInUse(crowd.link))
        );
        assert!(builder.tables().host().is_none());
        let mut elsewhere = host.clone();
        elsewhere.link = LinkId(77);
        for wanted in [&host, &elsewhere] {
            let wanted = (wanted.clone(), WorkerId(0));
            builder.set_host(Some(wanted)).unwrap();
        }
        assert_eq!(builder.tables().link(host.link), None);
        let role = |tables: &Snapshot| tables.link(LinkId(77)).map(|entry| entry.role);
        assert_eq!(role(builder.tables()), Some(LinkRole::Host));
        assert!(!builder.tables().epochs().holds(node));
        let same = builder.tables().epochs().stamp(EpochSlot::NODE);
        builder.set_host(Some((elsewhere, WorkerId(0)))).unwrap();
        assert!(builder.tables().epochs().holds(same));
        builder.set_host(None).unwrap();
        assert_eq!(role(builder.tables()), None);
        assert!(!builder.finish().epochs().holds(same));
    }

    #[test]
    fn a_peer_goes_only_when_its_pods_are_gone() {
        let mut builder = SnapshotBuilder::new(&with_both());
        let (address, pod) = remote(2, 9);
        builder.set_remote_pod(address, pod).unwrap();
        assert!(matches!(
            builder.remove_peer(PeerId(2)),
            Err(BuildError::PeerInUse { .. })
        ));
        builder.remove_remote_pod(address);
        builder.remove_peer(PeerId(2)).unwrap();
        assert_eq!(builder.finish().peer_of(address), None);
    }
}

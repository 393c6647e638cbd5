//! The ways out of the cluster, and whose packets take another source on them.

use std::net::IpAddr;

use super::{EpochSlot, Lpm, Prefix, Snapshot, SnapshotBuilder, Tracked};
use crate::wire::ethernet::MacAddr;

/// A route by an uplink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Position of the uplink device in the configuration.
    pub uplink: u8,
    /// The next hop; `None` where destinations are on the link itself.
    pub gateway: Option<IpAddr>,
    /// MAC of the uplink.
    pub src_mac: MacAddr,
    /// The largest IP packet on this path, in bytes.
    pub mtu: u32,
}

/// Which packets to the outside come from the node's address.
#[derive(Clone, Debug, Default)]
pub struct Masquerade {
    /// Whether any do.
    pub enabled: bool,
    /// Ranges that are reached with the pod's own address.
    pub exclude: Vec<Prefix>,
}

/// What leads outside.
#[derive(Clone, Debug, Default)]
pub(super) struct Outside {
    /// `None`: no way, whatever wider routes say.
    exits: Lpm<Option<Exit>>,
    neighbours: imbl::HashMap<(u8, IpAddr), Tracked<MacAddr>>,
    masquerade: bool,
    exclude: Lpm<()>,
}

impl Snapshot {
    /// The route to an address outside.
    #[must_use]
    pub fn exit(&self, address: IpAddr) -> Option<&Exit> {
        self.outside.exits.lookup(address)?.as_ref()
    }

    /// The MAC of a host on an uplink's link. Control looks for those that workers ask about.
    #[must_use]
    pub fn neighbour(&self, uplink: u8, address: IpAddr) -> Option<&Tracked<MacAddr>> {
        self.outside.neighbours.get(&(uplink, address))
    }

    /// Whether packets to this address outside come from the node's.
    #[must_use]
    pub fn masquerades(&self, to: IpAddr) -> bool {
        self.outside.masquerade && self.outside.exclude.lookup(to).is_none()
    }
}

impl SnapshotBuilder {
    /// Sets all routes to the outside; `None` for destinations that no uplink leads to.
    pub fn set_exits(&mut self, exits: impl IntoIterator<Item = (Prefix, Option<Exit>)>) {
        let mut wanted: std::collections::BTreeMap<Prefix, Option<Exit>> =
            exits.into_iter().collect();
        let outside = &mut self.next.outside;
        let before: Vec<_> = outside
            .exits
            .iter()
            .map(|(prefix, exit)| (prefix, *exit))
            .collect();
        let mut changed = false;
        for (prefix, exit) in before {
            match wanted.remove(&prefix) {
                Some(same) if same == exit => {}
                Some(other) => {
                    outside.exits.insert(prefix, other);
                    changed = true;
                }
                None => {
                    outside.exits.remove(prefix);
                    changed = true;
                }
            }
        }
        for (prefix, exit) in wanted {
            outside.exits.insert(prefix, exit);
            changed = true;
        }
        if changed {
            self.next.epochs.bump(EpochSlot::OUTSIDE);
        }
    }

    /// Sets the MACs of hosts on the uplinks' links.
    pub fn set_neighbours(
        &mut self,
        neighbours: impl IntoIterator<Item = ((u8, IpAddr), MacAddr)>,
    ) {
        let mut wanted: std::collections::BTreeMap<_, _> = neighbours.into_iter().collect();
        let before: Vec<_> = (self.next.outside.neighbours.iter())
            .map(|(key, mac)| (*key, mac.clone()))
            .collect();
        for (key, known) in before {
            match wanted.remove(&key) {
                Some(same) if same == *known => {}
                Some(value) => {
                    let epoch = known.epoch();
                    self.next.epochs.bump(epoch);
                    let entry = Tracked { value, epoch };
                    self.next.outside.neighbours.insert(key, entry);
                }
                None => {
                    self.next.epochs.release(known.epoch());
                    self.next.outside.neighbours.remove(&key);
                }
            }
        }
        for (key, value) in wanted {
            let epoch = self.next.epochs.allocate();
            let entry = Tracked { value, epoch };
            self.next.outside.neighbours.insert(key, entry);
        }
    }

    /// Sets whose packets take the node's address.
    pub fn set_masquerade(&mut self, masquerade: &Masquerade) {
        let mut exclude = Lpm::default();
        for &prefix in &masquerade.exclude {
            exclude.insert(prefix, ());
        }
        let outside = &mut self.next.outside;
        let same = outside.masquerade == masquerade.enabled
            && outside.exclude.iter().count() == exclude.iter().count()
            && exclude
                .iter()
                .all(|(prefix, ())| outside.exclude.exact(prefix).is_some());
        if same {
            return;
        }
        outside.masquerade = masquerade.enabled;
        outside.exclude = exclude;
        self.next.epochs.bump(EpochSlot::OUTSIDE);
    }
}

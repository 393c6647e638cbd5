//! Addresses of this node's pods, out of the node's own ranges.
//!
//! An address that was never handed out goes first, then the one that was given back longest
//! ago, so that an address does not return while others still remember its last holder. Every
//! change is on disk before anybody hears of it. Deliberately absent: other nodes' ranges, and
//! any agreement with them; ranges do not overlap.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use skein_cni::agent::Attachment;

use crate::cidr::Cidr;
use crate::durable;

/// The most addresses of a range that are used: of an IPv6 range, the first ones.
const MAX_ADDRESSES: u128 = 1 << 16;

/// Why an address cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum IpamError {
    /// The node has no range (yet).
    #[error(
        "node has no address range yet: Node.spec.podCIDRs is empty or the Node object is not known"
    )]
    NoRange,
    /// All addresses of a family are handed out.
    #[error(
        "no {family} address is left in {ranges}: all {count} are in use; give the node a larger range or move pods away"
    )]
    Exhausted {
        /// IPv4 or IPv6.
        family: &'static str,
        /// The ranges.
        ranges: String,
        /// How many addresses they have.
        count: u128,
    },
    /// Somebody else has the address that was asked for.
    #[error("address {ip} is in use by container {container} interface {ifname}")]
    InUse {
        /// The address.
        ip: IpAddr,
        /// Its holder's container.
        container: String,
        /// Its holder's interface.
        ifname: String,
    },
    /// No pod may have the address that was asked for.
    #[error("address {ip} cannot be a pod's: {why}")]
    Unusable {
        /// The address.
        ip: IpAddr,
        /// Why.
        why: &'static str,
    },
    /// The file of allocations cannot be written or read.
    #[error("address file {file}: {source}")]
    Io {
        /// Which.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file of allocations is damaged.
    #[error("address file {file} is damaged ({reason}); remove it once no pod of this node runs")]
    Damaged {
        /// Which.
        file: PathBuf,
        /// What is wrong in it.
        reason: String,
    },
}

/// What is on disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    version: u32,
    /// Who holds what.
    held: Vec<(Attachment, Vec<IpAddr>)>,
    /// Given back, the longest ago first.
    released: VecDeque<IpAddr>,
}

const VERSION: u32 = 1;

/// The node's addresses.
#[derive(Debug)]
pub struct Ipam {
    file: PathBuf,
    ranges: Vec<Cidr>,
    held: BTreeMap<Attachment, Vec<IpAddr>>,
    holders: BTreeMap<IpAddr, Attachment>,
    released: VecDeque<IpAddr>,
    ever_released: BTreeSet<IpAddr>,
}

/// How full the ranges of a family are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Addresses handed out, those from outside the ranges not counted.
    pub used: usize,
    /// Addresses that pods may have.
    pub total: u128,
}

impl Ipam {
    /// Reads what an earlier agent left in the state directory.
    pub fn open(state_directory: &Path) -> Result<Self, IpamError> {
        let file = state_directory.join("ipam.json");
        let record = match fs::read(&file) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| IpamError::Damaged {
                file: file.clone(),
                reason: error.to_string(),
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Record {
                version: VERSION,
                ..Record::default()
            },
            Err(source) => return Err(IpamError::Io { file, source }),
        };
        if record.version != VERSION {
            let reason = format!("version {}, this agent writes {VERSION}", record.version);
            return Err(IpamError::Damaged { file, reason });
        }
        let mut ipam = Self {
            file,
            ranges: Vec::new(),
            held: BTreeMap::new(),
            holders: BTreeMap::new(),
            ever_released: record.released.iter().copied().collect(),
            released: record.released,
        };
        for (attachment, ips) in record.held {
            for &ip in &ips {
                if let Some(other) = ipam.holders.insert(ip, attachment.clone()) {
                    let reason = format!("{ip} is held by {} too", other.container_id);
                    let file = ipam.file;
                    return Err(IpamError::Damaged { file, reason });
                }
            }
            ipam.held.insert(attachment, ips);
        }
        Ok(ipam)
    }

    /// Sets the node's ranges; addresses that are handed out already stay.
    pub fn set_ranges(&mut self, ranges: &[Cidr]) {
        self.ranges = ranges.to_vec();
    }

    /// The node's ranges.
    #[must_use]
    pub fn ranges(&self) -> &[Cidr] {
        &self.ranges
    }

    /// Hands out an address of each family that the node has, or exactly those asked for. An
    /// attachment that holds some already gets the same ones.
    pub fn allocate(
        &mut self,
        attachment: &Attachment,
        requested: &[IpAddr],
    ) -> Result<Vec<IpAddr>, IpamError> {
        let twice = |(n, ip): &(usize, &IpAddr)| requested[..*n].contains(ip);
        if let Some((_, &ip)) = requested.iter().enumerate().find(twice) {
            let why = "it is asked for twice";
            return Err(IpamError::Unusable { ip, why });
        }
        if let Some(held) = self.held.get(attachment) {
            if requested.is_empty() || requested == held {
                return Ok(held.clone());
            }
            for &ip in requested {
                self.check_requested(ip, attachment)?;
            }
            self.release(attachment)?;
        }
        let ips = if requested.is_empty() {
            self.choose()?
        } else {
            for &ip in requested {
                self.check_requested(ip, attachment)?;
            }
            requested.to_vec()
        };
        for &ip in &ips {
            self.holders.insert(ip, attachment.clone());
            if self.ever_released.remove(&ip) {
                self.released.retain(|&other| other != ip);
            }
        }
        self.held.insert(attachment.clone(), ips.clone());
        self.save().inspect_err(|_| {
            // Nobody has heard of it: as if it had not been.
            for ip in self.held.remove(attachment).unwrap_or_default() {
                self.holders.remove(&ip);
                self.released.push_front(ip);
                self.ever_released.insert(ip);
            }
        })?;
        Ok(ips)
    }

    /// Takes an attachment's addresses back; one that holds none is no fault.
    pub fn release(&mut self, attachment: &Attachment) -> Result<(), IpamError> {
        let Some(ips) = self.held.remove(attachment) else {
            return Ok(());
        };
        for ip in ips {
            self.holders.remove(&ip);
            if self.in_ranges(ip) && self.ever_released.insert(ip) {
                self.released.push_back(ip);
            }
        }
        self.save()
    }

    /// Who holds addresses.
    pub fn holders(&self) -> impl Iterator<Item = &Attachment> {
        self.held.keys()
    }

    /// The first address of each range, which no pod gets: the node's own end.
    pub fn host_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.ranges
            .iter()
            .filter_map(|&range| nth(range, FIRST_USABLE - 1))
    }

    /// How full the ranges of a family are.
    #[must_use]
    pub fn usage(&self, ipv4: bool) -> Usage {
        let ranges = self
            .ranges
            .iter()
            .filter(|range| range.address().is_ipv4() == ipv4);
        Usage {
            used: (self.holders.keys())
                .filter(|ip| ip.is_ipv4() == ipv4 && self.in_ranges(**ip))
                .count(),
            total: ranges.map(|&range| usable(range)).sum(),
        }
    }

    fn in_ranges(&self, ip: IpAddr) -> bool {
        self.ranges.iter().any(|range| range.contains(ip))
    }

    fn choose(&self) -> Result<Vec<IpAddr>, IpamError> {
        if self.ranges.is_empty() {
            return Err(IpamError::NoRange);
        }
        let mut chosen = Vec::new();
        for (family, ipv4) in [("IPv4", true), ("IPv6", false)] {
            let ranges: Vec<_> = (self.ranges.iter().copied())
                .filter(|range| range.address().is_ipv4() == ipv4)
                .collect();
            if ranges.is_empty() {
                continue;
            }
            let fresh = ranges.iter().find_map(|&range| {
                (FIRST_USABLE..FIRST_USABLE + usable(range))
                    .filter_map(|n| nth(range, n))
                    .find(|ip| !self.holders.contains_key(ip) && !self.ever_released.contains(ip))
            });
            let oldest = || {
                let released = self.released.iter().copied();
                released.into_iter().find(|&ip| {
                    let reserved = |range: &&Cidr| reserved(**range, ip).is_some();
                    let range = ranges.iter().find(|range| range.contains(ip));
                    range.is_some_and(|range| !reserved(&range))
                })
            };
            let Some(ip) = fresh.or_else(oldest) else {
                let names: Vec<_> = ranges.iter().map(ToString::to_string).collect();
                return Err(IpamError::Exhausted {
                    family,
                    ranges: names.join(", "),
                    count: self.usage(ipv4).total,
                });
            };
            chosen.push(ip);
        }
        Ok(chosen)
    }

    /// An address that a configuration or another IPAM plugin chose may lie outside our ranges.
    fn check_requested(&self, ip: IpAddr, attachment: &Attachment) -> Result<(), IpamError> {
        let unusable = |why| Err(IpamError::Unusable { ip, why });
        let link_local = match ip {
            IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
            IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.to_ipv4_mapped().is_some(),
        };
        if ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || link_local {
            return unusable("not the address of one host in a network");
        }
        let range = self.ranges.iter().find(|range| range.contains(ip));
        if let Some(why) = range.and_then(|&range| reserved(range, ip)) {
            return unusable(why);
        }
        match self.holders.get(&ip) {
            Some(holder) if holder != attachment => Err(IpamError::InUse {
                ip,
                container: holder.container_id.clone(),
                ifname: holder.ifname.clone(),
            }),
            _ => Ok(()),
        }
    }

    fn save(&self) -> Result<(), IpamError> {
        let record = Record {
            version: VERSION,
            held: self.held.clone().into_iter().collect(),
            released: self.released.clone(),
        };
        serde_json::to_vec(&record)
            .map_err(io::Error::other)
            .and_then(|bytes| durable::write(&self.file, &bytes))
            .map_err(|source| IpamError::Io {
                file: self.file.clone(),
                source,
            })
    }
}

/// The range's address of that number; `None` beyond its end.
fn nth(range: Cidr, n: u128) -> Option<IpAddr> {
    let ip = match range.address() {
        IpAddr::V4(first) => IpAddr::V4(Ipv4Addr::from(
            u32::from(first).checked_add(u32::try_from(n).ok()?)?,
        )),
        IpAddr::V6(first) => IpAddr::V6(Ipv6Addr::from(u128::from(first).checked_add(n)?)),
    };
    range.contains(ip).then_some(ip)
}

fn size(range: Cidr) -> u128 {
    let bits = if range.address().is_ipv4() { 32 } else { 128 } - u32::from(range.prefix());
    1u128.checked_shl(bits).unwrap_or(u128::MAX)
}

/// Number of the first address that a pod may have: before it are the network's own (or the
/// subnet-router anycast address, RFC 4291 section 2.6.1) and the node's.
const FIRST_USABLE: u128 = 2;

/// How many addresses of a range pods may have.
fn usable(range: Cidr) -> u128 {
    let last = u128::from(range.address().is_ipv4());
    size(range)
        .saturating_sub(FIRST_USABLE + last)
        .min(MAX_ADDRESSES)
}

/// Why no pod may have an address of the range.
fn reserved(range: Cidr, ip: IpAddr) -> Option<&'static str> {
    if nth(range, 0) == Some(ip) {
        Some("it is the network's own address")
    } else if nth(range, 1) == Some(ip) {
        Some("it is the node's own end of the range")
    } else if ip.is_ipv4() && nth(range, size(range) - 1) == Some(ip) {
        Some("it is the network's broadcast address")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn attachment(n: u32) -> Attachment {
        Attachment {
            container_id: format!("c{n}"),
            ifname: "eth0".into(),
        }
    }

    fn open(folder: &Path, ranges: &[&str]) -> Ipam {
        let mut ipam = Ipam::open(folder).unwrap();
        let ranges: Vec<Cidr> = ranges.iter().map(|r| r.parse().unwrap()).collect();
        ipam.set_ranges(&ranges);
        ipam
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn both_families_are_handed_out_and_survive_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let ranges = ["10.1.0.0/24", "fd00:1::/64"];
        let mut ipam = open(folder.path(), &ranges);
        let first = ipam.allocate(&attachment(1), &[]).unwrap();
        assert_eq!(first, [ip("10.1.0.2"), ip("fd00:1::2")]);
        assert_eq!(ipam.allocate(&attachment(1), &[]).unwrap(), first);
        let hosts: Vec<_> = ipam.host_addresses().collect();
        assert_eq!(hosts, [ip("10.1.0.1"), ip("fd00:1::1")]);
        drop(ipam);
        let mut ipam = open(folder.path(), &ranges);
        assert_eq!(ipam.allocate(&attachment(1), &[]).unwrap(), first);
        assert_eq!(
            ipam.allocate(&attachment(2), &[]).unwrap()[0],
            ip("10.1.0.3")
        );
        assert_eq!(
            ipam.usage(true),
            Usage {
                used: 2,
                total: 253
            }
        );
    }

    #[test]
    fn an_address_returns_as_late_as_can_be() {
        let folder = tempfile::tempdir().unwrap();
        let mut ipam = open(folder.path(), &["10.1.0.0/29"]);
        let mut given = Vec::new();
        for n in 0..5 {
            given.push(ipam.allocate(&attachment(n), &[]).unwrap()[0]);
        }
        assert_eq!(given[4], ip("10.1.0.6"));
        let error = ipam.allocate(&attachment(9), &[]).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("no IPv4 address is left in 10.1.0.0/29: all 5")
        );
        for n in [3, 0, 4] {
            ipam.release(&attachment(n)).unwrap();
        }
        drop(ipam);
        let mut ipam = open(folder.path(), &["10.1.0.0/29"]);
        for n in [3, 0, 4] {
            let again = ipam.allocate(&attachment(n + 10), &[]).unwrap()[0];
            assert_eq!(again, given[n as usize]);
        }
    }

    #[test]
    fn addresses_that_are_asked_for_are_had_or_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut ipam = open(folder.path(), &["10.1.0.0/24"]);
        let wanted = [ip("10.1.0.77")];
        assert_eq!(ipam.allocate(&attachment(1), &wanted).unwrap(), wanted);
        let error = ipam.allocate(&attachment(2), &wanted).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("in use by container c1 interface eth0")
        );
        for (bad, why) in [
            ("10.1.0.0", "network's own"),
            ("10.1.0.1", "node's own"),
            ("10.1.0.255", "broadcast"),
            ("127.0.0.1", "one host"),
            ("224.0.0.1", "one host"),
            ("fe80::1", "one host"),
            ("0.0.0.0", "one host"),
        ] {
            let error = ipam.allocate(&attachment(2), &[ip(bad)]).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
        // Held twice, it would pass for two holders' when the file is read again.
        let error = ipam.allocate(&attachment(2), &[ip("10.1.0.9"); 2]);
        assert!(error.unwrap_err().to_string().contains("asked for twice"));
        Ipam::open(folder.path()).unwrap();
        // Another plugin's address, outside our ranges, is taken as it is.
        let outside = [ip("192.0.2.9")];
        assert_eq!(ipam.allocate(&attachment(3), &outside).unwrap(), outside);
        // Asking for others replaces what is held.
        assert_eq!(
            ipam.allocate(&attachment(1), &[ip("10.1.0.78")]).unwrap(),
            [ip("10.1.0.78")]
        );
        assert_eq!(ipam.allocate(&attachment(4), &wanted).unwrap(), wanted);
    }

    #[test]
    fn a_node_without_range_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let mut ipam = open(folder.path(), &[]);
        assert!(matches!(
            ipam.allocate(&attachment(1), &[]),
            Err(IpamError::NoRange)
        ));
        let mut tiny = open(folder.path(), &["10.0.0.0/31"]);
        assert!(matches!(
            tiny.allocate(&attachment(1), &[]),
            Err(IpamError::Exhausted { .. })
        ));
    }

    #[test]
    fn a_damaged_file_is_refused_with_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ipam.json");
        let twice = r#"{"version":1,"held":[
            [{"container_id":"a","ifname":"e"},["10.0.0.2"]],
            [{"container_id":"b","ifname":"e"},["10.0.0.2"]]],"released":[]}"#;
        for bad in ["", "{", r#"{"version":9,"held":[],"released":[]}"#, twice] {
            fs::write(&file, bad).unwrap();
            let error = Ipam::open(folder.path()).unwrap_err();
            assert!(error.to_string().contains("is damaged"), "{error}");
        }
    }

    #[test]
    fn what_cannot_be_written_has_not_been_handed_out() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        fs::create_dir(&state).unwrap();
        let mut ipam = open(&state, &["10.1.0.0/24"]);
        fs::rename(&state, folder.path().join("away")).unwrap();
        assert!(matches!(
            ipam.allocate(&attachment(1), &[]),
            Err(IpamError::Io { .. })
        ));
        assert_eq!(ipam.holders().count(), 0);
        fs::rename(folder.path().join("away"), &state).unwrap();
        ipam.allocate(&attachment(1), &[]).unwrap();
        assert_eq!(ipam.usage(true).used, 1);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Against a plain model: no address is held twice, none is lost, a restart changes
        /// nothing, and what is given back comes again in that order.
        #[test]
        fn it_does_as_the_plain_model(
            steps in prop::collection::vec((0u32..10, 0u8..4), 1..60),
        ) {
            let folder = tempfile::tempdir().unwrap();
            let ranges = ["10.1.0.0/29", "fd00::/125"];
            let mut ipam = open(folder.path(), &ranges);
            let mut model: BTreeMap<u32, Vec<IpAddr>> = BTreeMap::new();
            let mut free: VecDeque<u8> = (2..7).collect();
            for (who, what) in steps {
                match what {
                    0 => {
                        ipam.release(&attachment(who)).unwrap();
                        if let Some(ips) = model.remove(&who) {
                            let IpAddr::V4(v4) = ips[0] else { panic!("IPv4 comes first") };
                            free.push_back(v4.octets()[3]);
                        }
                    }
                    1 => {
                        drop(ipam);
                        ipam = open(folder.path(), &ranges);
                    }
                    _ => match ipam.allocate(&attachment(who), &[]) {
                        Ok(ips) => {
                            if let Some(held) = model.get(&who) {
                                prop_assert_eq!(held, &ips);
                            } else {
                                let n = free.pop_front().unwrap();
                                prop_assert_eq!(ips[0], IpAddr::from([10, 1, 0, n]));
                                model.insert(who, ips);
                            }
                        }
                        Err(IpamError::Exhausted { .. }) => prop_assert!(free.is_empty()),
                        Err(other) => return Err(TestCaseError::fail(other.to_string())),
                    },
                }
                let held: Vec<_> = model.values().flatten().copied().collect();
                let distinct: BTreeSet<_> = held.iter().copied().collect();
                prop_assert_eq!(held.len(), distinct.len());
                prop_assert_eq!(ipam.usage(true).used, model.len());
            }
        }
    }
}

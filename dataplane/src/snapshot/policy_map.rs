//! What one endpoint allows in one direction: immutable tables from the peer, the protocol and
//! the port to the rule that allows.
//!
//! A rule names its peers by identity, by address or by range, or names none and means all; and
//! it names ports, or none and means every protocol. Each way of naming peers is a table of its
//! own, and each is asked for every peer, since a range may hold the addresses of pods and nodes.
//!
//! ```text
//!  everyone ───────────────────┐
//!  identities: identity ─hash──┤
//!  addresses:  address  ─hash──┼──▶ [PortTable] ──▶ rule
//!  blocks:     address  ─LPM───┘
//! ```
//!
//! Peers that the same rules allow share one [`PortTable`], so a table's size is that of its
//! peers plus that of its rules, not their product. A look-up costs the same among ten rules and
//! among a hundred thousand. Deliberately absent: selectors, names of ports and whatever else
//! only control knows; and denials, since NetworkPolicy has none: what nothing allows is denied.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::fast::RandomState;

use super::lpm::{Lpm, Prefix};
use crate::ids::IdentityId;
use crate::wire::protocol;

/// A rule of a policy, by a number whose meaning control keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleId(pub u32);

/// A protocol whose ports a rule can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PortProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl PortProtocol {
    /// The protocol's number in an IP header.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => protocol::TCP,
            Self::Udp => protocol::UDP,
            Self::Sctp => protocol::SCTP,
        }
    }
}

/// Ports of a protocol, from the first to the last, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortRange {
    protocol: PortProtocol,
    first: u16,
    last: u16,
}

impl PortRange {
    /// The range; `None` when it ends before it begins.
    #[must_use]
    pub fn new(protocol: PortProtocol, first: u16, last: u16) -> Option<Self> {
        (first <= last).then_some(Self {
            protocol,
            first,
            last,
        })
    }

    /// One port.
    #[must_use]
    pub fn port(protocol: PortProtocol, port: u16) -> Self {
        Self {
            protocol,
            first: port,
            last: port,
        }
    }

    /// Every port of a protocol.
    #[must_use]
    pub fn every(protocol: PortProtocol) -> Self {
        Self {
            protocol,
            first: 0,
            last: u16::MAX,
        }
    }
}

/// Which ports a rule allows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RulePorts {
    /// The rule names none: every protocol, also those without ports.
    Every,
    /// These alone; none at all when the list is empty.
    Only(Vec<PortRange>),
}

/// Protocol and port in one number, so that ports of one protocol follow one another.
fn port_key(protocol: u8, port: u16) -> u32 {
    u32::from(protocol) << 16 | u32::from(port)
}

/// The ports that some rules allow together, and which of them allows each: the least by number
/// where several do.
#[derive(Clone, Debug, Default, PartialEq)]
struct PortTable {
    /// The rule that names no ports.
    every: Option<RuleId>,
    /// Single ports.
    single: HashMap<u32, RuleId, RandomState>,
    /// Longer ranges by their first port: `(first, last, rule)`, none overlapping another.
    ranges: Vec<(u32, u32, RuleId)>,
}

impl PortTable {
    fn new(rules: &[(RuleId, Arc<RulePorts>)]) -> Self {
        let mut table = Self::default();
        // Where a range begins and where it has ended, as changes of the set of rules that hold.
        let mut edges: BTreeMap<u32, Vec<(bool, RuleId)>> = BTreeMap::new();
        for (rule, ports) in rules {
            match &**ports {
                RulePorts::Every => {
                    table.every = Some(table.every.map_or(*rule, |least| least.min(*rule)));
                }
                RulePorts::Only(ranges) => {
                    for range in ranges {
                        let number = range.protocol.number();
                        let first = port_key(number, range.first);
                        let end = port_key(number, range.last) + 1;
                        edges.entry(first).or_default().push((true, *rule));
                        edges.entry(end).or_default().push((false, *rule));
                    }
                }
            }
        }
        let mut holding: BTreeMap<RuleId, usize> = BTreeMap::new();
        let mut from = 0;
        for (at, changes) in edges {
            if let Some((&rule, _)) = holding.first_key_value() {
                table.add(from, at - 1, rule);
            }
            for (begins, rule) in changes {
                let count = holding.entry(rule).or_default();
                if begins {
                    *count += 1;
                } else {
                    // Each range begins before it ends, and edges come in order.
                    *count -= 1;
                    if *count == 0 {
                        holding.remove(&rule);
                    }
                }
            }
            from = at;
        }
        table
    }

    fn add(&mut self, first: u32, last: u32, rule: RuleId) {
        if first == last {
            self.single.insert(first, rule);
        } else {
            self.ranges.push((first, last, rule));
        }
    }

    fn lookup(&self, protocol: u8, port: u16) -> Option<RuleId> {
        self.every.or_else(|| {
            let key = port_key(protocol, port);
            self.single.get(&key).copied().or_else(|| {
                let after = self.ranges.partition_point(|&(first, _, _)| first <= key);
                let (_, last, rule) = *self.ranges.get(after.checked_sub(1)?)?;
                (key <= last).then_some(rule)
            })
        })
    }
}

/// Position of a port table in [`Rules::tables`].
type TableIndex = u32;

/// All that an isolated endpoint allows in one direction; nothing, by default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rules {
    tables: Vec<PortTable>,
    everyone: Option<TableIndex>,
    identities: HashMap<IdentityId, TableIndex, RandomState>,
    addresses: HashMap<IpAddr, TableIndex, RandomState>,
    blocks: Lpm<TableIndex>,
}

impl Rules {
    /// The rule that allows this peer this port; the port counts for TCP, UDP and SCTP alone.
    #[must_use]
    pub fn lookup(
        &self,
        identity: IdentityId,
        address: IpAddr,
        protocol: u8,
        port: u16,
    ) -> Option<RuleId> {
        let allows = |index: &TableIndex| self.tables[*index as usize].lookup(protocol, port);
        (self.everyone.as_ref().and_then(allows))
            .or_else(|| self.identities.get(&identity).and_then(allows))
            .or_else(|| self.addresses.get(&address).and_then(allows))
            .or_else(|| self.blocks.lookup(address).and_then(allows))
    }
}

/// The port tables in the making: one for each different set of rules.
#[derive(Debug, Default)]
struct Tables {
    made: Vec<PortTable>,
    by_rules: HashMap<Vec<usize>, TableIndex, RandomState>,
}

impl Tables {
    /// The table of these rules, given by their positions in `rules`, in order.
    fn of(&mut self, wanted: &[usize], rules: &[(RuleId, Arc<RulePorts>)]) -> TableIndex {
        if let Some(&index) = self.by_rules.get(wanted) {
            return index;
        }
        let of_rules: Vec<_> = wanted.iter().map(|&at| rules[at].clone()).collect();
        // Positions are 32 bits wide since a table is larger than four bytes by far.
        let index = self.made.len() as TableIndex;
        self.made.push(PortTable::new(&of_rules));
        self.by_rules.insert(wanted.to_vec(), index);
        index
    }
}

/// Gathers rules; [`finish`](Self::finish) makes the tables.
#[derive(Debug, Default)]
pub struct RulesBuilder {
    rules: Vec<(RuleId, Arc<RulePorts>)>,
    positions: HashMap<(RuleId, Arc<RulePorts>), usize, RandomState>,
    everyone: Vec<usize>,
    identities: BTreeMap<IdentityId, Vec<usize>>,
    addresses: BTreeMap<IpAddr, Vec<usize>>,
    blocks: Vec<Block>,
}

#[derive(Debug)]
struct Block {
    range: Prefix,
    except: Vec<Prefix>,
    rule: usize,
}

impl RulesBuilder {
    /// Allows every peer these ports.
    pub fn everyone(&mut self, rule: RuleId, ports: &Arc<RulePorts>) {
        let at = self.position(rule, ports);
        self.everyone.push(at);
    }

    /// Allows an identity these ports.
    pub fn identity(&mut self, identity: IdentityId, rule: RuleId, ports: &Arc<RulePorts>) {
        let at = self.position(rule, ports);
        self.identities.entry(identity).or_default().push(at);
    }

    /// Allows an address these ports.
    pub fn address(&mut self, address: IpAddr, rule: RuleId, ports: &Arc<RulePorts>) {
        let at = self.position(rule, ports);
        self.addresses.entry(address).or_default().push(at);
    }

    /// Allows the addresses of a range these ports, but for those of the ranges within it.
    pub fn block(
        &mut self,
        range: Prefix,
        except: Vec<Prefix>,
        rule: RuleId,
        ports: &Arc<RulePorts>,
    ) {
        let rule = self.position(rule, ports);
        self.blocks.push(Block {
            range,
            except,
            rule,
        });
    }

    /// The tables.
    #[must_use]
    pub fn finish(mut self) -> Rules {
        let mut tables = Tables::default();
        let rules = &self.rules;
        let mut table = |mut of: Vec<usize>| {
            of.sort_unstable();
            of.dedup();
            tables.of(&of, rules)
        };
        let everyone = std::mem::take(&mut self.everyone);
        let everyone = (!everyone.is_empty()).then(|| table(everyone));
        let identities = (self.identities.into_iter())
            .map(|(identity, of)| (identity, table(of)))
            .collect();
        let addresses = (self.addresses.into_iter())
            .map(|(address, of)| (address, table(of)))
            .collect();
        let blocks = blocks(&self.blocks, &mut table);
        Rules {
            tables: tables.made,
            everyone,
            identities,
            addresses,
            blocks,
        }
    }

    fn position(&mut self, rule: RuleId, ports: &Arc<RulePorts>) -> usize {
        match self.positions.entry((rule, ports.clone())) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(free) => {
                self.rules.push((rule, ports.clone()));
                *free.insert(self.rules.len() - 1)
            }
        }
    }
}

/// What begins and what ends where a prefix is entered, as positions in the list of blocks.
#[derive(Default)]
struct Boundary {
    begin: Vec<usize>,
    end: Vec<usize>,
}

/// For each prefix that any block names, the blocks that hold for the addresses of which it is
/// the longest such prefix: those whose range is around it and none of whose exceptions is.
///
/// Sorted by address and then by length, a prefix comes right behind those around it, so one
/// walk with a stack of the prefixes around sees each of them once.
fn blocks(blocks: &[Block], table: &mut impl FnMut(Vec<usize>) -> TableIndex) -> Lpm<TableIndex> {
    let mut boundaries: BTreeMap<Prefix, Boundary> = BTreeMap::new();
    for (at, block) in blocks.iter().enumerate() {
        boundaries.entry(block.range).or_default().begin.push(at);
        for &except in &block.except {
            boundaries.entry(except).or_default().end.push(at);
        }
    }
    let mut lpm = Lpm::default();
    let mut around: Vec<(Prefix, BTreeSet<usize>)> = Vec::new();
    for (prefix, boundary) in boundaries {
        while around
            .pop_if(|(outer, _)| !outer.contains(prefix.address()))
            .is_some()
        {}
        let mut holding = around
            .last()
            .map(|(_, set)| set.clone())
            .unwrap_or_default();
        holding.extend(boundary.begin);
        for at in boundary.end {
            holding.remove(&at);
        }
        let rules = holding.iter().map(|&at| blocks[at].rule).collect();
        lpm.insert(prefix, table(rules));
        around.push((prefix, holding));
    }
    lpm
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use proptest::prelude::*;

    use super::*;

    /// How a rule of the naive model names its peers.
    #[derive(Clone, Debug)]
    enum Peers {
        Everyone,
        Identity(IdentityId),
        Address(IpAddr),
        Block(Prefix, Vec<Prefix>),
    }

    type Model = Vec<(RuleId, Peers, RulePorts)>;

    fn build(model: &Model) -> Rules {
        let mut builder = RulesBuilder::default();
        for (rule, peers, ports) in model {
            let ports = Arc::new(ports.clone());
            match peers {
                Peers::Everyone => builder.everyone(*rule, &ports),
                Peers::Identity(identity) => builder.identity(*identity, *rule, &ports),
                Peers::Address(address) => builder.address(*address, *rule, &ports),
                Peers::Block(range, except) => {
                    builder.block(*range, except.clone(), *rule, &ports);
                }
            }
        }
        builder.finish()
    }

    /// Every rule that allows, by going through all of them.
    fn allowing(
        model: &Model,
        (identity, address, protocol, port): (IdentityId, IpAddr, u8, u16),
    ) -> Vec<RuleId> {
        let names_peer = |peers: &Peers| match peers {
            Peers::Everyone => true,
            Peers::Identity(named) => *named == identity,
            Peers::Address(named) => *named == address,
            Peers::Block(range, except) => {
                range.contains(address) && !except.iter().any(|hole| hole.contains(address))
            }
        };
        let names_port = |ports: &RulePorts| match ports {
            RulePorts::Every => true,
            RulePorts::Only(ranges) => ranges.iter().any(|range| {
                range.protocol.number() == protocol && (range.first..=range.last).contains(&port)
            }),
        };
        (model.iter())
            .filter(|(_, peers, ports)| names_peer(peers) && names_port(ports))
            .map(|(rule, _, _)| *rule)
            .collect()
    }

    fn identity() -> impl Strategy<Value = IdentityId> {
        (1u32..6).prop_map(|number| IdentityId::new(number).unwrap())
    }

    /// Few distinct bits, so that ranges lie in one another.
    fn address() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            any::<[bool; 4]>().prop_map(|bits| {
                let bits = bits.iter().fold(0, |acc, &bit| acc << 8 | u32::from(bit));
                IpAddr::V4(Ipv4Addr::from_bits(bits))
            }),
            any::<[bool; 4]>().prop_map(|bits| {
                let bits = bits.iter().fold(0, |acc, &bit| acc << 32 | u128::from(bit));
                IpAddr::V6(Ipv6Addr::from_bits(bits))
            }),
        ]
    }

    fn block() -> impl Strategy<Value = Peers> {
        let lengths = prop::collection::vec(0u8..=128, 0..4);
        (address(), 0u8..=128, lengths).prop_map(|(address, len, holes)| {
            let width = if address.is_ipv4() { 32 } else { 128 };
            let range = Prefix::new(address, len % (width + 1)).unwrap();
            let holes = (holes.into_iter())
                .map(|hole| hole % (width + 1))
                .filter(|&hole| hole > range.len())
                .filter_map(|hole| Prefix::new(address, hole))
                .collect();
            Peers::Block(range, holes)
        })
    }

    fn ports() -> impl Strategy<Value = RulePorts> {
        let protocol = prop_oneof![
            Just(PortProtocol::Tcp),
            Just(PortProtocol::Udp),
            Just(PortProtocol::Sctp),
        ];
        let edge = prop_oneof![0u16..12, (u16::MAX - 3)..=u16::MAX];
        let range = (protocol, edge.clone(), edge)
            .prop_map(|(protocol, a, b)| PortRange::new(protocol, a.min(b), a.max(b)).unwrap());
        prop_oneof![
            1 => Just(RulePorts::Every),
            6 => prop::collection::vec(range, 0..4).prop_map(RulePorts::Only),
        ]
    }

    fn model() -> impl Strategy<Value = Model> {
        let peers = prop_oneof![
            1 => Just(Peers::Everyone),
            3 => identity().prop_map(Peers::Identity),
            3 => address().prop_map(Peers::Address),
            6 => block(),
        ];
        prop::collection::vec((peers, ports()), 0..12).prop_map(|rules| {
            let numbered = (0..).zip(rules);
            numbered
                .map(|(number, (peers, ports))| (RuleId(number), peers, ports))
                .collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn agrees_with_going_through_all_rules(
            model in model(),
            probes in prop::collection::vec(
                (identity(), address(), prop::sample::select(vec![1u8, 6, 17, 58, 132]), 0u16..14),
                24,
            ),
        ) {
            let rules = build(&model);
            for probe in probes {
                let allowing = allowing(&model, probe);
                let (identity, address, protocol, port) = probe;
                match rules.lookup(identity, address, protocol, port) {
                    Some(rule) => prop_assert!(allowing.contains(&rule), "{rule:?}: {probe:?}"),
                    None => prop_assert_eq!(&allowing, &vec![], "{:?}", probe),
                }
            }
            prop_assert_eq!(&rules, &build(&model));
        }
    }

    #[test]
    fn the_least_rule_is_named_where_several_allow_a_port() {
        let range = |first, last| PortRange::new(PortProtocol::Tcp, first, last).unwrap();
        let model = vec![
            (
                RuleId(2),
                Peers::Everyone,
                RulePorts::Only(vec![range(80, 90)]),
            ),
            (
                RuleId(1),
                Peers::Everyone,
                RulePorts::Only(vec![range(85, 85)]),
            ),
        ];
        let rules = build(&model);
        let named = |port| {
            let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
            rules.lookup(IdentityId::UNMANAGED, address, protocol::TCP, port)
        };
        let found: Vec<_> = [79, 80, 84, 85, 86, 90, 91].map(named).into();
        let two = Some(RuleId(2));
        assert_eq!(found, [None, two, two, Some(RuleId(1)), two, two, None]);
    }

    #[test]
    fn peers_of_the_same_rules_share_their_ports() {
        let mut builder = RulesBuilder::default();
        let ports = Arc::new(RulePorts::Only(vec![PortRange::every(PortProtocol::Tcp)]));
        for number in 1..=1000 {
            let identity = IdentityId::new(number).unwrap();
            for rule in 0..10 {
                builder.identity(identity, RuleId(rule), &ports);
            }
        }
        let rules = builder.finish();
        assert_eq!(rules.identities.len(), 1000);
        assert_eq!(rules.tables.len(), 1);
    }
}

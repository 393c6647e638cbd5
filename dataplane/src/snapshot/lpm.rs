//! Longest-prefix match over IPv4 and IPv6 prefixes.
//!
//! One persistent hash map of (prefix length, masked address), looked up once for each length
//! that occurs: pod ranges come in a handful of lengths, and only flow-table misses ask.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An address range in CIDR form; the host bits are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Prefix {
    address: IpAddr,
    len: u8,
}

impl Prefix {
    /// The range of that length that holds `address`; `None` when `len` is too large.
    #[must_use]
    pub fn new(address: IpAddr, len: u8) -> Option<Self> {
        let address = match address {
            IpAddr::V4(v4) if len <= 32 => {
                let mask = u32::MAX.checked_shl(32 - u32::from(len)).unwrap_or(0);
                IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits() & mask))
            }
            IpAddr::V6(v6) if len <= 128 => {
                let mask = u128::MAX.checked_shl(128 - u32::from(len)).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & mask))
            }
            _ => return None,
        };
        Some(Self { address, len })
    }

    /// The lowest address of the range.
    #[must_use]
    pub fn address(self) -> IpAddr {
        self.address
    }

    /// The length, in bits.
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "a prefix length, not a container's"
    )]
    pub fn len(self) -> u8 {
        self.len
    }

    /// Whether the address lies in the range.
    #[must_use]
    pub fn contains(self, address: IpAddr) -> bool {
        address.is_ipv4() == self.address.is_ipv4() && Self::new(address, self.len) == Some(self)
    }
}

impl std::fmt::Display for Prefix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.address, self.len)
    }
}

impl std::str::FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fault = || format!("{text}: not a range such as 10.244.1.0/24 or fd00::/64");
        let (address, len) = text.split_once('/').ok_or_else(fault)?;
        let address = address.parse().map_err(|_| fault())?;
        len.parse()
            .ok()
            .and_then(|len| Self::new(address, len))
            .ok_or_else(fault)
    }
}

/// Prefixes and their values; cloning shares.
#[derive(Clone, Debug, PartialEq)]
pub struct Lpm<T: Clone> {
    entries: imbl::HashMap<Prefix, T>,
    /// How many prefixes of each length, longest first.
    v4_lengths: imbl::OrdMap<std::cmp::Reverse<u8>, usize>,
    v6_lengths: imbl::OrdMap<std::cmp::Reverse<u8>, usize>,
}

impl<T: Clone> Default for Lpm<T> {
    fn default() -> Self {
        Self {
            entries: imbl::HashMap::new(),
            v4_lengths: imbl::OrdMap::new(),
            v6_lengths: imbl::OrdMap::new(),
        }
    }
}

impl<T: Clone> Lpm<T> {
    /// Sets a prefix's value; the one before is returned.
    pub fn insert(&mut self, prefix: Prefix, value: T) -> Option<T> {
        let before = self.entries.insert(prefix, value);
        if before.is_none() {
            *self
                .lengths(prefix)
                .entry(std::cmp::Reverse(prefix.len))
                .or_insert(0) += 1;
        }
        before
    }

    /// Removes a prefix.
    pub fn remove(&mut self, prefix: Prefix) -> Option<T> {
        let before = self.entries.remove(&prefix)?;
        let lengths = self.lengths(prefix);
        let key = std::cmp::Reverse(prefix.len);
        let left = lengths.get(&key).copied().unwrap_or(0).saturating_sub(1);
        if left == 0 {
            lengths.remove(&key);
        } else {
            lengths.insert(key, left);
        }
        Some(before)
    }

    /// The value of exactly this prefix.
    #[must_use]
    pub fn exact(&self, prefix: Prefix) -> Option<&T> {
        self.entries.get(&prefix)
    }

    /// The value of the longest prefix that holds the address.
    #[must_use]
    pub fn lookup(&self, address: IpAddr) -> Option<&T> {
        let lengths = if address.is_ipv4() {
            &self.v4_lengths
        } else {
            &self.v6_lengths
        };
        lengths
            .keys()
            .filter_map(|len| Prefix::new(address, len.0))
            .find_map(|prefix| self.entries.get(&prefix))
    }

    /// All prefixes, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (Prefix, &T)> {
        self.entries.iter().map(|(&prefix, value)| (prefix, value))
    }

    fn lengths(&mut self, prefix: Prefix) -> &mut imbl::OrdMap<std::cmp::Reverse<u8>, usize> {
        match prefix.address {
            IpAddr::V4(_) => &mut self.v4_lengths,
            IpAddr::V6(_) => &mut self.v6_lengths,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn address() -> impl Strategy<Value = IpAddr> {
        // Few distinct bits, so that prefixes overlap.
        prop_oneof![
            any::<[bool; 4]>().prop_map(|b| {
                let bits = b.iter().fold(0u32, |acc, &bit| acc << 8 | u32::from(bit));
                IpAddr::V4(Ipv4Addr::from_bits(bits))
            }),
            any::<[bool; 4]>().prop_map(|b| {
                let bits = b
                    .iter()
                    .fold(0u128, |acc, &bit| acc << 32 | u128::from(bit));
                IpAddr::V6(Ipv6Addr::from_bits(bits))
            }),
        ]
    }

    proptest! {
        #[test]
        fn agrees_with_a_linear_scan(
            ops in prop::collection::vec((address(), 0u8..=128, any::<bool>()), 0..40),
            probes in prop::collection::vec(address(), 20),
        ) {
            let mut lpm = Lpm::default();
            let mut model: Vec<(Prefix, usize)> = Vec::new();
            for (index, (address, len, insert)) in ops.into_iter().enumerate() {
                let Some(prefix) = Prefix::new(address, len) else { continue };
                let before = model.iter().position(|(p, _)| *p == prefix)
                    .map(|at| model.swap_remove(at).1);
                if insert {
                    prop_assert_eq!(lpm.insert(prefix, index), before);
                    model.push((prefix, index));
                } else {
                    prop_assert_eq!(lpm.remove(prefix), before);
                }
            }
            for probe in probes {
                let expected = model.iter().filter(|(p, _)| p.contains(probe))
                    .max_by_key(|(p, _)| p.len()).map(|(_, v)| v);
                prop_assert_eq!(lpm.lookup(probe), expected);
            }
        }
    }

    #[test]
    fn a_prefix_drops_its_host_bits_and_reads_back() {
        let prefix: Prefix = "10.1.2.3/16".parse().unwrap();
        assert_eq!(prefix.to_string(), "10.1.0.0/16");
        assert!("10.0.0.0/33".parse::<Prefix>().is_err());
        assert!("fd00::/129".parse::<Prefix>().is_err());
        assert!("10.0.0.0".parse::<Prefix>().is_err());
    }
}

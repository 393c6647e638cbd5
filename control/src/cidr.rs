//! Address ranges in CIDR notation (RFC 4632, RFC 4291 section 2.3).

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// A range of addresses: its first address and the number of leading bits that all share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cidr {
    address: IpAddr,
    prefix: u8,
}

/// Why a text is no range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CidrError {
    /// Not `address/bits`.
    #[error("'{0}' is not a range like 10.0.0.0/24 or fd00::/64")]
    Syntax(String),
    /// More bits than the address has, or bits set behind the prefix.
    #[error("'{0}' has bits set behind its prefix; the range is written {1}")]
    HostBits(String, Cidr),
}

impl Cidr {
    /// The range of `prefix` bits that holds the address; `None` if it has fewer bits.
    #[must_use]
    pub fn containing(address: IpAddr, prefix: u8) -> Option<Self> {
        let masked = match address {
            IpAddr::V4(v4) if prefix <= 32 => {
                let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
                IpAddr::V4((u32::from(v4) & mask).into())
            }
            IpAddr::V6(v6) if prefix <= 128 => {
                let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
                IpAddr::V6((u128::from(v6) & mask).into())
            }
            _ => return None,
        };
        Some(Self {
            address: masked,
            prefix,
        })
    }

    /// The first address.
    #[must_use]
    pub fn address(self) -> IpAddr {
        self.address
    }

    /// How many leading bits all addresses share.
    #[must_use]
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// Whether the range holds the address; never for the other family.
    #[must_use]
    pub fn contains(self, address: IpAddr) -> bool {
        self.address.is_ipv4() == address.is_ipv4()
            && Self::containing(address, self.prefix) == Some(self)
    }

    /// Whether the two ranges share an address.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.contains(other.address) || other.contains(self.address)
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let syntax = || CidrError::Syntax(text.to_owned());
        let (address, prefix) = text.split_once('/').ok_or_else(syntax)?;
        let address: IpAddr = address.parse().map_err(|_| syntax())?;
        let prefix: u8 = prefix.parse().map_err(|_| syntax())?;
        let range = Self::containing(address, prefix).ok_or_else(syntax)?;
        if range.address == address {
            Ok(range)
        } else {
            Err(CidrError::HostBits(text.to_owned(), range))
        }
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl Serialize for Cidr {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_and_written() {
        for text in [
            "0.0.0.0/0",
            "10.1.2.0/24",
            "fd00::/64",
            "::/0",
            "10.0.0.1/32",
        ] {
            assert_eq!(text.parse::<Cidr>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "10.0.0.0",
            "10.0.0.0/33",
            "fd00::/129",
            "x/8",
            "10.0.0.0/-1",
        ] {
            assert!(
                matches!(text.parse::<Cidr>(), Err(CidrError::Syntax(_))),
                "{text}"
            );
        }
        let error = "10.1.2.3/24".parse::<Cidr>().unwrap_err();
        assert!(error.to_string().contains("10.1.2.0/24"));
    }

    #[test]
    fn containment_stays_in_the_family() {
        let all4: Cidr = "0.0.0.0/0".parse().unwrap();
        let all6: Cidr = "::/0".parse().unwrap();
        assert!(all4.contains("1.2.3.4".parse().unwrap()));
        assert!(!all4.contains("::1".parse().unwrap()));
        assert!(!all6.contains("1.2.3.4".parse().unwrap()));
        let net: Cidr = "10.1.0.0/16".parse().unwrap();
        assert!(net.overlaps("10.1.2.0/24".parse().unwrap()));
        assert!(!net.overlaps("10.2.0.0/16".parse().unwrap()));
    }
}

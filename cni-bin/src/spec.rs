//! What the CNI specification puts on the wire: versions, network configuration, result and
//! error, in the shapes of versions 0.3.1, 0.4.0, 1.0.0 and 1.1.0.
//!
//! Text comes in as JSON and leaves as checked values; what a command does with them is in
//! the file of that command.

mod conf;
mod error;
mod result;

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

pub(crate) use conf::is_identifier;
pub use conf::{Bandwidth, NetConf, PortMapping, RuntimeConfig};
pub use error::{CniError, code};
pub use result::{CniResult, Dns, Interface, IpConfig, RouteConfig};

/// A version of the specification that this plugin speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// 0.3.1: interfaces, addresses and routes as lists.
    V0_3_1,
    /// 0.4.0: adds CHECK.
    V0_4_0,
    /// 1.0.0: addresses lose their `version` field.
    V1_0_0,
    /// 1.1.0: adds GC and STATUS, and MTUs in results.
    V1_1_0,
}

impl Version {
    /// Every version, oldest first.
    pub const ALL: [Self; 4] = [Self::V0_3_1, Self::V0_4_0, Self::V1_0_0, Self::V1_1_0];

    /// The newest.
    pub const LATEST: Self = Self::V1_1_0;

    /// `1.1.0` and the like.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }

    /// Reads a `cniVersion`; one that is missing counts as too old.
    pub fn negotiate(text: Option<&str>) -> Result<Self, CniError> {
        let text = text.unwrap_or_default();
        Self::ALL
            .into_iter()
            .find(|version| version.as_str() == text)
            .ok_or_else(|| {
                let supported = Self::ALL.map(Self::as_str).join(", ");
                CniError::new(
                    code::INCOMPATIBLE_VERSION,
                    format!("cniVersion {text:?} is not supported"),
                    format!("set cniVersion in the network configuration to one of {supported}"),
                )
            })
    }
}

/// The answer to VERSION; `asked` is the `cniVersion` of the question, which it repeats.
pub fn version_reply(asked: Option<&str>) -> String {
    serde_json::json!({
        "cniVersion": asked.unwrap_or(Version::LATEST.as_str()),
        "supportedVersions": Version::ALL.map(Version::as_str),
    })
    .to_string()
}

/// An address with the length of its prefix, `10.1.2.3/24`; host bits may be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpPrefix {
    ip: IpAddr,
    len: u8,
}

/// Text that is no address with a prefix length.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an IP address with a prefix length, such as 10.1.2.3/24")]
pub struct InvalidPrefix(String);

impl IpPrefix {
    /// The host prefix (/32 or /128) of an address.
    pub fn host(ip: IpAddr) -> Self {
        let len = if ip.is_ipv4() { 32 } else { 128 };
        Self { ip, len }
    }

    /// `0.0.0.0/0` or `::/0`, by the family of `ip`.
    pub fn default_of(ip: IpAddr) -> Self {
        let ip = match ip {
            IpAddr::V4(_) => IpAddr::from([0; 4]),
            IpAddr::V6(_) => IpAddr::from([0_u8; 16]),
        };
        Self { ip, len: 0 }
    }

    /// The address.
    pub fn ip(self) -> IpAddr {
        self.ip
    }

    /// The prefix length in bits.
    pub fn prefix_len(self) -> u8 {
        self.len
    }
}

impl FromStr for IpPrefix {
    type Err = InvalidPrefix;

    fn from_str(text: &str) -> Result<Self, InvalidPrefix> {
        let invalid = || InvalidPrefix(text.to_owned());
        let (ip, len) = text.split_once('/').ok_or_else(invalid)?;
        let ip = ip.parse().map_err(|_| invalid())?;
        let host = Self::host(ip);
        if len.is_empty() || !len.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(invalid());
        }
        match len.parse() {
            Ok(len) if len <= host.len => Ok(Self { ip, len }),
            _ => Err(invalid()),
        }
    }
}

impl fmt::Display for IpPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.len)
    }
}

impl Serialize for IpPrefix {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for IpPrefix {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_version_reply_repeats_the_question() {
        assert_eq!(
            version_reply(Some("0.4.0")),
            r#"{"cniVersion":"0.4.0","supportedVersions":["0.3.1","0.4.0","1.0.0","1.1.0"]}"#
        );
        assert_eq!(
            version_reply(None),
            r#"{"cniVersion":"1.1.0","supportedVersions":["0.3.1","0.4.0","1.0.0","1.1.0"]}"#
        );
    }

    #[test]
    fn only_versions_of_the_list_are_spoken() {
        assert_eq!(Version::negotiate(Some("1.0.0")), Ok(Version::V1_0_0));
        for text in [None, Some(""), Some("0.2.0"), Some("1.2.0"), Some("1.0")] {
            let error = Version::negotiate(text).unwrap_err();
            assert_eq!(error.code, code::INCOMPATIBLE_VERSION);
        }
    }

    #[test]
    fn prefixes_that_are_none() {
        for text in [
            "",
            "/",
            "10.0.0.1",
            "10.0.0.1/",
            "10.0.0.1/33",
            "::1/129",
            "10.0.0.1/+8",
            "x/8",
            "10.0.0.1/8/8",
            "10.0.0/8",
        ] {
            assert!(text.parse::<IpPrefix>().is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn a_prefix_reads_back(ip: IpAddr, len in 0..=128_u8) {
            let len = len.min(IpPrefix::host(ip).len);
            let prefix = IpPrefix { ip, len };
            prop_assert_eq!(prefix.to_string().parse(), Ok(prefix));
        }
    }
}

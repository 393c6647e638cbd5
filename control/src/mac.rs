//! Ethernet addresses in records and views, and addresses made out of names.

use serde::{Deserialize, Deserializer, Serializer};
pub use skein_dataplane::wire::ethernet::MacAddr;

/// FNV-1a, 64 bits: small, and the same on every node and in every version. Not for secrets.
#[must_use]
pub fn fnv1a64(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// A locally administered address of one station out of a hash.
#[must_use]
pub fn from_hash(hash: u64) -> MacAddr {
    let [_, _, first, b, c, d, e, f] = hash.to_be_bytes();
    MacAddr([(first & 0xfc) | 0x02, b, c, d, e, f])
}

/// Writes an address as text: for `#[serde(with = "crate::mac")]`.
pub fn serialize<S: Serializer>(mac: &MacAddr, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(mac)
}

/// Reads an address from text: for `#[serde(with = "crate::mac")]`.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<MacAddr, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse()
        .map_err(|_| serde::de::Error::custom(format!("'{text}' is no MAC address")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashed_addresses_are_local_and_of_one_station() {
        for hash in [0, u64::MAX, 0x1234_5678_9abc_def0] {
            assert_eq!(from_hash(hash).0[0] & 0x03, 0x02);
        }
    }

    #[test]
    fn the_hash_is_the_published_one() {
        // From the FNV reference vectors.
        assert_eq!(fnv1a64([]), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a64(*b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a64(*b"foobar"), 0x8594_4171_f739_67e8);
    }
}

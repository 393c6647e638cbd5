//! Checked small numbers: what tells one link, endpoint, peer or identity from another.

use std::fmt;

/// A link: one place where frames come in and go out (a queue of a device). Dense, chosen by
/// control, reused only after every worker has acknowledged tables without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u32);

/// A local endpoint: one interface of one pod on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointId(pub u32);

impl EndpointId {
    /// The node itself, behind the host link. Pods are counted from one.
    pub const HOST: Self = Self(0);
}

/// Another node that runs Skein.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub u32);

/// A worker thread, counted from zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u16);

/// A receive and transmit queue of a device, counted from zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueId(pub u32);

/// Number of a publication of tables; each is one more than the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(pub u64);

impl Generation {
    /// The generation after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// A security identity: a number for a set of labels, 24 bits, never zero.
///
/// It travels as the VNI (RFC 7348 section 5), so that a node can judge a packet from a pod
/// that it has not heard of yet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IdentityId(u32);

impl IdentityId {
    /// This node itself: its kernel and its processes.
    pub const HOST: Self = Self(1);
    /// Another node of the cluster.
    pub const REMOTE_NODE: Self = Self(2);
    /// Everything outside the cluster, reached over IPv4.
    pub const WORLD_IPV4: Self = Self(3);
    /// Everything outside the cluster, reached over IPv6.
    pub const WORLD_IPV6: Self = Self(4);
    /// A pod that Skein does not manage, or without Kubernetes labels.
    pub const UNMANAGED: Self = Self(5);
    /// Health probes between agents.
    pub const HEALTH: Self = Self(6);
    /// The first number for a set of labels; those below are reserved.
    pub const FIRST_DYNAMIC: u32 = 256;
    /// The largest number.
    pub const MAX: u32 = (1 << 24) - 1;

    /// The identity of that number; `None` for zero and above 24 bits.
    #[must_use]
    pub fn new(number: u32) -> Option<Self> {
        (number != 0 && number <= Self::MAX).then_some(Self(number))
    }

    /// The number, which is also the VNI on the wire.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }
}

impl fmt::Debug for IdentityId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for IdentityId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::HOST => f.write_str("host"),
            Self::REMOTE_NODE => f.write_str("remote-node"),
            Self::WORLD_IPV4 => f.write_str("world-ipv4"),
            Self::WORLD_IPV6 => f.write_str("world-ipv6"),
            Self::UNMANAGED => f.write_str("unmanaged"),
            Self::HEALTH => f.write_str("health"),
            Self(number) => write!(f, "{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_has_twenty_four_bits_and_is_never_zero() {
        assert_eq!(IdentityId::new(0), None);
        assert_eq!(IdentityId::new(1), Some(IdentityId::HOST));
        assert_eq!(
            IdentityId::new(0xff_ffff).map(IdentityId::number),
            Some(0xff_ffff)
        );
        assert_eq!(IdentityId::new(0x100_0000), None);
    }
}

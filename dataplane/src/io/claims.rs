//! The ports of the node's own addresses that are the datapath's: answers to translated
//! connections come to them, and the uplinks' programs send those here instead of to the kernel.
//!
//! ```text
//!  a bit a port │ TCP 8192 bytes │ UDP 8192 │ SCTP 8192 │ ICMP identifiers 8192 │ the same of IPv6
//! ```
//!
//! The map that the programs look into is mapped into this process, so that a worker claims a
//! port by one instruction and no system call. Until an uplink is open, claims are kept here and
//! copied then. The map is pinned, so what is claimed stays so while no agent runs: its packets
//! are dropped, where the kernel would answer them with a reset.

#![expect(unsafe_code, reason = "maps the programs' map and reads it as atomics")]

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use crate::conntrack::{Family, PortClaims};
use crate::wire::protocol;

/// Bytes for one protocol of one IP version.
const BYTES: usize = 8192;
/// Protocols that have claims.
const PROTOCOLS: usize = 4;
/// Bytes of the map.
pub(super) const MAP_BYTES: usize = BYTES * PROTOCOLS * 2;

/// The claims of a node.
#[derive(Debug)]
pub struct Claims {
    own: Box<[AtomicU8]>,
    shared: OnceLock<Mapped>,
}

impl Default for Claims {
    fn default() -> Self {
        Self {
            own: (0..MAP_BYTES).map(|_| AtomicU8::new(0)).collect(),
            shared: OnceLock::new(),
        }
    }
}

impl Claims {
    /// Whether a port is claimed.
    #[must_use]
    pub fn is_claimed(&self, family: Family, protocol: u8, port: u16) -> bool {
        place(family, protocol, port)
            .is_some_and(|(byte, bit)| self.own[byte].load(Ordering::Relaxed) & bit != 0)
    }

    fn set(&self, family: Family, protocol: u8, port: u16) {
        let Some((byte, bit)) = place(family, protocol, port) else {
            return;
        };
        self.own[byte].fetch_or(bit, Ordering::SeqCst);
        if let Some(shared) = self.shared.get() {
            shared.bytes()[byte].fetch_or(bit, Ordering::SeqCst);
        }
    }

    fn clear(&self, family: Family, protocol: u8, port: u16) {
        let Some((byte, bit)) = place(family, protocol, port) else {
            return;
        };
        self.own[byte].fetch_and(!bit, Ordering::SeqCst);
        if let Some(shared) = self.shared.get() {
            shared.bytes()[byte].fetch_and(!bit, Ordering::SeqCst);
        }
    }

    /// Claims exactly these ports, in both IP versions, beside those of connections: the node
    /// ports of Services. `before` are those that were claimed so until now.
    pub fn replace(&self, before: &BTreeSet<(u8, u16)>, now: &BTreeSet<(u8, u16)>) {
        for family in [Family::V4, Family::V6] {
            for &(protocol, port) in now.difference(before) {
                self.set(family, protocol, port);
            }
            for &(protocol, port) in before.difference(now) {
                self.clear(family, protocol, port);
            }
        }
    }

    /// Maps the programs' map and brings it up to date. All uplinks have the same map: done
    /// once, later calls do nothing.
    pub(super) fn share(&self, map: BorrowedFd<'_>) -> io::Result<()> {
        if self.shared.get().is_some() {
            return Ok(());
        }
        let mapped = Mapped::new(map)?;
        let shared = self.shared.get_or_init(|| mapped);
        // Whoever claims from here on sees the map; what was claimed before is copied. What an
        // earlier agent claimed stands until it is released: its connections are brought back.
        for (own, shared) in self.own.iter().zip(shared.bytes()) {
            shared.fetch_or(own.load(Ordering::SeqCst), Ordering::SeqCst);
        }
        Ok(())
    }

    /// Gives back what an earlier agent claimed and this one has not.
    pub fn settle(&self) {
        if let Some(shared) = self.shared.get() {
            for (own, shared) in self.own.iter().zip(shared.bytes()) {
                // Again, where a port was claimed or released between the steps.
                loop {
                    let claimed = own.load(Ordering::SeqCst);
                    shared.store(claimed, Ordering::SeqCst);
                    if own.load(Ordering::SeqCst) == claimed {
                        break;
                    }
                }
            }
        }
    }
}

/// Claims a port, or an identifier of ICMP echo requests; does nothing for a protocol without
/// ports.
impl PortClaims for Arc<Claims> {
    fn claim(&self, family: Family, protocol: u8, port: u16) {
        self.set(family, protocol, port);
    }

    fn unclaim(&self, family: Family, protocol: u8, port: u16) {
        self.clear(family, protocol, port);
    }
}

fn place(family: Family, protocol: u8, port: u16) -> Option<(usize, u8)> {
    let kind = match protocol {
        protocol::TCP => 0,
        protocol::UDP => 1,
        protocol::SCTP => 2,
        protocol::ICMP | protocol::ICMPV6 => 3,
        _ => return None,
    };
    let kind = match family {
        Family::V4 => kind,
        Family::V6 => kind + PROTOCOLS,
    };
    Some((kind * BYTES + usize::from(port >> 3), 1 << (port & 7)))
}

/// The programs' map in this process's memory.
#[derive(Debug)]
struct Mapped(NonNull<AtomicU8>);

// SAFETY: the memory is shared and reached by atomic operations alone.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn new(map: BorrowedFd<'_>) -> io::Result<Self> {
        // SAFETY: a fresh shared mapping at an address that the kernel picks; the kernel refuses
        // one that is longer than the map.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                MAP_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                map.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(base.cast())
            .map(Self)
            .ok_or_else(|| io::Error::other("mmap gave the null address"))
    }

    fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: the mapping has that many bytes and lives as long as `self`; AtomicU8 has the
        // layout of a byte, any byte is a valid one, and all writers in this process are atomic.
        // (The programs only read.)
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), MAP_BYTES) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's alone, and no slice of it outlives it.
        unsafe { libc::munmap(self.0.as_ptr().cast(), MAP_BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_is_one_bit_of_one_protocol() {
        let claims = Arc::new(Claims::default());
        claims.claim(Family::V4, protocol::TCP, 61000);
        claims.claim(Family::V6, protocol::ICMPV6, 7);
        claims.claim(Family::V4, protocol::GRE, 1);
        assert!(claims.is_claimed(Family::V4, protocol::TCP, 61000));
        assert!(claims.is_claimed(Family::V6, protocol::ICMPV6, 7));
        assert!(!claims.is_claimed(Family::V4, protocol::ICMP, 7));
        assert!(!claims.is_claimed(Family::V6, protocol::TCP, 61000));
        assert!(!claims.is_claimed(Family::V4, protocol::UDP, 61000));
        assert!(!claims.is_claimed(Family::V4, protocol::TCP, 61001));
        claims.unclaim(Family::V4, protocol::TCP, 61000);
        assert!(!claims.is_claimed(Family::V4, protocol::TCP, 61000));
    }
}

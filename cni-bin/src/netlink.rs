//! A small blocking rtnetlink client with one method a verb.
//!
//! A [`Netlink`] socket acts on the network namespace of the thread that opened it, for as
//! long as it lives, wherever it is used from ([`crate::netns`] opens one elsewhere). Verbs
//! on links, addresses, routes and neighbours are in the files of those names; this one
//! sends, receives and reads errors. The kernel's own explanation (extended
//! acknowledgement, `Documentation/userspace-api/netlink/intro.rst`) is part of each error.
//!
//! Absent on purpose: watching for changes, and anything asynchronous.

mod address;
mod link;
mod neighbour;
mod route;

use std::io;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader, NetlinkMessage,
    NetlinkPayload, NlasIterator,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

pub use address::Address;
pub use link::{Link, Veth, VethEnd};
pub use neighbour::Neighbour;
pub use route::{Route, RouteScope};

/// One datagram from the kernel; it fills at most 32 KiB of it (`netlink_dump`).
const RECEIVE_BYTES: usize = 64 << 10;

/// A dump that changes while it is read is taken again, this often.
const DUMP_ATTEMPTS: u32 = 8;

/// `NLM_F_CAPPED` and `NLM_F_ACK_TLVS` of `linux/netlink.h`.
const NLM_F_CAPPED: u16 = 0x100;
const NLM_F_ACK_TLVS: u16 = 0x200;
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLMSGERR_ATTR_MSG: u16 = 1;

/// Length of `struct nlmsghdr`.
const HEADER_BYTES: usize = 16;

/// Why a verb failed.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The socket could not be opened or used.
    #[error("netlink socket: {0}")]
    Socket(#[from] io::Error),
    /// The kernel refused.
    #[error("{verb}: {source}{}", if message.is_empty() { String::new() } else { format!(" ({message})") })]
    Refused {
        /// What was asked for.
        verb: String,
        /// The errno.
        source: io::Error,
        /// The kernel's explanation, where it gives one.
        message: String,
    },
    /// The kernel's answer could not be read.
    #[error("{verb}: the kernel's answer is not understood: {reason}")]
    Answer {
        /// What was asked for.
        verb: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl NetlinkError {
    /// The errno of a refusal.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Refused { source, .. } => source.raw_os_error(),
            Self::Socket(_) | Self::Answer { .. } => None,
        }
    }

    /// Whether the kernel refused because it is there already.
    pub fn is_exists(&self) -> bool {
        self.errno() == Some(libc::EEXIST)
    }

    /// Whether the kernel refused because there is no such thing.
    pub fn is_missing(&self) -> bool {
        matches!(
            self.errno(),
            Some(libc::ENODEV | libc::ENOENT | libc::ESRCH | libc::EADDRNOTAVAIL)
        )
    }
}

/// The payload of one answer, as it came.
struct Answer {
    bytes: Vec<u8>,
}

impl NetlinkDeserializable for Answer {
    type Error = std::convert::Infallible;

    fn deserialize(_: &NetlinkHeader, payload: &[u8]) -> Result<Self, Self::Error> {
        Ok(Self {
            bytes: payload.to_vec(),
        })
    }
}

/// A netlink socket of the namespace that it was opened in.
pub struct Netlink {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Netlink {
    /// Opens a socket in the calling thread's network namespace.
    pub fn open() -> Result<Self, NetlinkError> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.set_cap_ack(true)?;
        socket.set_ext_ack(true)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self {
            socket,
            sequence: 0,
            buffer: Vec::with_capacity(RECEIVE_BYTES),
        })
    }

    /// Sends one request, waits until the kernel has done it.
    fn change(
        &mut self,
        verb: &str,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<(), NetlinkError> {
        self.send(message, NLM_F_REQUEST | NLM_F_ACK | flags)?;
        self.receive(verb, &mut Vec::new()).map(|_| ())
    }

    /// Asks for one object.
    fn query(
        &mut self,
        verb: &str,
        message: RouteNetlinkMessage,
    ) -> Result<Vec<Vec<u8>>, NetlinkError> {
        self.send(message, NLM_F_REQUEST | NLM_F_ACK)?;
        let mut answers = Vec::new();
        self.receive(verb, &mut answers)?;
        Ok(answers)
    }

    /// Asks for all objects of a kind.
    fn dump(
        &mut self,
        verb: &str,
        message: &RouteNetlinkMessage,
    ) -> Result<Vec<Vec<u8>>, NetlinkError> {
        for _ in 0..DUMP_ATTEMPTS {
            self.send(message.clone(), NLM_F_REQUEST | NLM_F_DUMP)?;
            let mut answers = Vec::new();
            if self.receive(verb, &mut answers)? == Dump::Consistent {
                return Ok(answers);
            }
        }
        Err(NetlinkError::Answer {
            verb: verb.to_owned(),
            reason: format!("the table changed during each of {DUMP_ATTEMPTS} reads"),
        })
    }

    fn send(&mut self, message: RouteNetlinkMessage, flags: u16) -> Result<(), NetlinkError> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        header.sequence_number = self.sequence;
        let mut packet = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
        packet.finalize();
        let mut bytes = vec![0; packet.buffer_len()];
        packet.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;
        Ok(())
    }

    /// Reads until the acknowledgement or the end of the dump; what comes before goes to
    /// `answers`.
    fn receive(&mut self, verb: &str, answers: &mut Vec<Vec<u8>>) -> Result<Dump, NetlinkError> {
        let not_understood = |reason: String| NetlinkError::Answer {
            verb: verb.to_owned(),
            reason,
        };
        let mut dump = Dump::Consistent;
        loop {
            self.buffer.clear();
            let length = self.socket.recv(&mut self.buffer, libc::MSG_TRUNC)?;
            if length > self.buffer.len() {
                return Err(not_understood(format!("a datagram of {length} bytes")));
            }
            let mut rest = self.buffer.as_slice();
            while rest.len() >= HEADER_BYTES {
                let message = NetlinkMessage::<Answer>::deserialize(rest)
                    .map_err(|e| not_understood(e.to_string()))?;
                let length = message.header.length as usize;
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
                if message.header.sequence_number != self.sequence {
                    continue;
                }
                if message.header.flags & NLM_F_DUMP_INTR != 0 {
                    dump = Dump::Interrupted;
                }
                match message.payload {
                    NetlinkPayload::InnerMessage(answer) => answers.push(answer.bytes),
                    NetlinkPayload::Error(error) => {
                        let text = explanation(message.header.flags, &error.header);
                        return outcome(verb, error.raw_code(), text).map(|()| dump);
                    }
                    NetlinkPayload::Done(done) => {
                        return outcome(verb, done.code, String::new()).map(|()| dump);
                    }
                    NetlinkPayload::Overrun(_) => {
                        return Err(not_understood("the kernel reports an overrun".to_owned()));
                    }
                    _ => {}
                }
            }
        }
    }
}

/// Whether a dump shows one state of its table.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Dump {
    Consistent,
    Interrupted,
}

/// A negative code is an errno, anything else success.
fn outcome(verb: &str, code: i32, message: String) -> Result<(), NetlinkError> {
    if code >= 0 {
        return Ok(());
    }
    Err(NetlinkError::Refused {
        verb: verb.to_owned(),
        source: io::Error::from_raw_os_error(code.saturating_neg()),
        message,
    })
}

/// The kernel's words from the attributes after the echo of the request's header.
fn explanation(flags: u16, echo: &[u8]) -> String {
    if flags & NLM_F_ACK_TLVS == 0 {
        return String::new();
    }
    let start = if flags & NLM_F_CAPPED != 0 {
        HEADER_BYTES
    } else {
        let Some(length) = echo.first_chunk::<4>() else {
            return String::new();
        };
        (u32::from_ne_bytes(*length) as usize).next_multiple_of(4)
    };
    NlasIterator::new(echo.get(start..).unwrap_or_default())
        .map_while(Result::ok)
        .find(|attribute| attribute.kind() == NLMSGERR_ATTR_MSG)
        .map(|attribute| {
            String::from_utf8_lossy(attribute.value())
                .trim_end_matches('\0')
                .to_owned()
        })
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An attribute with padding, as the kernel lays it out.
    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend((u16::try_from(value.len()).unwrap() + 4).to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn the_kernels_words_are_found_behind_the_echo() {
        let mut echo = vec![0; HEADER_BYTES];
        echo.extend(attribute(2, &20_u32.to_ne_bytes()));
        echo.extend(attribute(NLMSGERR_ATTR_MSG, b"no such thing\0"));
        assert_eq!(
            explanation(NLM_F_CAPPED | NLM_F_ACK_TLVS, &echo),
            "no such thing"
        );
        assert_eq!(explanation(NLM_F_CAPPED, &echo), "");
    }

    #[test]
    fn a_mangled_acknowledgement_has_no_words_and_no_panic() {
        for length in 0..HEADER_BYTES + 4 {
            let echo = vec![0xff; length];
            assert_eq!(explanation(NLM_F_ACK_TLVS, &echo), "");
            assert_eq!(explanation(NLM_F_CAPPED | NLM_F_ACK_TLVS, &echo), "");
        }
    }
}

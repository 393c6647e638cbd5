//! What of a packet the state machines look at.

use crate::parse::{Chunk, Headers, TcpFlags};

/// The part of a packet's transport header that moves a connection's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// TCP's flags, else none.
    pub tcp_flags: TcpFlags,
    /// SCTP's tag and first chunk, else none.
    pub sctp: Option<Chunk>,
}

impl From<&Headers> for Segment {
    fn from(headers: &Headers) -> Self {
        Self {
            tcp_flags: headers.tcp_flags,
            sctp: headers.sctp,
        }
    }
}

//! Connections: which packets belong together, in what state they are, and what was translated.
//!
//! Asked first by the slow path, before Service, policy and route: an answer needs no policy of
//! its own, and what was translated on the way out is translated back. A flow-table entry keeps
//! a [`ConnRef`] and asks at each hit whether the connection is [`alive`](Connections::alive),
//! which reads one cache line and takes no lock.
//!
//! All workers share one [`Connections`], since the two directions of a flow may meet different
//! ones. It is a map of many small locks from tuples to places in a slab of fixed size, whose
//! blocks are atomics; all memory is there from the start (arithmetic in `limits.rs`, layout in
//! `block.rs`). Room is shared by a rule (`share.rs`), and the least valuable gives way before
//! there is none (`room.rs`). [`PortPool`] leases the ports of masqueraded connections, and the table gives
//! them back.
//!
//! Deliberately absent: clocks, policy, rewriting, fragments, windows of TCP sequence numbers,
//! helpers for protocols that announce further connections.

mod block;
mod entry;
mod index;
mod limits;
mod ports;
mod room;
mod sctp;
mod segment;
mod share;
mod state;
mod stats;
mod table;
mod tcp;
mod timeouts;
mod tuple;

#[cfg(test)]
mod tests;

pub use entry::{Entry, RestoreError};
pub use limits::{BYTES_PER_CONNECTION, Limits};
pub use ports::{Family, MAX_ATTEMPTS, PortClaims, PortLease, PortPool};
pub use segment::Segment;
pub use state::{Phase, State, Tags};
pub use stats::ConnectionStats;
pub use table::{ConnRef, Connections, CreateError, Found, NewConnection};
pub use timeouts::{LONGEST, SctpTimeouts, TcpTimeouts, Timeouts};
pub use tuple::{Direction, Tuple};

//! How long a connection may be silent before it is forgotten.
//!
//! The defaults are those of Linux, so that an application meets here what it meets with the
//! kernel's connection tracking (`Documentation/networking/nf_conntrack-sysctl.rst`).

use std::time::Duration;

use super::state::{Phase, State};
use crate::wire::protocol;

/// The longest that any time-out may be: deadlines are kept in 32 bits of milliseconds and
/// compared by wrapping, which tells before from after within half of 49 days.
pub const LONGEST: Duration = Duration::from_secs(20 * 24 * 3600);

/// Time-outs of all protocols. Any above [`LONGEST`] counts as that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// TCP.
    pub tcp: TcpTimeouts,
    /// UDP that has not had an answer, or only just.
    pub udp: Duration,
    /// UDP that talks both ways for longer than [`udp_stream_after`](Self::udp_stream_after).
    pub udp_stream: Duration,
    /// How old an answered UDP connection is when it counts as a stream.
    pub udp_stream_after: Duration,
    /// ICMP over IPv4.
    pub icmp: Duration,
    /// ICMPv6.
    pub icmpv6: Duration,
    /// SCTP.
    pub sctp: SctpTimeouts,
    /// Every other protocol.
    pub generic: Duration,
}

/// TCP's, by state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpTimeouts {
    /// One SYN seen, or one from each end.
    pub syn_sent: Duration,
    /// SYN and its answer seen.
    pub syn_received: Duration,
    /// Established.
    pub established: Duration,
    /// Met in its middle and seen in one direction only.
    pub unacknowledged: Duration,
    /// One end has sent its FIN.
    pub fin_wait: Duration,
    /// That FIN is acknowledged; the other end may go on sending.
    pub close_wait: Duration,
    /// Both ends have sent their FINs.
    pub last_ack: Duration,
    /// Both FINs are acknowledged.
    pub time_wait: Duration,
    /// Reset.
    pub close: Duration,
}

/// SCTP's, by state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SctpTimeouts {
    /// Nothing known, or ended.
    pub closed: Duration,
    /// INIT seen.
    pub cookie_wait: Duration,
    /// COOKIE ECHO seen.
    pub cookie_echoed: Duration,
    /// Established.
    pub established: Duration,
    /// SHUTDOWN seen from the end that sent INIT.
    pub shutdown_sent: Duration,
    /// SHUTDOWN seen from the other end.
    pub shutdown_received: Duration,
    /// SHUTDOWN ACK seen.
    pub shutdown_ack_sent: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            tcp: TcpTimeouts {
                syn_sent: seconds(120),
                syn_received: seconds(60),
                established: seconds(432_000),
                unacknowledged: seconds(300),
                fin_wait: seconds(120),
                close_wait: seconds(60),
                last_ack: seconds(30),
                time_wait: seconds(120),
                close: seconds(10),
            },
            udp: seconds(30),
            udp_stream: seconds(120),
            udp_stream_after: seconds(2),
            icmp: seconds(30),
            icmpv6: seconds(30),
            sctp: SctpTimeouts {
                closed: seconds(10),
                cookie_wait: seconds(3),
                cookie_echoed: seconds(3),
                // 432 000 before Linux 5.17.
                established: seconds(210),
                shutdown_sent: seconds(3),
                shutdown_received: seconds(3),
                shutdown_ack_sent: seconds(3),
            },
            generic: seconds(600),
        }
    }
}

impl Timeouts {
    /// How long a connection in that state may be silent.
    #[must_use]
    pub(super) fn of(&self, protocol: u8, state: State) -> Duration {
        let timeout = match protocol {
            protocol::TCP => self.tcp.of(state),
            protocol::UDP if state.is_assured() => self.udp_stream,
            protocol::UDP => self.udp,
            protocol::ICMP => self.icmp,
            protocol::ICMPV6 => self.icmpv6,
            protocol::SCTP => self.sctp.of(state.phase()),
            _ => self.generic,
        };
        timeout.min(LONGEST)
    }
}

impl TcpTimeouts {
    fn of(&self, state: State) -> Duration {
        match state.phase() {
            Phase::SynSent | Phase::SimultaneousOpen => self.syn_sent,
            Phase::SynReceived => self.syn_received,
            // The five days of an established connection are for those that have been heard
            // from both ends; a stray packet that made an entry is not worth them.
            Phase::Established if !state.is_replied() => self.established.min(self.unacknowledged),
            Phase::Established => self.established,
            Phase::FinWait => self.fin_wait,
            Phase::CloseWait => self.close_wait,
            Phase::LastAck => self.last_ack,
            Phase::TimeWait => self.time_wait,
            _ => self.close,
        }
    }
}

impl SctpTimeouts {
    fn of(&self, phase: Phase) -> Duration {
        match phase {
            Phase::CookieWait => self.cookie_wait,
            Phase::CookieEchoed => self.cookie_echoed,
            Phase::Established => self.established,
            Phase::ShutdownSent => self.shutdown_sent,
            Phase::ShutdownReceived => self.shutdown_received,
            Phase::ShutdownAckSent => self.shutdown_ack_sent,
            _ => self.closed,
        }
    }
}

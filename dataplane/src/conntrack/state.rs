//! The state of a connection in one byte, and which machine moves it.
//!
//! ```text
//!  7       6        5       4      3   0
//!  ├ spare ┼ assured ┼ replied ┼ actor ┼ phase ┤
//! ```
//!
//! *Replied*: a packet of the reply direction has been seen. *Assured*: worth keeping when room
//! is short. *Actor*: which end opened (while opening) or closed first (while closing).

use super::{Direction, Segment, sctp, tcp};
use crate::wire::protocol;

/// Where a connection is in its life. Protocols without a life of their own are established
/// from their first packet on. Numbers are kept in blocks: 0 and 15 mean other things there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Phase {
    /// TCP: a SYN was seen.
    SynSent = 1,
    /// TCP: its answer was seen too.
    SynReceived = 2,
    /// Data may flow both ways.
    Established = 3,
    /// TCP: one end, the actor, has sent its FIN.
    FinWait = 4,
    /// TCP: that FIN is acknowledged.
    CloseWait = 5,
    /// TCP: both have sent their FINs.
    LastAck = 6,
    /// TCP: both FINs are acknowledged.
    TimeWait = 7,
    /// Ended: reset, aborted, shut down.
    Close = 8,
    /// TCP: both ends have sent a SYN.
    SimultaneousOpen = 9,
    /// SCTP: INIT was seen.
    CookieWait = 10,
    /// SCTP: COOKIE ECHO was seen.
    CookieEchoed = 11,
    /// SCTP: SHUTDOWN from the original direction.
    ShutdownSent = 12,
    /// SCTP: SHUTDOWN from the reply direction.
    ShutdownReceived = 13,
    /// SCTP: SHUTDOWN ACK was seen.
    ShutdownAckSent = 14,
}

impl Phase {
    const ALL: [Self; 14] = [
        Self::SynSent,
        Self::SynReceived,
        Self::Established,
        Self::FinWait,
        Self::CloseWait,
        Self::LastAck,
        Self::TimeWait,
        Self::Close,
        Self::SimultaneousOpen,
        Self::CookieWait,
        Self::CookieEchoed,
        Self::ShutdownSent,
        Self::ShutdownReceived,
        Self::ShutdownAckSent,
    ];

    fn of(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number).checked_sub(1)?).copied()
    }
}

/// A phase and what is remembered beside it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct State(u8);

impl State {
    const PHASE: u8 = 0x0f;
    const ACTOR_REPLY: u8 = 0x10;
    const REPLIED: u8 = 0x20;
    const ASSURED: u8 = 0x40;

    /// A phase reached by a packet of the original direction alone.
    #[must_use]
    pub(super) fn new(phase: Phase) -> Self {
        Self(phase as u8)
    }

    /// The state of that number, as [`number`](Self::number) gave it; `None` for one that no
    /// connection can be in.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        let flags = Self::ACTOR_REPLY | Self::REPLIED | Self::ASSURED;
        let phase = number & !flags;
        Phase::of(phase).map(|_| Self(number))
    }

    /// The state as a number, for a journal.
    #[must_use]
    pub fn number(self) -> u8 {
        self.0
    }

    /// The phase.
    #[must_use]
    pub fn phase(self) -> Phase {
        // Only valid phases are ever put in.
        Phase::of(self.0 & Self::PHASE).unwrap_or(Phase::Close)
    }

    /// Whether the reply direction has been seen.
    #[must_use]
    pub fn is_replied(self) -> bool {
        self.0 & Self::REPLIED != 0
    }

    /// Whether it has shown that it is worth keeping.
    #[must_use]
    pub fn is_assured(self) -> bool {
        self.0 & Self::ASSURED != 0
    }

    /// Which end opened, or closed first.
    #[must_use]
    pub(super) fn actor(self) -> Direction {
        if self.0 & Self::ACTOR_REPLY == 0 {
            Direction::Original
        } else {
            Direction::Reply
        }
    }

    pub(super) fn with_phase(self, phase: Phase) -> Self {
        Self(self.0 & !Self::PHASE | phase as u8)
    }

    pub(super) fn with_actor(self, actor: Direction) -> Self {
        match actor {
            Direction::Original => Self(self.0 & !Self::ACTOR_REPLY),
            Direction::Reply => Self(self.0 | Self::ACTOR_REPLY),
        }
    }

    pub(super) fn with_reply_seen(self) -> Self {
        Self(self.0 | Self::REPLIED)
    }

    pub(super) fn assured(self) -> Self {
        Self(self.0 | Self::ASSURED)
    }

    /// What the state is called in views, for a connection of that protocol.
    #[must_use]
    pub fn name(self, protocol: u8) -> &'static str {
        match self.phase() {
            Phase::SynSent => "SYN_SENT",
            Phase::SynReceived => "SYN_RECV",
            Phase::Established if matches!(protocol, protocol::TCP | protocol::SCTP) => {
                "ESTABLISHED"
            }
            Phase::Established if self.is_assured() => "ASSURED",
            Phase::Established if self.is_replied() => "REPLIED",
            Phase::Established => "UNREPLIED",
            Phase::FinWait => "FIN_WAIT",
            Phase::CloseWait => "CLOSE_WAIT",
            Phase::LastAck => "LAST_ACK",
            Phase::TimeWait => "TIME_WAIT",
            Phase::Close if protocol == protocol::SCTP => "CLOSED",
            Phase::Close => "CLOSE",
            Phase::SimultaneousOpen => "SYN_SENT2",
            Phase::CookieWait => "COOKIE_WAIT",
            Phase::CookieEchoed => "COOKIE_ECHOED",
            Phase::ShutdownSent => "SHUTDOWN_SENT",
            Phase::ShutdownReceived => "SHUTDOWN_RECD",
            Phase::ShutdownAckSent => "SHUTDOWN_ACK_SENT",
        }
    }

    /// What losing it would cost.
    #[must_use]
    pub(super) fn worth(self) -> Worth {
        match self.phase() {
            Phase::LastAck | Phase::TimeWait | Phase::Close | Phase::ShutdownAckSent => {
                Worth::Nothing
            }
            _ if !self.is_replied() => Worth::Nothing,
            Phase::Established if self.is_assured() => Worth::Much,
            _ => Worth::Little,
        }
    }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("phase", &self.phase())
            .field("actor", &self.actor())
            .field("replied", &self.is_replied())
            .field("assured", &self.is_assured())
            .finish()
    }
}

/// In what order connections give way when room is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Worth {
    /// Unanswered, or over.
    Nothing,
    /// Answered, but not established: opening, half closed, a question and its answer.
    Little,
    /// Established.
    Much,
}

/// The tags that an SCTP association's packets must bear, by direction; zero where not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tags {
    /// Of packets of the original direction.
    pub original: u32,
    /// Of packets of the reply direction.
    pub reply: u32,
}

/// A state, and the tags beside it where the protocol has some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tracked {
    pub state: State,
    pub tags: Tags,
}

/// The state that a first packet puts a connection in.
pub(super) fn open(protocol: u8, segment: Segment) -> Tracked {
    let state = match protocol {
        protocol::TCP => tcp::open(segment.tcp_flags),
        protocol::SCTP => return sctp::open(segment.sctp),
        _ => State::new(Phase::Established),
    };
    Tracked {
        state,
        tags: Tags::default(),
    }
}

/// The state after a packet, or `None` when the packet has no part in the connection's life
/// and does not prolong it. `is_old` says whether an answered UDP connection is a stream.
pub(super) fn advance(
    protocol: u8,
    tracked: Tracked,
    direction: Direction,
    segment: Segment,
    is_old: bool,
) -> Option<Tracked> {
    let Tracked { state, tags } = tracked;
    let replied = match direction {
        Direction::Original => state,
        Direction::Reply => state.with_reply_seen(),
    };
    let next = match protocol {
        protocol::TCP => tcp::advance(state, direction, segment.tcp_flags)?,
        protocol::SCTP => return sctp::advance(tracked, direction, segment.sctp),
        protocol::UDP if replied.is_replied() && is_old => replied.assured(),
        _ => replied,
    };
    Some(Tracked { state: next, tags })
}

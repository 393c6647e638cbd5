//! SCTP's states as they look from the middle (RFC 9260 section 4), and its verification tags.
//!
//! A packet bears the tag that its receiver chose in INIT or INIT ACK; one with another tag is
//! not of this association, and moves nothing here as it moves nothing at the endpoint (section
//! 8.5). Associations met in their middle learn a direction's tag from its first packet.
//!
//! Deliberately absent: multi-homing. A second path of an association is a connection of its
//! own here, known by its HEARTBEATs.

use super::Direction;
use super::state::{Phase, State, Tags, Tracked};
use crate::wire::sctp::{Chunk, chunk};

/// The state of an association first met with that chunk.
pub(super) fn open(first: Option<Chunk>) -> Tracked {
    let Some(first) = first else {
        return Tracked {
            state: State::new(Phase::Close),
            tags: Tags::default(),
        };
    };
    let phase = match first.kind {
        chunk::INIT | chunk::INIT_ACK => Phase::CookieWait,
        chunk::ABORT | chunk::SHUTDOWN_COMPLETE => Phase::Close,
        chunk::SHUTDOWN => Phase::ShutdownSent,
        chunk::SHUTDOWN_ACK => Phase::ShutdownAckSent,
        chunk::COOKIE_ECHO => Phase::CookieEchoed,
        _ => Phase::Established,
    };
    let reflected = first.flags & chunk::FLAG_REFLECTED != 0;
    let original = match first.kind {
        chunk::INIT => 0,
        chunk::ABORT | chunk::SHUTDOWN_COMPLETE if reflected => 0,
        _ => first.tag,
    };
    Tracked {
        state: State::new(phase),
        tags: Tags {
            original,
            reply: first.initiate_tag,
        },
    }
}

/// The state after a packet; `None` when it changes nothing and prolongs nothing.
pub(super) fn advance(
    tracked: Tracked,
    direction: Direction,
    first: Option<Chunk>,
) -> Option<Tracked> {
    let first = first?;
    let tags = verified(tracked, direction, first)?;
    let state = match direction {
        Direction::Original => tracked.state,
        Direction::Reply => tracked.state.with_reply_seen(),
    };
    let phase = next(state.phase(), direction, first.kind);
    let state = match (tracked.state.phase(), phase) {
        // Anew, on the ports of an association that has ended.
        (Phase::Close, Phase::CookieWait) => {
            let fresh = State::new(phase);
            if direction == Direction::Reply {
                fresh.with_reply_seen()
            } else {
                fresh
            }
        }
        (_, Phase::Established) if state.is_replied() => state.with_phase(phase).assured(),
        _ => state.with_phase(phase),
    };
    Some(Tracked { state, tags })
}

fn next(phase: Phase, direction: Direction, kind: u8) -> Phase {
    match (kind, phase) {
        (chunk::ABORT | chunk::SHUTDOWN_COMPLETE, _) => Phase::Close,
        (chunk::INIT, Phase::Close) => Phase::CookieWait,
        (chunk::COOKIE_ECHO, Phase::CookieWait | Phase::Close) => Phase::CookieEchoed,
        (chunk::COOKIE_ACK, Phase::CookieEchoed) => Phase::Established,
        (chunk::SHUTDOWN, Phase::Established) => match direction {
            Direction::Original => Phase::ShutdownSent,
            Direction::Reply => Phase::ShutdownReceived,
        },
        (
            chunk::SHUTDOWN_ACK,
            Phase::Established | Phase::ShutdownSent | Phase::ShutdownReceived,
        ) => Phase::ShutdownAckSent,
        _ => phase,
    }
}

/// The tags after a packet, or `None` when it bears the wrong one.
fn verified(tracked: Tracked, direction: Direction, first: Chunk) -> Option<Tags> {
    let Tracked { state, tags } = tracked;
    let phase = state.phase();
    let (mut own, mut other) = match direction {
        Direction::Original => (tags.original, tags.reply),
        Direction::Reply => (tags.reply, tags.original),
    };
    let may_reflect = matches!(first.kind, chunk::ABORT | chunk::SHUTDOWN_COMPLETE);
    match first.kind {
        // INIT bears no tag, so anybody can send one: it announces the tag of the answers only
        // where no association stands. One that restarts (RFC 9260 section 5.2.4) is met anew
        // once its former entry has expired.
        chunk::INIT if first.tag != 0 => return None,
        chunk::INIT if matches!(phase, Phase::Close | Phase::CookieWait) => own = 0,
        chunk::INIT => return None,
        _ if may_reflect && first.flags & chunk::FLAG_REFLECTED != 0 => {
            if other != 0 && first.tag != other {
                return None;
            }
        }
        _ if own == 0 => own = first.tag,
        _ if own != first.tag => return None,
        _ => {}
    }
    if first.initiate_tag != 0 {
        other = first.initiate_tag;
    }
    Some(match direction {
        Direction::Original => Tags {
            original: own,
            reply: other,
        },
        Direction::Reply => Tags {
            original: other,
            reply: own,
        },
    })
}

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
    let reflected = matches!(first.kind, chunk::ABORT | chunk::SHUTDOWN_COMPLETE)
        && first.flags & chunk::FLAG_REFLECTED != 0;
    match first.kind {
        // INIT bears no tag, so anybody can send one: it announces the tag of the answers only
        // where no association stands. One that restarts (RFC 9260 section 5.2.4) is met anew
        // once its former entry has expired.
        chunk::INIT if first.tag != 0 => return None,
        chunk::INIT if matches!(phase, Phase::Close | Phase::CookieWait) => own = 0,
        chunk::INIT => return None,
        _ if reflected && other != 0 && first.tag != other => return None,
        _ if reflected => {}
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::protocol;

    const CLIENT: u32 = 0xc11e;
    const SERVER: u32 = 0x5e4e;

    fn bearing(tag: u32, kind: u8) -> Chunk {
        Chunk {
            tag,
            kind,
            flags: 0,
            initiate_tag: 0,
        }
    }

    fn init() -> Chunk {
        Chunk {
            initiate_tag: CLIENT,
            ..bearing(0, chunk::INIT)
        }
    }

    fn init_ack() -> Chunk {
        Chunk {
            initiate_tag: SERVER,
            ..bearing(CLIENT, chunk::INIT_ACK)
        }
    }

    /// Packets of the original direction bear the server's tag, of the reply the client's.
    fn forth(kind: u8) -> (Direction, Chunk) {
        (Direction::Original, bearing(SERVER, kind))
    }

    fn back(kind: u8) -> (Direction, Chunk) {
        (Direction::Reply, bearing(CLIENT, kind))
    }

    fn play(first: Chunk, steps: &[((Direction, Chunk), &str)]) -> Tracked {
        let mut tracked = open(Some(first));
        for (at, &((direction, chunk), expected)) in steps.iter().enumerate() {
            let next = advance(tracked, direction, Some(chunk));
            let name = next.map_or("-", |next| next.state.name(protocol::SCTP));
            assert_eq!(name, expected, "step {at}: {chunk:?}");
            tracked = next.unwrap_or(tracked);
        }
        tracked
    }

    const DATA: u8 = 0;

    fn opened() -> Vec<((Direction, Chunk), &'static str)> {
        vec![
            ((Direction::Reply, init_ack()), "COOKIE_WAIT"),
            (forth(chunk::COOKIE_ECHO), "COOKIE_ECHOED"),
            (back(chunk::COOKIE_ACK), "ESTABLISHED"),
        ]
    }

    #[test]
    fn an_ordinary_life() {
        let mut steps = opened();
        steps.extend([
            (forth(DATA), "ESTABLISHED"),
            (back(chunk::SHUTDOWN), "SHUTDOWN_RECD"),
            (forth(chunk::SHUTDOWN_ACK), "SHUTDOWN_ACK_SENT"),
            (back(chunk::SHUTDOWN_COMPLETE), "CLOSED"),
            // Anew on the same ports.
            ((Direction::Original, init()), "COOKIE_WAIT"),
        ]);
        let end = play(init(), &steps);
        assert!(!end.state.is_assured());
        assert!(play(init(), &opened()).state.is_assured());
    }

    #[test]
    fn a_wrong_tag_has_no_part() {
        let mut steps = opened();
        let forged = |tag, kind| ((Direction::Original, bearing(tag, kind)), "-");
        steps.extend([
            forged(CLIENT, DATA),
            forged(0, chunk::ABORT),
            forged(SERVER + 1, chunk::SHUTDOWN),
            // Nor has a second INIT, which bears no tag at all.
            ((Direction::Original, init()), "-"),
            (forth(chunk::ABORT), "CLOSED"),
        ]);
        play(init(), &steps);
        let early = Chunk {
            tag: CLIENT + 1,
            ..init_ack()
        };
        play(init(), &[((Direction::Reply, early), "-")]);
    }

    #[test]
    fn who_has_no_state_reflects_the_tag() {
        let reflected = Chunk {
            flags: chunk::FLAG_REFLECTED,
            ..bearing(SERVER, chunk::ABORT)
        };
        let mut steps = opened();
        let forged = Chunk {
            tag: CLIENT,
            ..reflected
        };
        steps.extend([
            ((Direction::Reply, forged), "-"),
            ((Direction::Reply, reflected), "CLOSED"),
        ]);
        play(init(), &steps);
    }

    #[test]
    fn met_in_its_middle_it_learns_the_tags() {
        let tracked = play(
            bearing(SERVER, DATA),
            &[
                (back(DATA), "ESTABLISHED"),
                ((Direction::Reply, bearing(SERVER, DATA)), "-"),
            ],
        );
        let learnt = Tags {
            original: SERVER,
            reply: CLIENT,
        };
        assert_eq!(tracked.tags, learnt);
        assert!(tracked.state.is_assured());
        assert_eq!(open(None).state.name(protocol::SCTP), "CLOSED");
        assert_eq!(advance(tracked, Direction::Original, None), None);
    }
}

//! TCP's states as they look from the middle (RFC 9293 section 3.3.2).
//!
//! ```text
//!  SYN ─▶ SYN_SENT ─SYN+ACK◀─▶ SYN_RECV ─ACK─▶ ESTABLISHED ─FIN─▶ FIN_WAIT ─ACK◀─▶ CLOSE_WAIT
//!            │ SYN◀                 ▲                                 │ FIN◀           │ FIN◀
//!            ▼                      │                                 ▼                ▼
//!        SYN_SENT2 ────SYN+ACK──────┘             TIME_WAIT ◀──ACK─ LAST_ACK ◀─────────┘
//!                                                                RST: CLOSE, from anywhere
//! ```
//!
//! ◀ marks what must come from the end that is not the actor. A middle sees a segment before
//! its receiver does, or one that never arrives, so a state here says what has been *sent*.
//!
//! Deliberately absent: sequence numbers and windows. A packet that a hit in the flow table
//! covers does not come by here, so windows could not be followed; a forged RST therefore
//! shortens the life of an entry, which costs one pick-up, and the endpoints, which do check,
//! lose nothing.

use super::Direction;
use super::state::{Phase, State};
use crate::parse::TcpFlags;

/// What a segment says, of all its flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Syn,
    SynAck,
    Fin,
    Ack,
    Rst,
}

/// `None` for combinations that no TCP sends: SYN with FIN, or none of SYN, FIN, ACK and RST.
fn kind(flags: TcpFlags) -> Option<Kind> {
    let has = |flag| flags.contains(flag);
    match (has(TcpFlags::SYN), has(TcpFlags::FIN)) {
        _ if has(TcpFlags::RST) => Some(Kind::Rst),
        (true, true) => None,
        (true, false) if has(TcpFlags::ACK) => Some(Kind::SynAck),
        (true, false) => Some(Kind::Syn),
        (false, true) => Some(Kind::Fin),
        (false, false) => has(TcpFlags::ACK).then_some(Kind::Ack),
    }
}

/// The state of a connection first met with these flags.
///
/// Without a SYN it was met in its middle, and where it stands is guessed from the one packet.
pub(super) fn open(flags: TcpFlags) -> State {
    let phase = match kind(flags) {
        Some(Kind::Syn) => Phase::SynSent,
        // Seen from the answering end: the other end is the actor, and its ACK is awaited.
        Some(Kind::SynAck) => {
            return State::new(Phase::SynReceived).with_actor(Direction::Reply);
        }
        Some(Kind::Fin) => Phase::FinWait,
        Some(Kind::Rst) => Phase::Close,
        Some(Kind::Ack) | None => Phase::Established,
    };
    State::new(phase)
}

/// The state after a segment; `None` when it changes nothing and prolongs nothing.
pub(super) fn advance(state: State, direction: Direction, flags: TcpFlags) -> Option<State> {
    let kind = kind(flags)?;
    let seen = match direction {
        Direction::Original => state,
        Direction::Reply => state.with_reply_seen(),
    };
    let by_actor = direction == state.actor();
    match kind {
        Kind::Rst => Some(seen.with_phase(Phase::Close)),
        Kind::Syn => syn(state, seen, direction, by_actor),
        Kind::SynAck => syn_ack(state, seen, direction, by_actor),
        Kind::Fin => fin(state, seen, direction, by_actor),
        Kind::Ack => ack(state, seen, by_actor),
    }
}

fn syn(state: State, seen: State, direction: Direction, by_actor: bool) -> Option<State> {
    match state.phase() {
        Phase::SynSent if by_actor => Some(seen),
        Phase::SynSent | Phase::SimultaneousOpen => Some(seen.with_phase(Phase::SimultaneousOpen)),
        // The same ports anew (RFC 9293 section 3.6.1), by whichever end.
        Phase::TimeWait | Phase::Close => Some(reopened(direction)),
        // A repetition, or a stranger to be challenged (RFC 5961 section 4): either is
        // answered by the endpoint, and the answer moves the state.
        _ => None,
    }
}

/// Nothing of the connection's former life counts.
fn reopened(direction: Direction) -> State {
    let state = State::new(Phase::SynSent).with_actor(direction);
    match direction {
        Direction::Original => state,
        Direction::Reply => state.with_reply_seen(),
    }
}

fn syn_ack(state: State, seen: State, direction: Direction, by_actor: bool) -> Option<State> {
    match state.phase() {
        // Only what answers the SYN; after two SYNs either end's may come first.
        Phase::SynSent if by_actor => None,
        Phase::SynSent => Some(seen.with_phase(Phase::SynReceived)),
        Phase::SimultaneousOpen => Some(
            seen.with_phase(Phase::SynReceived)
                .with_actor(direction.opposite()),
        ),
        // Of a simultaneous open the second, which acknowledges like an ACK.
        Phase::SynReceived if by_actor => Some(established(seen)),
        Phase::SynReceived => Some(seen),
        _ => None,
    }
}

fn fin(state: State, seen: State, direction: Direction, by_actor: bool) -> Option<State> {
    match state.phase() {
        Phase::SynReceived | Phase::Established => {
            Some(seen.with_phase(Phase::FinWait).with_actor(direction))
        }
        Phase::FinWait | Phase::CloseWait if !by_actor => Some(seen.with_phase(Phase::LastAck)),
        // Sent once more.
        Phase::FinWait | Phase::CloseWait | Phase::LastAck | Phase::TimeWait | Phase::Close => {
            Some(seen)
        }
        _ => None,
    }
}

fn ack(state: State, seen: State, by_actor: bool) -> Option<State> {
    match state.phase() {
        Phase::SynReceived if by_actor => Some(established(seen)),
        Phase::Established => Some(established(seen)),
        Phase::FinWait if !by_actor => Some(seen.with_phase(Phase::CloseWait)),
        Phase::LastAck if by_actor => Some(seen.with_phase(Phase::TimeWait)),
        Phase::SynReceived
        | Phase::FinWait
        | Phase::CloseWait
        | Phase::LastAck
        | Phase::TimeWait
        | Phase::Close => Some(seen),
        _ => None,
    }
}

/// Assured once both directions have been seen.
fn established(seen: State) -> State {
    let state = seen.with_phase(Phase::Established);
    if state.is_replied() {
        state.assured()
    } else {
        state
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORIGINAL: Direction = Direction::Original;
    const REPLY: Direction = Direction::Reply;

    fn flags(text: &str) -> TcpFlags {
        text.chars().fold(TcpFlags::default(), |all, letter| {
            all.union(match letter {
                'S' => TcpFlags::SYN,
                'A' => TcpFlags::ACK,
                'F' => TcpFlags::FIN,
                'R' => TcpFlags::RST,
                'P' => TcpFlags::PSH,
                other => panic!("no such flag: {other}"),
            })
        })
    }

    /// Plays a connection whose first packet has these flags. Each step is a direction (`>` for
    /// the original, `<` for the reply), flags, and the state after, or `-` for one without
    /// part in it.
    fn play(first: &str, opened: &str, steps: &[&str]) -> State {
        let mut state = open(flags(first));
        assert_eq!(state.name(crate::wire::protocol::TCP), opened, "{first}");
        for (at, step) in steps.iter().enumerate() {
            let (way, rest) = step.split_at(1);
            let direction = if way == ">" { ORIGINAL } else { REPLY };
            let (set, expected) = rest.split_once(' ').unwrap();
            let next = advance(state, direction, flags(set));
            let name = next.map_or("-", |state| state.name(crate::wire::protocol::TCP));
            assert_eq!(name, expected, "step {at} of {steps:?}");
            state = next.unwrap_or(state);
        }
        state
    }

    const OPENED: [&str; 2] = ["<SA SYN_RECV", ">A ESTABLISHED"];

    fn play_opened(steps: &[&str]) -> State {
        play("S", "SYN_SENT", &[&OPENED[..], steps].concat())
    }

    #[test]
    fn an_ordinary_life() {
        let state = play_opened(&[
            ">PA ESTABLISHED",
            "<A ESTABLISHED",
            ">FA FIN_WAIT",
            "<A CLOSE_WAIT",
            "<PA CLOSE_WAIT",
            ">A CLOSE_WAIT",
            "<FA LAST_ACK",
            ">A TIME_WAIT",
        ]);
        assert!(state.is_replied() && state.is_assured());
    }

    #[test]
    fn the_server_may_close_first_and_both_in_one_breath() {
        play_opened(&["<FA FIN_WAIT", ">FA LAST_ACK", "<A TIME_WAIT"]);
        // A FIN that crosses the other (RFC 9293 figure 13).
        play_opened(&[
            ">FA FIN_WAIT",
            "<FA LAST_ACK",
            "<A LAST_ACK",
            ">A TIME_WAIT",
        ]);
    }

    #[test]
    fn repetitions_change_nothing() {
        play(
            "S",
            "SYN_SENT",
            &[">S SYN_SENT", "<SA SYN_RECV", "<SA SYN_RECV", ">S -"],
        );
        play_opened(&[
            ">S -",
            "<SA -",
            ">FA FIN_WAIT",
            ">FA FIN_WAIT",
            ">A FIN_WAIT",
            "<A CLOSE_WAIT",
            ">FA CLOSE_WAIT",
            "<FA LAST_ACK",
            "<FA LAST_ACK",
            ">A TIME_WAIT",
            "<FA TIME_WAIT",
            ">A TIME_WAIT",
        ]);
    }

    #[test]
    fn both_ends_may_open_at_once() {
        // RFC 9293 figure 7.
        let state = play(
            "S",
            "SYN_SENT",
            &[
                "<S SYN_SENT2",
                ">S SYN_SENT2",
                ">SA SYN_RECV",
                "<SA ESTABLISHED",
                ">A ESTABLISHED",
            ],
        );
        assert!(state.is_assured());
        play(
            "S",
            "SYN_SENT",
            &["<S SYN_SENT2", "<SA SYN_RECV", ">A ESTABLISHED"],
        );
    }

    #[test]
    fn a_reset_ends_it_from_anywhere() {
        play("S", "SYN_SENT", &["<RA CLOSE", "<A CLOSE"]);
        play("S", "SYN_SENT", &["<SA SYN_RECV", ">R CLOSE"]);
        play_opened(&[">R CLOSE"]);
        play_opened(&[">FA FIN_WAIT", "<R CLOSE"]);
        play_opened(&["<FA FIN_WAIT", ">FA LAST_ACK", "<A TIME_WAIT", ">R CLOSE"]);
    }

    #[test]
    fn the_same_ports_may_be_used_anew() {
        let state = play_opened(&["<R CLOSE", ">S SYN_SENT"]);
        assert!(!state.is_replied() && !state.is_assured());
        let ended = ["<FA FIN_WAIT", ">FA LAST_ACK", "<A TIME_WAIT"];
        play_opened(
            &[
                &ended[..],
                &[">S SYN_SENT", "<SA SYN_RECV", ">A ESTABLISHED"],
            ]
            .concat(),
        );
        // By the end that answered before: then the other one's answer is awaited.
        let reopened = ["<S SYN_SENT", "<SA -", ">SA SYN_RECV", "<A ESTABLISHED"];
        play_opened(&[&ended[..], &reopened].concat());
    }

    #[test]
    fn met_in_its_middle() {
        let state = play("A", "ESTABLISHED", &[">PA ESTABLISHED"]);
        assert!(!state.is_replied() && !state.is_assured());
        assert!(play("A", "ESTABLISHED", &["<A ESTABLISHED"]).is_assured());
        play("SA", "SYN_RECV", &["<A ESTABLISHED", ">FA FIN_WAIT"]);
        play(
            "FA",
            "FIN_WAIT",
            &["<A CLOSE_WAIT", "<FA LAST_ACK", ">A TIME_WAIT"],
        );
        play("R", "CLOSE", &[]);
    }

    #[test]
    fn what_no_tcp_sends_has_no_part() {
        play(
            "S",
            "SYN_SENT",
            &["<SF -", "<P -", ">SFA -", "<A -", ">A -", "<FA -"],
        );
        play_opened(&[">SF -", "< -", ">P -"]);
    }
}

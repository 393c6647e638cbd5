//! Puts the descriptors of the receive ring together to packets.
//!
//! A packet of several descriptors carries "goes on" on all but its last. One that has more
//! segments than a packet may have, or a descriptor that is no good, is dropped whole: its
//! frames go back and the rest of its descriptors are skipped. The state survives between
//! receives, so a packet may arrive in parts.

use super::packet::{Packet, Segment};
use super::pool::FramePool;
use super::queues::{Received, Taken};
use super::sys::XDP_PKT_CONTD;
use crate::ids::LinkId;

/// Where a packet stands.
#[derive(Debug)]
enum State {
    /// The next descriptor starts a packet.
    Start,
    /// Segments so far.
    Partial(Packet),
    /// The packet is dropped; its other descriptors follow.
    Discard,
}

/// The packet in assembly, and what went wrong with others.
#[derive(Debug)]
pub struct Assembler {
    ingress: LinkId,
    state: State,
    /// Descriptors that named no chunk of ours.
    pub bad_descriptors: u64,
    /// Packets dropped.
    pub broken: u64,
}

impl Assembler {
    pub fn new(ingress: LinkId) -> Self {
        Self {
            ingress,
            state: State::Start,
            bad_descriptors: 0,
            broken: 0,
        }
    }

    /// Adds a descriptor; returns the packet when that was its last.
    pub fn add(&mut self, received: Received, pool: &mut FramePool) -> Option<Packet> {
        let more = received.options & XDP_PKT_CONTD != 0;
        let segment = self.usable(received.taken, pool);
        let state = std::mem::replace(&mut self.state, State::Start);
        let packet = match (state, segment) {
            (State::Start, Some(segment)) => Some(Packet::new(self.ingress, segment)),
            (State::Partial(packet), Some(segment)) => extend(packet, segment, pool),
            (State::Partial(packet), None) => {
                pool.give_packet(packet);
                None
            }
            (State::Discard, Some(segment)) => {
                pool.give(segment.into_frame());
                None
            }
            (State::Start | State::Discard, None) => None,
        };
        match packet {
            Some(packet) if more => self.state = State::Partial(packet),
            Some(packet) => return Some(packet),
            None if more => self.state = State::Discard,
            None => self.broken += 1,
        }
        None
    }

    fn usable(&mut self, taken: Taken<Segment>, pool: &mut FramePool) -> Option<Segment> {
        match taken {
            Taken::Good(segment) => return Some(segment),
            Taken::Empty(frame) => pool.give(frame),
            Taken::Bad => {}
        }
        self.bad_descriptors += 1;
        None
    }

    /// Gives the frames of a packet in assembly back.
    pub fn close(self, pool: &mut FramePool) {
        if let State::Partial(packet) = self.state {
            pool.give_packet(packet);
        }
    }
}

/// The packet with another segment; `None`, its frames given back, when it has no room.
fn extend(mut packet: Packet, segment: Segment, pool: &mut FramePool) -> Option<Packet> {
    match packet.append(segment) {
        Ok(()) => Some(packet),
        Err(segment) => {
            pool.give(segment.into_frame());
            pool.give_packet(packet);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::packet::MAX_SEGMENTS;
    use super::super::pool::FrameStore;
    use super::*;

    const LAST: u32 = 0;

    struct Bench {
        assembler: Assembler,
        pool: FramePool,
    }

    impl Bench {
        fn new() -> Self {
            Self {
                assembler: Assembler::new(LinkId(4)),
                pool: FramePool::new(FrameStore::new(64).unwrap()),
            }
        }

        fn good(&mut self, options: u32) -> Option<Packet> {
            let frame = self.pool.take().unwrap();
            let taken = Taken::Good(Segment::new(frame, 256, 100).unwrap());
            let received = Received { taken, options };
            self.assembler.add(received, &mut self.pool)
        }

        fn bad(&mut self, options: u32) -> Option<Packet> {
            let received = Received {
                taken: Taken::Bad,
                options,
            };
            self.assembler.add(received, &mut self.pool)
        }

        fn finish(mut self, packets: Vec<Packet>) {
            for packet in packets {
                self.pool.give_packet(packet);
            }
            self.assembler.close(&mut self.pool);
            assert_eq!(self.pool.held(), 64);
        }
    }

    #[test]
    fn descriptors_that_go_on_make_one_packet() {
        let mut bench = Bench::new();
        assert!(bench.good(XDP_PKT_CONTD).is_none());
        assert!(bench.good(XDP_PKT_CONTD).is_none());
        let packet = bench.good(LAST).unwrap();
        assert_eq!((packet.segments().len(), packet.ingress), (3, LinkId(4)));
        let single = bench.good(LAST).unwrap();
        assert_eq!(single.segments().len(), 1);
        bench.finish(vec![packet, single]);
    }

    #[test]
    fn a_packet_of_too_many_is_dropped_whole_and_the_next_one_is_good() {
        let mut bench = Bench::new();
        for _ in 0..MAX_SEGMENTS + 5 {
            assert!(bench.good(XDP_PKT_CONTD).is_none());
        }
        assert!(bench.good(LAST).is_none());
        assert_eq!(bench.assembler.broken, 1);
        let next = bench.good(LAST).unwrap();
        bench.finish(vec![next]);
    }

    #[test]
    fn a_packet_of_the_most_segments_is_good() {
        let mut bench = Bench::new();
        for _ in 1..MAX_SEGMENTS {
            assert!(bench.good(XDP_PKT_CONTD).is_none());
        }
        let packet = bench.good(LAST).unwrap();
        assert_eq!(packet.segments().len(), MAX_SEGMENTS);
        bench.finish(vec![packet]);
    }

    #[test]
    fn a_bad_descriptor_drops_its_packet_wherever_it_stands() {
        for place in 0..3 {
            let mut bench = Bench::new();
            for number in 0..3 {
                let options = if number < 2 { XDP_PKT_CONTD } else { LAST };
                let packet = if number == place {
                    bench.bad(options)
                } else {
                    bench.good(options)
                };
                assert!(packet.is_none(), "bad at {place}, packet at {number}");
            }
            assert_eq!(bench.assembler.broken, 1);
            assert_eq!(bench.assembler.bad_descriptors, 1);
            let next = bench.good(LAST).unwrap();
            bench.finish(vec![next]);
        }
    }

    #[test]
    fn a_packet_cut_off_by_the_close_gives_its_frames_back() {
        let mut bench = Bench::new();
        assert!(bench.good(XDP_PKT_CONTD).is_none());
        assert!(bench.good(XDP_PKT_CONTD).is_none());
        bench.finish(Vec::new());
    }
}

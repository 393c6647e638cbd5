//! Capture files: a wrapper that records a link's traffic, and a link that plays a file.
//!
//! The classic format (draft-ietf-opsawg-pcap): a file header, then for each packet a record
//! header and its bytes. Written with nanoseconds in this machine's byte order, read in either
//! order and resolution.
//!
//! ```text
//! │ magic │ version │ zero │ zero │ snap length │ link type │   24 bytes
//! │ seconds │ fraction │ captured │ original │ bytes …      │   16 bytes and the packet
//! ```
//!
//! The format knows no direction: a recorded link's packets stand in the order received and
//! sent. Deliberately absent: filters, and the newer pcapng.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::packet::Packet;
use super::pool::FramePool;
use super::{BATCH, Flush, Link, LinkCaps, LinkStatistics};
use crate::ids::LinkId;

const MAGIC_NANOSECONDS: u32 = 0xa1b2_3c4d;
const MAGIC_MICROSECONDS: u32 = 0xa1b2_c3d4;
/// Link type of Ethernet frames.
const ETHERNET: u32 = 1;
/// The longest packet: as tcpdump's.
const MAX_PACKET_BYTES: u32 = 262_144;

/// Why a capture file cannot be played.
#[derive(Debug, thiserror::Error)]
pub enum PcapError {
    /// Reading.
    #[error("capture file: {0}")]
    Read(#[from] io::Error),
    /// The file is something else.
    #[error("capture file: it starts with {0:#010x}, not as a classic pcap file")]
    Magic(u32),
    /// The packets are no Ethernet frames.
    #[error("capture file: link type {0}, not Ethernet (1)")]
    LinkType(u32),
    /// A record that is longer than any packet.
    #[error("capture file: record {record} claims {bytes} bytes, the most is {MAX_PACKET_BYTES}")]
    Length {
        /// Its number, from zero.
        record: usize,
        /// Its length.
        bytes: u32,
    },
}

/// A packet in a capture file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// When it was captured, since the epoch.
    pub time: Duration,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// Writes a capture file.
#[derive(Debug)]
pub struct PcapWriter<W> {
    out: W,
}

impl<W: Write> PcapWriter<W> {
    /// Starts a file of Ethernet frames.
    pub fn new(mut out: W) -> io::Result<Self> {
        out.write_all(&MAGIC_NANOSECONDS.to_ne_bytes())?;
        out.write_all(&2u16.to_ne_bytes())?;
        out.write_all(&4u16.to_ne_bytes())?;
        for word in [0, 0, MAX_PACKET_BYTES, ETHERNET] {
            out.write_all(&word.to_ne_bytes())?;
        }
        Ok(Self { out })
    }

    /// Adds a packet that lies in those slices.
    pub fn write<'a>(
        &mut self,
        time: Duration,
        slices: impl Iterator<Item = &'a [u8]> + Clone,
    ) -> io::Result<()> {
        let len: usize = slices.clone().map(<[u8]>::len).sum();
        // The format's seconds end in 2106.
        let header = [
            time.as_secs() as u32,
            time.subsec_nanos(),
            len as u32,
            len as u32,
        ];
        for word in header {
            self.out.write_all(&word.to_ne_bytes())?;
        }
        for slice in slices {
            self.out.write_all(slice)?;
        }
        Ok(())
    }

    /// Writes out what is buffered.
    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Reads a capture file to its end; a record that is cut off there is an error.
pub fn read_all(mut file: impl Read) -> Result<Vec<Record>, PcapError> {
    let mut header = [0; 24];
    file.read_exact(&mut header)?;
    let magic = word(&header, 0, false);
    let (swapped, nanoseconds) = match (magic, magic.swap_bytes()) {
        (MAGIC_NANOSECONDS, _) => (false, true),
        (MAGIC_MICROSECONDS, _) => (false, false),
        (_, MAGIC_NANOSECONDS) => (true, true),
        (_, MAGIC_MICROSECONDS) => (true, false),
        _ => return Err(PcapError::Magic(magic)),
    };
    // The upper bits may tell of a frame check sequence.
    let link_type = word(&header, 20, swapped) & 0xffff;
    if link_type != ETHERNET {
        return Err(PcapError::LinkType(link_type));
    }
    let mut records = Vec::new();
    while let Some(header) = record_header(&mut file)? {
        let bytes = word(&header, 8, swapped);
        if bytes > MAX_PACKET_BYTES {
            let record = records.len();
            return Err(PcapError::Length { record, bytes });
        }
        let fraction = u64::from(word(&header, 4, swapped));
        let fraction = if nanoseconds {
            fraction
        } else {
            fraction * 1000
        };
        let seconds = u64::from(word(&header, 0, swapped));
        let mut packet = vec![0; bytes as usize];
        file.read_exact(&mut packet)?;
        records.push(Record {
            time: Duration::from_secs(seconds) + Duration::from_nanos(fraction),
            bytes: packet,
        });
    }
    Ok(records)
}

/// The next record's header; `None` at the end of the file.
fn record_header(file: &mut impl Read) -> io::Result<Option<[u8; 16]>> {
    let mut first = Vec::new();
    file.by_ref().take(1).read_to_end(&mut first)?;
    let Some(&byte) = first.first() else {
        return Ok(None);
    };
    let mut header = [byte; 16];
    file.read_exact(&mut header[1..])?;
    Ok(Some(header))
}

fn word(bytes: &[u8], at: usize, swapped: bool) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    let word = u32::from_ne_bytes(word);
    if swapped { word.swap_bytes() } else { word }
}

/// A link whose packets, received and sent, are written to a capture file as they stand (a
/// partial checksum is not completed).
///
/// An error in writing ends the capture, not the traffic; [`error`](Self::error) tells it.
#[derive(Debug)]
pub struct CaptureLink<L, W, C> {
    link: L,
    writer: PcapWriter<W>,
    clock: C,
    error: Option<io::Error>,
}

impl<L: Link, W: Write + Send, C: FnMut() -> Duration + Send> CaptureLink<L, W, C> {
    /// Captures that link's traffic; `clock` gives the time since the epoch.
    pub fn new(link: L, out: W, clock: C) -> io::Result<Self> {
        Ok(Self {
            link,
            writer: PcapWriter::new(out)?,
            clock,
            error: None,
        })
    }

    /// Why the capture ended early, if it did.
    #[must_use]
    pub fn error(&self) -> Option<&io::Error> {
        self.error.as_ref()
    }

    fn record(&mut self, pool: &FramePool, packet: &Packet) {
        if self.error.is_none() {
            let time = (self.clock)();
            let written = self.writer.write(time, packet.slices(pool.umem()));
            self.error = written.err();
        }
    }
}

impl<L: Link, W: Write + Send, C: FnMut() -> Duration + Send> Link for CaptureLink<L, W, C> {
    fn caps(&self) -> LinkCaps {
        self.link.caps()
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        self.link.poll_fd()
    }

    fn receive(&mut self, pool: &mut FramePool, batch: &mut Vec<Packet>) -> usize {
        let before = batch.len();
        let count = self.link.receive(pool, batch);
        for packet in &batch[before..] {
            self.record(pool, packet);
        }
        count
    }

    fn send(&mut self, pool: &mut FramePool, packet: Packet) -> Result<(), Packet> {
        // Before it is gone; one that is handed back stands in the file once for each try.
        self.record(pool, &packet);
        self.link.send(pool, packet)
    }

    fn flush(&mut self, pool: &mut FramePool) -> Flush {
        self.link.flush(pool)
    }

    fn statistics(&self) -> LinkStatistics {
        self.link.statistics()
    }

    fn close(mut self: Box<Self>, pool: &mut FramePool) {
        // Nobody is left to tell.
        let _ = self.writer.flush();
        Box::new(self.link).close(pool);
    }
}

/// A link that receives the packets of a capture file, as fast as it is asked, and loses what
/// is sent.
#[derive(Debug)]
pub struct PlayLink {
    id: LinkId,
    caps: LinkCaps,
    records: VecDeque<Record>,
    queued: Vec<Packet>,
    statistics: LinkStatistics,
}

impl PlayLink {
    /// A link that plays those records.
    #[must_use]
    pub fn new(id: LinkId, caps: LinkCaps, records: Vec<Record>) -> Self {
        Self {
            id,
            caps,
            records: records.into(),
            queued: Vec::new(),
            statistics: LinkStatistics::default(),
        }
    }

    /// Records not received yet.
    #[must_use]
    pub fn left(&self) -> usize {
        self.records.len()
    }
}

impl Link for PlayLink {
    fn caps(&self) -> LinkCaps {
        self.caps
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn receive(&mut self, pool: &mut FramePool, batch: &mut Vec<Packet>) -> usize {
        let before = batch.len();
        while batch.len() < BATCH {
            let Some(record) = self.records.pop_front() else {
                break;
            };
            match Packet::from_bytes(pool, self.id, &record.bytes) {
                Some(packet) if packet.segments().len() == 1 || self.caps.multi_buffer => {
                    batch.push(packet);
                }
                Some(packet) => {
                    self.statistics.rx_dropped += 1;
                    pool.give_packet(packet);
                }
                None => self.statistics.rx_fill_empty += 1,
            }
        }
        batch.len().saturating_sub(before)
    }

    fn send(&mut self, _pool: &mut FramePool, packet: Packet) -> Result<(), Packet> {
        if self.queued.len() == BATCH {
            return Err(packet);
        }
        self.queued.push(packet);
        Ok(())
    }

    fn flush(&mut self, pool: &mut FramePool) -> Flush {
        for packet in self.queued.drain(..) {
            pool.give_packet(packet);
        }
        Flush::Done
    }

    fn statistics(&self) -> LinkStatistics {
        self.statistics
    }

    fn close(mut self: Box<Self>, pool: &mut FramePool) {
        self.flush(pool);
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::MemoryLink;
    use super::super::pool::FrameStore;
    use super::*;

    const ALL: LinkCaps = LinkCaps {
        multi_buffer: true,
        partial_checksum: true,
    };

    fn words(words: &[u32], order: fn(u32) -> [u8; 4]) -> Vec<u8> {
        words.iter().flat_map(|&word| order(word)).collect()
    }

    #[test]
    fn a_recorded_link_can_be_played() {
        let store = FrameStore::new(16).unwrap();
        let mut pool = FramePool::new(store.clone());
        let (link, wire) = MemoryLink::new(ALL);
        let mut file = Vec::new();
        let mut nanos = 1_700_000_000_123_456_788;
        let clock = || {
            nanos += 1;
            Duration::from_nanos(nanos)
        };
        let mut link = CaptureLink::new(link, &mut file, clock).unwrap();
        let mut batch = Vec::new();
        wire.push(vec![1; 60]);
        assert_eq!(link.receive(&mut pool, &mut batch), 1);
        link.send(&mut pool, batch.remove(0)).unwrap();
        let large = Packet::from_bytes(&mut pool, LinkId(0), &[2; 9000]).unwrap();
        link.send(&mut pool, large).unwrap();
        assert_eq!(link.flush(&mut pool), Flush::Done);
        assert!(link.error().is_none());
        Box::new(link).close(&mut pool);

        let records = read_all(file.as_slice()).unwrap();
        let bytes: Vec<_> = records
            .iter()
            .map(|r| (r.bytes[0], r.bytes.len()))
            .collect();
        assert_eq!(bytes, [(1, 60), (1, 60), (2, 9000)]);
        assert_eq!(
            records[0].time,
            Duration::from_nanos(1_700_000_000_123_456_789)
        );

        let mut play = PlayLink::new(LinkId(3), LinkCaps::default(), records);
        assert_eq!(play.receive(&mut pool, &mut batch), 2);
        assert_eq!((play.left(), play.statistics().rx_dropped), (0, 1));
        for packet in batch {
            assert_eq!(packet.ingress, LinkId(3));
            play.send(&mut pool, packet).unwrap();
        }
        Box::new(play).close(&mut pool);
        drop(pool);
        assert_eq!(store.available(), 16);
    }

    #[test]
    fn either_byte_order_and_resolution_is_read() {
        let file = |magic, order| {
            let mut file = words(&[magic, 0, 0, 0, 65535, 1, 5, 7, 2, 60], order);
            file.extend([8, 9]);
            file
        };
        for order in [u32::to_be_bytes, u32::to_le_bytes] {
            for (magic, nanos) in [(MAGIC_NANOSECONDS, 7), (MAGIC_MICROSECONDS, 7000)] {
                let records = read_all(file(magic, order).as_slice()).unwrap();
                let expected = Record {
                    time: Duration::new(5, nanos),
                    bytes: vec![8, 9],
                };
                assert_eq!(records, [expected]);
            }
        }
    }

    #[test]
    fn what_is_no_capture_of_ethernet_is_refused() {
        let order = u32::to_ne_bytes;
        let magic = MAGIC_NANOSECONDS;
        let read = |numbers: &[u32]| read_all(words(numbers, order).as_slice()).unwrap_err();
        assert!(matches!(read(&[0x0a0d_0d0a; 6]), PcapError::Magic(_)));
        assert!(matches!(
            read(&[magic, 0, 0, 0, 0, 101]),
            PcapError::LinkType(101)
        ));
        assert!(matches!(
            read(&[magic, 0, 0, 0, 0, 1, 0, 0, 1 << 20, 0]),
            PcapError::Length { record: 0, .. }
        ));
        for cut in [&[magic, 0, 0][..], &[magic, 0, 0, 0, 0, 1, 9]] {
            assert!(matches!(read(cut), PcapError::Read(_)));
        }
    }
}

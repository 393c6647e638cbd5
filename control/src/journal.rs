//! The journal of connections: what a killed agent's successor must know to go on with them.
//!
//! Once a second, while anything changes, a thread of its own copies the table into a file of the
//! state directory, beside the workers and without holding them up. A successor puts back what it
//! finds before it opens a device, so that a translated connection keeps its port and an answer
//! is still known for one. What began within the last second before a crash is lost, and begins
//! anew.
//!
//! ```text
//! "skein connections 1\n" boot id "\n"  records of 92 bytes:
//!  original: src 16, dst 16, ports 2 + 2 │ the same of the reply │ protocol │ state │ flags │ 0 │
//!  tags 4 + 4 │ remaining, ms 4 │ age, ms 4        (numbers big-endian)
//! ```
//!
//! Deliberately absent: fsync. A crash of the agent loses no page that is written; one of the
//! machine ends the connections too, and the boot id says so.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use skein_dataplane::conntrack::{Entry, Tags, Tuple};
use skein_dataplane::ids::EndpointId;
use skein_dataplane::slow::Shared;
use skein_dataplane::time::Instant;

/// How often the table is looked at.
const EVERY: Duration = Duration::from_secs(1);

/// A table that does not change is written once in so many looks, for its time-outs.
const REWRITE: u32 = 30;

/// A connection with less time left is not worth a line.
const LEAST_LEFT: Duration = Duration::from_secs(2);

const FILE: &str = "connections";
const MAGIC: &str = "skein connections 1";
const RECORD: usize = 92;
/// Who has the connections that come back: nobody who opens new ones.
const OWNER: EndpointId = EndpointId(u32::MAX);

const PICKED_UP: u8 = 1;
const MASQUERADED: u8 = 2;

/// What came of a journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Connections that go on.
    pub restored: usize,
    /// Those that could not be put back.
    pub refused: usize,
}

/// The thread that writes; ends with the value, after a last look.
pub struct Journal {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Journal {
    /// Starts to keep the journal of these connections.
    pub fn start(directory: &Path, shared: Arc<Shared>) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = stop.clone();
        let path = directory.join(FILE);
        let thread = std::thread::Builder::new()
            .name("skein-journal".into())
            .spawn(move || keep(&path, &shared, &stopping))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It ends by itself; a panic of its own was reported by then.
            let _ = thread.join();
        }
    }
}

fn keep(path: &Path, shared: &Shared, stopping: &AtomicBool) {
    let mut written = None;
    let mut unchanged = 0;
    let mut failed = false;
    loop {
        let last = stopping.load(Ordering::Relaxed);
        let stats = shared.connections.stats();
        unchanged = if written == Some(stats) {
            unchanged + 1
        } else {
            0
        };
        if last || unchanged == 0 || unchanged >= REWRITE {
            match write(path, shared) {
                Ok(()) => {
                    written = Some(stats);
                    unchanged = 0;
                    failed = false;
                }
                Err(error) if !failed => {
                    tracing::warn!(path = %path.display(), %error, "the journal of connections is not written; they will not outlive this agent");
                    failed = true;
                }
                Err(_) => {}
            }
        }
        if last {
            return;
        }
        std::thread::park_timeout(EVERY);
    }
}

fn write(path: &Path, shared: &Shared) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let mut file = BufWriter::new(File::create(&temporary)?);
    writeln!(file, "{MAGIC}\n{}", boot_id()?)?;
    let mut result = Ok(());
    shared.connections.for_each(|entry| {
        if result.is_ok() && entry.remaining >= LEAST_LEFT {
            result = file.write_all(&encode(entry));
        }
    });
    result?;
    file.into_inner().map_err(io::IntoInnerError::into_error)?;
    fs::rename(&temporary, path)
}

/// Puts back what an earlier agent wrote. A journal of an earlier boot, or that cannot be read,
/// is none.
pub fn restore(directory: &Path, shared: &Shared) -> io::Result<Restored> {
    let path: PathBuf = directory.join(FILE);
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Restored::default()),
        Err(error) => return Err(error),
    };
    let head = format!("{MAGIC}\n{}\n", boot_id()?);
    let Some(records) = bytes.strip_prefix(head.as_bytes()) else {
        return Ok(Restored::default());
    };
    let mut restored = Restored::default();
    for record in records.as_chunks::<RECORD>().0 {
        if put_back(record, shared) {
            restored.restored += 1;
        } else {
            restored.refused += 1;
        }
    }
    Ok(restored)
}

fn boot_id() -> io::Result<String> {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(id.trim().to_owned())
}

fn encode(entry: &Entry) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    let mut rest = &mut record[..];
    let flags = if entry.picked_up { PICKED_UP } else { 0 }
        | if entry.masquerade.is_some() {
            MASQUERADED
        } else {
            0
        };
    let mut put = |bytes: &[u8]| {
        let (now, later) = std::mem::take(&mut rest).split_at_mut(bytes.len());
        now.copy_from_slice(bytes);
        rest = later;
    };
    for tuple in [&entry.original, &entry.reply] {
        put(&tuple.src);
        put(&tuple.dst);
        put(&tuple.src_port.to_be_bytes());
        put(&tuple.dst_port.to_be_bytes());
    }
    put(&[entry.original.protocol, entry.state, flags, 0]);
    put(&entry.tags.original.to_be_bytes());
    put(&entry.tags.reply.to_be_bytes());
    put(&millis(entry.remaining).to_be_bytes());
    put(&millis(entry.age).to_be_bytes());
    record
}

fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

/// Reads a record field by field.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        // A record has as many bytes as its fields.
        let (now, later) = self.0.split_first_chunk().expect("a field of the record");
        self.0 = later;
        *now
    }

    fn tuple(&mut self) -> Tuple {
        Tuple {
            src: self.take(),
            dst: self.take(),
            src_port: u16::from_be_bytes(self.take()),
            dst_port: u16::from_be_bytes(self.take()),
            protocol: 0,
        }
    }
}

/// Puts a connection back; false when it was refused. Its owner's share and its Service are not
/// known yet, and count for new connections alone.
fn put_back(record: &[u8; RECORD], shared: &Shared) -> bool {
    let mut fields = Fields(record);
    let (mut original, mut reply) = (fields.tuple(), fields.tuple());
    let [protocol, state, flags, _] = fields.take();
    (original.protocol, reply.protocol) = (protocol, protocol);
    let tags = Tags {
        original: u32::from_be_bytes(fields.take()),
        reply: u32::from_be_bytes(fields.take()),
    };
    let remaining = Duration::from_millis(u32::from_be_bytes(fields.take()).into());
    let age = Duration::from_millis(u32::from_be_bytes(fields.take()).into());
    let mut masquerade = None;
    if flags & MASQUERADED != 0 {
        let is_v4 = reply
            .dst
            .starts_with(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]);
        masquerade = (shared.ports).lease_again(&original, is_v4, reply.dst_port);
        if masquerade.is_none() {
            return false;
        }
    }
    let entry = Entry {
        original,
        reply,
        owner: OWNER,
        service: 0,
        state,
        state_name: "",
        picked_up: flags & PICKED_UP != 0,
        masquerade,
        tags,
        idle: Duration::ZERO,
        remaining,
        age,
    };
    // The workers' clock has only just begun.
    (shared.connections)
        .restore(&entry, Instant::default())
        .is_ok()
}

#[cfg(test)]
mod tests {
    use skein_dataplane::conntrack::{Limits, NewConnection, PortPool, Segment};
    use skein_dataplane::wire::ipv6::v4_mapped;
    use skein_dataplane::wire::{protocol, tcp::TcpFlags};

    use super::*;

    fn shared() -> Arc<Shared> {
        Arc::new(Shared::new(
            Limits::new(64),
            PortPool::new(61_000..=61_100),
            1,
            || {},
        ))
    }

    fn tuple(last: u8, protocol: u8) -> Tuple {
        Tuple {
            src: v4_mapped([10, 244, 1, last]),
            dst: v4_mapped([203, 0, 113, 1]),
            src_port: 4000 + u16::from(last),
            dst_port: 443,
            protocol,
        }
    }

    fn all(shared: &Shared) -> Vec<(Tuple, Tuple, u8, bool, Option<u16>)> {
        let mut found = Vec::new();
        shared.connections.for_each(|entry| {
            let port = entry.masquerade.map(|lease| lease.port);
            let state = entry.state;
            found.push((entry.original, entry.reply, state, entry.picked_up, port));
        });
        found.sort();
        found
    }

    #[test]
    fn connections_come_back_as_they_were() {
        let folder = tempfile::tempdir().unwrap();
        let before = shared();
        let now = Instant::default();
        for (last, protocol) in [(1, protocol::TCP), (2, protocol::UDP), (3, protocol::TCP)] {
            let original = tuple(last, protocol);
            let mut reply = original.reversed();
            let mut masquerade = None;
            if last != 3 {
                let lease = before.ports.lease(&original, true, |_| false, 0).unwrap();
                reply.dst = v4_mapped([192, 0, 2, 1]);
                reply.dst_port = lease.port;
                masquerade = Some(lease);
            }
            let segment = Segment {
                tcp_flags: TcpFlags::ACK,
                ..Segment::default()
            };
            let new = NewConnection {
                original,
                reply,
                owner: EndpointId(1),
                masquerade,
                picked_up: true,
                service: 7,
            };
            before.connections.create(new, segment, now).unwrap();
        }
        write(&folder.path().join(FILE), &before).unwrap();
        let after = shared();
        let restored = restore(folder.path(), &after).unwrap();
        assert_eq!((restored.restored, restored.refused), (3, 0));
        assert_eq!(all(&after), all(&before));
        // The ports are taken again, by the same pods.
        let lease = after
            .ports
            .lease(&tuple(1, protocol::TCP), true, |_| false, 0);
        assert_eq!(lease.unwrap().port, all(&before)[0].4.unwrap());
    }

    #[test]
    fn what_is_no_journal_of_this_boot_is_none() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(
            restore(folder.path(), &shared()).unwrap(),
            Restored::default()
        );
        for text in ["", "skein connections 1\nanother-boot\n", "noise"] {
            fs::write(folder.path().join(FILE), text).unwrap();
            assert_eq!(
                restore(folder.path(), &shared()).unwrap(),
                Restored::default()
            );
        }
        // One that breaks off in the middle of a record.
        let mut bytes = format!("{MAGIC}\n{}\n", boot_id().unwrap()).into_bytes();
        bytes.extend([0xff; 100]);
        fs::write(folder.path().join(FILE), bytes).unwrap();
        let restored = restore(folder.path(), &shared()).unwrap();
        assert_eq!((restored.restored, restored.refused), (0, 1));
    }
}

//! Fuzzing the datapath on the stable toolchain.
//!
//! A target is a function over a frame's bytes that panics when something that must hold does
//! not. [`run`] gives it first every stored case, then cases made from stored ones for
//! as long as asked. Run all of them with
//!
//! ```text
//! SKEIN_FUZZ_SECONDS=60 cargo test --release --manifest-path dataplane/fuzz/Cargo.toml
//! ```
//!
//! `coverage.toml` beside this package's manifest says how to let libFuzzer guide the same
//! targets by the code that they reach.
//!
//! Stored cases are files with one frame each: `corpus/<target>/` holds frames worth starting
//! from, `../tests/data/<target>/` what once failed here or is known to fail others, which the datapath's own tests replay
//! too. A case that fails is written to the second before the run fails; keep the file.

pub mod parse_target;
pub mod pipeline_target;

use std::cell::Cell;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bolero::TypeGenerator;
use skein_dataplane::wire::{checksum, ipv4};

/// How long a target runs, in seconds, when the environment does not say.
const DEFAULT_SECONDS: u64 = 2;
/// Frames do not grow beyond what a parser reads of them, and some.
const FRAME_MAX_LEN: usize = 4096;
/// Offset of the IP header in a frame.
const L3_OFFSET: usize = 14;

/// One change to a frame. Positions are taken modulo its length.
#[derive(Debug, Clone, TypeGenerator)]
enum Edit {
    Set {
        at: u16,
        value: u8,
    },
    /// A byte from the start, where headers are, to one of the values that matter.
    Boundary {
        at: u8,
        which: u8,
    },
    Flip {
        at: u16,
        bit: u8,
    },
    SetWord {
        at: u16,
        value: u16,
    },
    Insert {
        at: u16,
        value: u8,
        count: u8,
    },
    Remove {
        at: u16,
        count: u8,
    },
    Copy {
        from: u16,
        to: u16,
        count: u8,
    },
    Truncate {
        len: u16,
    },
    /// The rest of the frame from another stored case.
    Splice {
        at: u16,
        other: u8,
        from: u16,
    },
}

/// A stored case and what to change in it.
#[derive(Debug, Clone, TypeGenerator)]
struct Case {
    seed: u8,
    edits: Vec<Edit>,
    /// Whether to put the IPv4 header checksum right afterwards; without that, most edits
    /// would end there.
    repair: bool,
}

/// Replays every stored case of target `name`, then fuzzes `target` for
/// `SKEIN_FUZZ_SECONDS`.
///
/// # Panics
/// When a case makes `target` panic; when the corpus is missing or not readable; when the
/// variable holds no number.
pub fn run(name: &str, target: fn(&[u8])) {
    let seeds = stored(&package().join("corpus").join(name));
    assert!(
        !seeds.is_empty(),
        "no stored frames to start from in corpus/{name}"
    );
    let failures = package().join("../tests/data").join(name);
    for (path, frame) in seeds.iter().chain(&stored(&failures)) {
        if let Err(panic) = catch_unwind(|| target(frame)) {
            eprintln!("stored case {} fails", path.display());
            resume_unwind(panic);
        }
    }
    let tried = Cell::new(0_u64);
    let counted = AssertUnwindSafe(&tried);
    bolero::check!()
        .with_type::<Case>()
        .with_iterations(usize::MAX)
        .with_test_time(Duration::from_secs(seconds()))
        .with_shrink_time(Duration::ZERO)
        .for_each(|case| {
            counted.set(counted.get() + 1);
            let frame = frame_of(case, &seeds);
            if let Err(panic) = catch_unwind(|| target(&frame)) {
                keep(&failures, &frame);
                resume_unwind(panic);
            }
        });
    eprintln!(
        "{name}: {} stored cases, {} made ones",
        seeds.len(),
        tried.get()
    );
    assert!(tried.get() > 0, "no case was made");
}

fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn seconds() -> u64 {
    match std::env::var("SKEIN_FUZZ_SECONDS") {
        Ok(text) => text
            .parse()
            .expect("SKEIN_FUZZ_SECONDS is a whole number of seconds"),
        Err(_) => DEFAULT_SECONDS,
    }
}

/// The files of a folder, in order of their names; none if there is no folder.
fn stored(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut paths: Vec<_> = entries
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "bin"))
        .collect();
    paths.sort();
    let read = |path: PathBuf| {
        let frame = fs::read(&path).expect("a readable stored case");
        (path, frame)
    };
    paths.into_iter().map(read).collect()
}

/// Stores a failing frame under a name that depends on its bytes alone.
fn keep(folder: &Path, frame: &[u8]) {
    let mut hasher = DefaultHasher::new();
    frame.hash(&mut hasher);
    let path = folder.join(format!("crash-{:016x}.bin", hasher.finish()));
    let written = fs::create_dir_all(folder).and_then(|()| fs::write(&path, frame));
    match written {
        Ok(()) => eprintln!("the failing frame is in {}", path.display()),
        Err(error) => eprintln!(
            "{} cannot be written: {error}; {frame:02x?}",
            path.display()
        ),
    }
}

fn frame_of(case: &Case, seeds: &[(PathBuf, Vec<u8>)]) -> Vec<u8> {
    let mut frame = seeds[usize::from(case.seed) % seeds.len()].1.clone();
    for edit in &case.edits {
        apply(edit, &mut frame, seeds);
        frame.truncate(FRAME_MAX_LEN);
    }
    if case.repair {
        repair(&mut frame);
    }
    frame
}

fn apply(edit: &Edit, frame: &mut Vec<u8>, seeds: &[(PathBuf, Vec<u8>)]) {
    let len = frame.len();
    let within = |at: u16| usize::from(at) % len.max(1);
    match *edit {
        Edit::Set { at, value } => {
            if let Some(byte) = frame.get_mut(within(at)) {
                *byte = value;
            }
        }
        Edit::Boundary { at, which } => {
            const VALUES: [u8; 12] = [0, 1, 4, 6, 17, 43, 44, 51, 58, 60, 0x7f, 0xff];
            if let Some(byte) = frame.get_mut(within(u16::from(at))) {
                *byte = VALUES[usize::from(which) % VALUES.len()];
            }
        }
        Edit::Flip { at, bit } => {
            if let Some(byte) = frame.get_mut(within(at)) {
                *byte ^= 1 << (bit % 8);
            }
        }
        Edit::SetWord { at, value } => {
            if let Some(word) = frame.get_mut(within(at)..within(at) + 2) {
                word.copy_from_slice(&value.to_be_bytes());
            }
        }
        Edit::Insert { at, value, count } => {
            let at = within(at);
            frame.splice(at..at, std::iter::repeat_n(value, usize::from(count)));
        }
        Edit::Remove { at, count } => {
            let at = within(at);
            frame.drain(at..(at + usize::from(count)).min(len));
        }
        Edit::Copy { from, to, count } => {
            let (from, to) = (within(from), within(to));
            let count = usize::from(count).min(len - from).min(len - to);
            frame.copy_within(from..from + count, to);
        }
        Edit::Truncate { len } => frame.truncate(usize::from(len)),
        Edit::Splice { at, other, from } => {
            let other = &seeds[usize::from(other) % seeds.len()].1;
            frame.truncate(within(at));
            frame.extend(other.iter().skip(usize::from(from) % other.len().max(1)));
        }
    }
}

/// Makes the IPv4 header checksum right, if there is a header to speak of.
fn repair(frame: &mut [u8]) {
    let Some(packet) = frame.get_mut(L3_OFFSET..) else {
        return;
    };
    let header_len = packet
        .first()
        .map_or(0, |first| usize::from(first & 0x0f) * 4);
    let Some(header) = packet.get_mut(..header_len) else {
        return;
    };
    if header_len >= ipv4::HEADER_LEN {
        let field = ipv4::CHECKSUM_OFFSET..ipv4::CHECKSUM_OFFSET + 2;
        header[field.clone()].fill(0);
        let sum = checksum::Sum::new().with(header).checksum();
        header[field].copy_from_slice(&sum.to_be_bytes());
    }
}

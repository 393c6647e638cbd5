//! Frames that once failed, here or elsewhere, and the fuzzers' starting points, replayed on every run.
//!
//! `data/<target>/` holds one frame a file; the fuzzers write what they find there.

use std::fs;
use std::path::{Path, PathBuf};

use skein_dataplane::parse;
use skein_dataplane::wire::protocol;
use skein_dataplane::wire::sctp::{self, Sctp};

#[path = "../fuzz/src/parse_target.rs"]
mod parse_target;

#[path = "../fuzz/src/pipeline_target.rs"]
mod pipeline_target;

/// Runs `target` on every stored frame; returns how many there were.
fn replay(folder: &str, target: fn(&[u8])) -> usize {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let paths: Vec<PathBuf> = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "bin"))
        .collect();
    for path in &paths {
        // Shown when the target panics.
        println!("{}", path.display());
        target(&fs::read(path).unwrap());
    }
    paths.len()
}

#[test]
fn parser_cases_hold() {
    assert!(replay("fuzz/corpus/parse", parse_target::check) >= 10);
    assert!(replay("tests/data/parse", parse_target::check) >= 1);
}

#[test]
fn pipeline_cases_hold() {
    assert!(replay("fuzz/corpus/pipeline", pipeline_target::check) >= 10);
    assert!(replay("tests/data/pipeline", pipeline_target::check) >= 1);
    assert!(replay("fuzz/corpus/parse", pipeline_target::check) >= 10);
}

/// What the fuzzers start from are good frames, checksums included.
#[test]
fn starting_frames_are_valid() {
    let count = replay("fuzz/corpus/parse", |frame| {
        let headers = parse::parse(frame, frame.len()).unwrap();
        if headers.protocol == protocol::SCTP {
            let packet = &frame[usize::from(headers.l4_offset)..headers.l3_end()];
            assert_eq!(
                sctp::checksum([packet]),
                Sctp::new(packet).unwrap().checksum()
            );
        }
    });
    assert!(count >= 10);
}

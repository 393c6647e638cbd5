//! Frames that once failed, here or elsewhere, and the fuzzers' starting points, replayed on every run.
//!
//! `data/<target>/` holds one frame a file; the fuzzers write what they find there.

use std::fs;
use std::path::{Path, PathBuf};

#[path = "../fuzz/src/parse_target.rs"]
mod parse_target;

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

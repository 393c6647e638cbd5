//! Rules of the whole repository that no compiler checks.

use std::fs;
use std::path::{Path, PathBuf};

/// The longest that a source file may grow before it is surely two things.
const MAX_LINES: usize = 900;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// All Rust sources below the crates, by their path from the root.
fn sources() -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = ["benches", "cni-bin", "control", "dataplane", "perf"]
        .map(|name| root().join(name))
        .into();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("target") {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(root()).unwrap().display().to_string();
                found.push((name, fs::read_to_string(&path).unwrap()));
            }
        }
    }
    assert!(found.len() > 50, "the sources are here: {}", found.len());
    found
}

#[test]
fn every_module_with_unsafe_code_is_accounted_for() {
    let document = fs::read_to_string(root().join("docs/unsafe.md")).unwrap();
    // Put together here, so that this file is not one of them.
    let marks = ["expect", "allow"].map(|kind| format!("#![{kind}(unsafe_code"));
    let spaced = ["expect", "allow"].map(|kind| format!("#![{kind}(\n    unsafe_code"));
    for (name, text) in sources() {
        let lifts = marks
            .iter()
            .chain(&spaced)
            .any(|mark| text.contains(mark.as_str()));
        assert_eq!(
            lifts,
            document.contains(&name),
            "docs/unsafe.md and the lints of {name} disagree"
        );
    }
}

#[test]
fn no_source_file_is_two_things() {
    for (name, text) in sources() {
        let lines = text.lines().count();
        assert!(
            lines <= MAX_LINES,
            "{name} has {lines} lines: split it by noun"
        );
    }
}

#[test]
fn every_drop_reason_is_in_the_reference() {
    let document = fs::read_to_string(root().join("docs/reference.md")).unwrap();
    for reason in skein_dataplane::verdict::DropReason::ALL {
        let row = format!("| `{}` | {} |", reason.name(), reason.explanation());
        assert!(
            document.contains(&row),
            "docs/reference.md lacks the row\n{row}"
        );
    }
}

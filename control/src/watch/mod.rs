//! Where the cluster's objects come from: each source sends the same changes.

pub mod directory;
pub mod manifest;
mod objects;
mod policy;
mod service;

use std::fmt;
use std::path::PathBuf;

use crate::state::Change;

/// What a source sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Changes that belong together.
    Changes(Vec<Change>),
    /// The source has sent all that there was when it began.
    Synced,
    /// The documents that are refused now; empty when all are in force.
    Faults(Vec<DocumentFault>),
}

/// A document that was refused.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DocumentFault {
    /// The file.
    pub file: PathBuf,
    /// The line, counted from one; the document's first where the fault has none of its own.
    pub line: u64,
    /// Why.
    pub reason: String,
}

impl fmt::Display for DocumentFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.reason)
    }
}

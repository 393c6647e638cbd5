//! The Skein datapath.

pub mod fixtures;
pub mod ids;
pub mod io;
pub mod snapshot;
pub mod stats;
pub mod time;
pub mod verdict;
pub mod wire;

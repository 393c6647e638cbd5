//! The Skein datapath.

pub mod ids;
pub mod io;

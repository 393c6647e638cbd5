//! Skein dataplane.

pub mod parse;
pub mod wire;

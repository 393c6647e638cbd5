//! The Skein node agent.
fn main() {}

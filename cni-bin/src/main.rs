//! The CNI plugin.
fn main() {}

//! Skein benches.

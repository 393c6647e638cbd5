//! Skein perf.

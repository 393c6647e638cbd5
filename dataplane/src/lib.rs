//! Skein dataplane.

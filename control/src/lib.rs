//! Skein control.

//! The flow table: what the slow path decided, ready to apply.
//!
//! Each worker has its own, which no other thread touches. It is a cache: losing an entry costs
//! one more walk through the slow path, never a connection.

mod action;
mod key;
mod table;

pub use action::{Action, Delivery};
pub use key::FlowKey;
pub use table::{FlowTable, Lookup};

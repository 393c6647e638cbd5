//! GC: the agent removes every attachment that the runtime no longer has.

use crate::agent::{self, Reply};
use crate::plugin::{ask, connect, unexpected};
use crate::spec::{CniError, NetConf, code};

/// Hands the runtime's list to the agent. A missing list is an error, never an empty list.
pub fn run(conf: &NetConf) -> Result<(), CniError> {
    let valid = conf.valid_attachments.clone().ok_or_else(|| {
        CniError::new(
            code::INVALID_CONFIG,
            "GC needs cni.dev/valid-attachments",
            "without it every attachment would count as stale",
        )
    })?;
    match ask(&mut connect(conf)?, &agent::Request::Gc { valid })? {
        Reply::Done => Ok(()),
        reply => Err(unexpected(&reply)),
    }
}

//! Errors as a runtime reads them: JSON with a code, on standard output.

use serde_json::json;

use super::Version;
use crate::agent::{AgentError, CallError};
use crate::netlink::NetlinkError;

/// Error codes: 1 to 99 are the specification's, 100 to 109 the plugin's, and from
/// 110 on the agent's.
pub mod code {
    /// The configuration's `cniVersion` cannot be spoken, or lacks the command.
    pub const INCOMPATIBLE_VERSION: u32 = 1;
    /// A field of the configuration is not supported.
    pub const UNSUPPORTED_FIELD: u32 = 2;
    /// A `CNI_*` environment variable is missing or bad.
    pub const INVALID_ENVIRONMENT: u32 = 4;
    /// Reading standard input failed.
    pub const IO_FAILURE: u32 = 5;
    /// Standard input is no JSON, or not of the specified shape.
    pub const DECODING_FAILURE: u32 = 6;
    /// The configuration has a bad value.
    pub const INVALID_CONFIG: u32 = 7;
    /// A transient condition: the runtime should try again.
    pub const TRY_AGAIN: u32 = 11;
    /// STATUS: the plugin cannot serve ADD.
    pub const NOT_AVAILABLE: u32 = 50;
    /// STATUS: it cannot serve ADD, and existing containers may have limited connectivity.
    pub const LIMITED_CONNECTIVITY: u32 = 51;
    /// The interface could not be made or removed.
    pub const INTERFACE: u32 = 100;
    /// An interface of that name exists and is not ours.
    pub const INTERFACE_TAKEN: u32 = 101;
    /// Agent and plugin do not understand each other.
    pub const AGENT_PROTOCOL: u32 = 102;
    /// CHECK found something other than what ADD made.
    pub const CHECK_FAILED: u32 = 103;
    /// The IPAM plugin could not be run, or answered nonsense; its own errors keep their code.
    pub const DELEGATE: u32 = 104;
}

/// A command's failure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{msg}{} (code {code})", if details.is_empty() { String::new() } else { format!(": {details}") })]
pub struct CniError {
    /// One of [`code`], or the agent's own.
    pub code: u32,
    /// What happened, to what.
    pub msg: String,
    /// The cause, and what to do; may be empty.
    pub details: String,
}

impl CniError {
    /// An error of that code.
    pub fn new(code: u32, msg: impl Into<String>, details: impl Into<String>) -> Self {
        Self {
            code,
            msg: msg.into(),
            details: details.into(),
        }
    }

    /// An interface that could not be made or removed, with its cause.
    pub fn interface(msg: impl Into<String>, cause: &impl ToString) -> Self {
        Self::new(code::INTERFACE, msg, cause.to_string())
    }

    /// Adds to the details.
    pub fn also(mut self, more: &str) -> Self {
        if !self.details.is_empty() {
            self.details.push_str("; ");
        }
        self.details.push_str(more);
        self
    }

    /// The JSON that a runtime of that version reads.
    pub fn to_json(&self, version: Version) -> String {
        json!({
            "cniVersion": version.as_str(),
            "code": self.code,
            "msg": self.msg,
            "details": self.details,
        })
        .to_string()
    }
}

impl From<AgentError> for CniError {
    fn from(error: AgentError) -> Self {
        Self::new(error.code, error.msg, error.details)
    }
}

impl From<CallError> for CniError {
    /// An agent that is down comes back: the runtime tries again.
    fn from(error: CallError) -> Self {
        Self::new(
            code::TRY_AGAIN,
            "the node's Skein agent is not available",
            error.to_string(),
        )
    }
}

impl From<NetlinkError> for CniError {
    fn from(error: NetlinkError) -> Self {
        Self::interface("the kernel refused to change the network", &error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden() {
        let error = CniError::new(
            code::TRY_AGAIN,
            "no address left",
            "pool 10.0.0.0/24 is full",
        );
        assert_eq!(
            error.to_json(Version::V0_4_0),
            r#"{"cniVersion":"0.4.0","code":11,"details":"pool 10.0.0.0/24 is full","msg":"no address left"}"#
        );
        assert_eq!(
            error.also("undo failed").details,
            "pool 10.0.0.0/24 is full; undo failed"
        );
    }
}

//! STATUS: would an ADD succeed now?

use crate::agent::{self, Client, Reply};
use crate::ipam::Ipam;
use crate::plugin::{AGENT_DEADLINE, unexpected};
use crate::spec::{CniError, NetConf, code};

/// Asks the agent. One that is down makes the plugin "not available" (50); what the agent
/// itself answers keeps its code (51: pods that run are affected too).
pub fn run(conf: &NetConf, ipam: Option<&Ipam>) -> Result<(), CniError> {
    let reply = Client::connect(&conf.socket, AGENT_DEADLINE)
        .and_then(|mut agent| agent.call(&agent::Request::Status))
        .map_err(|e| {
            CniError::new(
                code::NOT_AVAILABLE,
                "the node's Skein agent is not available",
                e.to_string(),
            )
        })?;
    match reply {
        Reply::Done => ipam.map_or(Ok(()), |ipam| ipam.call("STATUS")),
        Reply::Error(error) => Err(error.into()),
        reply => Err(unexpected(&reply)),
    }
}

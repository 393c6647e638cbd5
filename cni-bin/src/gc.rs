//! GC: the agent removes every attachment of this network that the runtime no longer has.

use crate::agent::{self, Reply};
use crate::ipam::Ipam;
use crate::plugin::{ask, connect, unexpected};
use crate::spec::{CniError, NetConf, code};

/// Hands the runtime's list to the agent. A missing list is an error, never an empty list.
pub fn run(conf: &NetConf, ipam: Option<&Ipam>) -> Result<(), CniError> {
    let valid = conf.valid_attachments.clone().ok_or_else(|| {
        CniError::new(
            code::INVALID_CONFIG,
            "GC needs cni.dev/valid-attachments",
            "without it every attachment would count as stale",
        )
    })?;
    let request = agent::Request::Gc {
        network: conf.name.clone(),
        valid,
    };
    let collected = match connect(conf).and_then(|mut agent| ask(&mut agent, &request)) {
        Ok(Reply::Done) => Ok(()),
        Ok(reply) => Err(unexpected(&reply)),
        Err(error) => Err(error),
    };
    // Whatever the agent says, the addresses are looked through.
    let addresses = ipam.map_or(Ok(()), |ipam| ipam.call("GC"));
    collected.and(addresses)
}

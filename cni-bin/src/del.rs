//! DEL: remove the interface and give back what the agent reserved for it.
//!
//! It succeeds for what is not there, with the namespace gone, and with the agent down: the
//! agent finds out when it returns, since the interface is gone. It fails only where something
//! that is there could not be removed.

use std::path::Path;

use crate::agent::{self, CallError, Client, Reply};
use crate::interface;
use crate::netlink::Netlink;
use crate::netns::Netns;
use crate::plugin::{AGENT_DEADLINE, unexpected};
use crate::request::Call;
use crate::spec::{CniError, code};

/// Removes the interface; `Some` tells for the log what went wrong without harm.
pub fn run(call: &Call) -> Result<Option<String>, CniError> {
    // The agent first, so that it lets go of the link before the link goes; whatever it
    // says, the link is removed.
    let asked = ask_agent(call);
    let removed = remove_interface(call);
    // One that was not there to be asked may have started meanwhile and found the link.
    let asked = match asked {
        Ok(Some(_)) => ask_agent(call),
        asked => asked,
    };
    let addresses = call.ipam.as_ref().map_or(Ok(()), |ipam| ipam.call("DEL"));
    removed.and(addresses).and(asked)
}

fn remove_interface(call: &Call) -> Result<(), CniError> {
    let pod = call.netns.as_deref().map(open_pod).transpose()?.flatten();
    interface::remove(&mut Netlink::open()?, pod.as_ref(), &call.attachment)
}

fn ask_agent(call: &Call) -> Result<Option<String>, CniError> {
    let request = agent::Request::Del {
        attachment: call.attachment.clone(),
    };
    let reply: Result<Reply, CallError> = Client::connect(&call.conf.socket, AGENT_DEADLINE)
        .and_then(|mut agent| agent.call(&request));
    match reply {
        Ok(Reply::Done) => Ok(None),
        Ok(Reply::Error(error)) => Err(error.into()),
        Ok(reply) => Err(unexpected(&reply)),
        Err(error) => Ok(Some(error.to_string())),
    }
}

/// The container's namespace; `None` where it is gone, or where the path leads to the host's
/// own, which it may once the container's process id has been given to somebody else.
fn open_pod(path: &Path) -> Result<Option<Netns>, CniError> {
    let failed = |details: String| {
        CniError::new(
            code::INVALID_ENVIRONMENT,
            format!("CNI_NETNS {} cannot be used", path.display()),
            details,
        )
    };
    let pod = match Netns::open(path) {
        Ok(pod) => pod,
        Err(error) if error.is_gone() => return Ok(None),
        Err(error) => return Err(failed(error.to_string())),
    };
    match pod.run(|| ()) {
        Ok(()) => {}
        Err(error) if error.is_gone() => return Ok(None),
        Err(error) => return Err(failed(error.to_string())),
    }
    let host = Netns::current().map_err(|e| failed(e.to_string()))?;
    let is_host = pod.is_same(&host).map_err(|e| failed(e.to_string()))?;
    Ok((!is_host).then_some(pod))
}

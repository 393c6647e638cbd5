//! CHECK: the interface is still what ADD made of it.

use crate::agent::{self, Reply};
use crate::interface::{Plan, in_pod};
use crate::netlink::{Link, Netlink};
use crate::netns::Netns;
use crate::plugin::{ask, connect, unexpected};
use crate::request::Call;
use crate::spec::{CniError, CniResult, code};

/// Compares the interface with the agent's record and the runtime's `prevResult`; all
/// differences are in the error's details.
pub fn run(call: &Call) -> Result<(), CniError> {
    let before = call.conf.prev_result.as_ref().ok_or_else(|| {
        CniError::new(
            code::INVALID_CONFIG,
            "CHECK needs prevResult",
            "the runtime hands over the result of ADD",
        )
    })?;
    let request = agent::Request::Check {
        attachment: call.attachment.clone(),
    };
    let plan = match ask(&mut connect(&call.conf)?, &request)? {
        Reply::Reserved(reservation) => Plan::new(reservation, &call.ifname)?,
        reply => return Err(unexpected(&reply)),
    };
    let path = call.netns()?;
    let pod = Netns::open(path).map_err(|e| {
        CniError::new(
            code::INVALID_ENVIRONMENT,
            format!("CNI_NETNS {} cannot be used", path.display()),
            e.to_string(),
        )
    })?;
    let mut differences = host_differences(&mut Netlink::open()?, &plan)?;
    differences.extend(in_pod(&pod, |netlink| pod_differences(netlink, &plan))?);
    differences.extend(result_differences(before, call, &plan));
    if let Some(ipam) = &call.ipam {
        differences.extend(ipam.call("CHECK").err().map(|error| error.to_string()));
    }
    if differences.is_empty() {
        return Ok(());
    }
    Err(CniError::new(
        code::CHECK_FAILED,
        format!("{} is not what ADD made", call.ifname.as_str()),
        differences.join("; "),
    ))
}

fn host_differences(host: &mut Netlink, plan: &Plan) -> Result<Vec<String>, CniError> {
    let name = plan.host_ifname.as_str();
    Ok(match host.link_by_name(name)? {
        None => vec![format!("{name} is missing on the host")],
        Some(link) if !link.is_up => vec![format!("{name} is down on the host")],
        Some(_) => Vec::new(),
    })
}

fn pod_differences(pod: &mut Netlink, plan: &Plan) -> Result<Vec<String>, CniError> {
    let Some(link) = pod.link_by_name(plan.ifname.as_str())? else {
        return Ok(vec!["the interface is missing".to_owned()]);
    };
    let mut differences = link_differences(&link, plan);
    let addresses = pod.addresses()?;
    for ip in &plan.ips {
        if !addresses
            .iter()
            .any(|found| found.ifindex == link.index && found.ip == *ip)
        {
            differences.push(format!("the address {ip} is missing"));
        }
    }
    let routes = pod.routes()?;
    for route in plan.routes(link.index) {
        if !routes.iter().any(|found| {
            (found.destination, found.prefix_len) == (route.destination, route.prefix_len)
                && (found.gateway, found.ifindex) == (route.gateway, route.ifindex)
                && found.mtu == route.mtu
        }) {
            differences.push(format!(
                "the route to {}/{} is missing or differs",
                route.destination, route.prefix_len
            ));
        }
    }
    Ok(differences)
}

fn link_differences(link: &Link, plan: &Plan) -> Vec<String> {
    let mut differences = Vec::new();
    if link.mac != Some(plan.pod_mac) {
        differences.push(format!("the MAC address is not {}", plan.pod_mac));
    }
    if link.mtu != plan.device_mtu {
        differences.push(format!("the MTU is {}, not {}", link.mtu, plan.device_mtu));
    }
    if !link.is_up {
        differences.push("the interface is down".to_owned());
    }
    differences
}

/// Addresses that the runtime has for this interface and the agent has not.
fn result_differences(before: &CniResult, call: &Call, plan: &Plan) -> Vec<String> {
    let is_ours = |position: Option<u32>| {
        position
            .and_then(|position| before.interfaces.get(position as usize))
            .is_some_and(|interface| {
                interface.name == call.ifname.as_str() && interface.sandbox.is_some()
            })
    };
    before
        .ips
        .iter()
        .filter(|ip| is_ours(ip.interface) && !plan.ips.contains(&ip.address.ip()))
        .map(|ip| format!("prevResult has {}, the agent has not", ip.address))
        .collect()
}

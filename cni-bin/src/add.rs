//! ADD: reserve, build, attach, announce; all of it or nothing.
//!
//! The agent reserves addresses and names, the plugin builds the veth, the agent connects it
//! to the datapath and answers once every worker forwards for it. A failure anywhere is undone
//! backwards, the reservation last. What an earlier ADD for the same interface left behind,
//! finished or not, is removed first: a runtime may try again.

use std::net::IpAddr;

use crate::agent::{self, Client, GATEWAY_V4, GATEWAY_V6, Reply};
use crate::announce::announce;
use crate::interface::{self, Plan, in_pod};
use crate::netlink::{Netlink, RouteScope};
use crate::netns::Netns;
use crate::plugin::{ask, connect, connect_patiently, unexpected};
use crate::request::Call;
use crate::spec::{CniError, CniResult, Dns, Interface, IpConfig, IpPrefix, RouteConfig, code};
use crate::undo::Undo;

/// What ADD made.
#[derive(Debug)]
pub struct Added {
    /// The result for the runtime.
    pub result: CniResult,
    /// What went wrong without harm, for the log.
    pub note: Option<String>,
}

/// Makes the interface. The calling thread's network namespace is the host's.
pub fn run(call: &Call) -> Result<Added, CniError> {
    let pod = open_pod(call)?;
    let mut undo = Undo::new();
    match make(call, &pod, &mut undo) {
        Ok(added) => {
            undo.commit();
            Ok(added)
        }
        Err(error) => Err(undo
            .run()
            .iter()
            .fold(error, |error, failure| error.also(failure))),
    }
}

/// The container's namespace, which must not be the host's.
fn open_pod(call: &Call) -> Result<Netns, CniError> {
    let path = call.netns()?;
    let bad = |details: String| {
        CniError::new(
            code::INVALID_ENVIRONMENT,
            format!("CNI_NETNS {} cannot be used", path.display()),
            details,
        )
    };
    let pod = Netns::open(path).map_err(|e| bad(e.to_string()))?;
    let host = Netns::current().map_err(|e| bad(e.to_string()))?;
    match pod.is_same(&host) {
        Ok(false) => Ok(pod),
        Ok(true) => Err(bad("it is the host's own network namespace".to_owned())),
        Err(e) => Err(bad(e.to_string())),
    }
}

fn make<'a>(call: &'a Call, pod: &Netns, undo: &mut Undo<'a>) -> Result<Added, CniError> {
    let mut agent = connect_patiently(&call.conf)?;
    let delegated = delegate(call, undo)?;
    let plan = reserve(call, &delegated, &mut agent, undo)?;

    let mut host = Netlink::open()?;
    interface::remove(&mut host, Some(pod), &call.attachment)?;
    interface::claim_names(&mut host, pod, &plan)?;
    let host_index = interface::create(&mut host, pod, &plan)?;
    undo.push("delete the veth pair", move || delete_veth(host_index));
    interface::configure_host_end(&mut host, host_index, &plan, &call.attachment)?;
    let pod_index = in_pod(pod, |netlink| interface::configure_pod_end(netlink, &plan))?;

    let attach = agent::Request::Attach {
        attachment: call.attachment.clone(),
        ifindex: host_index,
    };
    match ask(&mut agent, &attach)? {
        Reply::Attached => {}
        reply => return Err(unexpected(&reply)),
    }
    let announced = in_pod(pod, |netlink| {
        interface::wait_for_carrier(netlink, pod_index)?;
        Ok(announce(pod_index, plan.pod_mac, &plan.ips))
    })?;
    let mut result = call.conf.prev_result.clone().unwrap_or_default();
    let mut ours = describe(&plan, call);
    if ours.dns == Dns::default() {
        ours.dns = delegated.dns;
    }
    result.append(ours);
    Ok(Added {
        result,
        note: announced.err().map(|e| format!("not announced: {e}")),
    })
}

/// What the IPAM plugin gives, where there is one: addresses and name servers.
fn delegate<'a>(call: &'a Call, undo: &mut Undo<'a>) -> Result<CniResult, CniError> {
    let Some(ipam) = &call.ipam else {
        return Ok(CniResult::default());
    };
    let result = ipam.add()?;
    undo.push("release the IPAM plugin's addresses", || ipam.call("DEL"));
    Ok(result)
}

/// First half of the conversation with the agent.
fn reserve<'a>(
    call: &'a Call,
    delegated: &CniResult,
    agent: &mut Client,
    undo: &mut Undo<'a>,
) -> Result<Plan, CniError> {
    // With an IPAM plugin, it is the one that hears what the runtime asks for.
    let ips = match &call.ipam {
        None => call.conf.runtime.ips.clone(),
        Some(_) => delegated.ips.iter().map(|ip| ip.address.ip()).collect(),
    };
    let request = agent::Request::Add {
        attachment: call.attachment.clone(),
        network: call.conf.name.clone(),
        netns: call.netns()?.display().to_string(),
        pod: call.pod.clone(),
        ips,
        mac: call.conf.runtime.mac.map(|mac| mac.to_string()),
        mtu: call.conf.mtu,
    };
    let reply = agent.call(&request);
    // A refusal reserved nothing, and an interface that an earlier ADD made stays as it is.
    // Where the answer got lost, the request may have been served.
    if !matches!(reply, Ok(Reply::Error(_))) {
        undo.push("release the reservation", || release(call));
    }
    match reply? {
        Reply::Reserved(reservation) => Plan::new(reservation, &call.ifname),
        Reply::Error(error) => Err(error.into()),
        reply => Err(unexpected(&reply)),
    }
}

/// Undoes a reservation, on a connection of its own: the first one may be what broke.
fn release(call: &Call) -> Result<(), CniError> {
    let request = agent::Request::Del {
        attachment: call.attachment.clone(),
    };
    ask(&mut connect(&call.conf)?, &request).map(|_| ())
}

fn delete_veth(host_index: u32) -> Result<(), CniError> {
    match Netlink::open()?.delete_link(host_index) {
        Err(error) if !error.is_missing() => Err(error.into()),
        _ => Ok(()),
    }
}

/// The part of the result that is ours.
fn describe(plan: &Plan, call: &Call) -> CniResult {
    let interfaces = vec![
        Interface {
            name: plan.host_ifname.as_str().to_owned(),
            mac: Some(plan.host_mac.to_string()),
            mtu: Some(plan.device_mtu),
            ..Interface::default()
        },
        Interface {
            name: plan.ifname.as_str().to_owned(),
            mac: Some(plan.pod_mac.to_string()),
            mtu: Some(plan.device_mtu),
            sandbox: call.netns.as_ref().map(|path| path.display().to_string()),
            ..Interface::default()
        },
    ];
    let ips = plan.ips.iter().map(|ip| IpConfig {
        address: IpPrefix::host(*ip),
        gateway: Some(match ip {
            IpAddr::V4(_) => GATEWAY_V4.into(),
            IpAddr::V6(_) => GATEWAY_V6.into(),
        }),
        interface: Some(1),
    });
    let routes = plan.routes(0).into_iter().map(|route| {
        let dst = if route.is_default() {
            IpPrefix::default_of(route.destination)
        } else {
            IpPrefix::host(route.destination)
        };
        RouteConfig {
            mtu: route.mtu,
            scope: (route.scope == RouteScope::Link).then_some(libc::RT_SCOPE_LINK),
            ..RouteConfig::new(dst, route.gateway)
        }
    });
    CniResult {
        interfaces,
        ips: ips.collect(),
        routes: routes.collect(),
        dns: call.conf.dns.clone(),
    }
}

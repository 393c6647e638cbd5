//! The pod's interface: what ADD builds, and how a later call finds it again.
//!
//! ```text
//!   host's namespace                          pod's namespace
//!   reserved name, reserved MAC               CNI_IFNAME, reserved MAC
//!   no IPv6, down until the agent ──veth pair── features off, host addresses,
//!   has its XDP program there                 default routes by the gateway
//! ```
//!
//! The host end carries an alias that names the attachment, so that what an earlier call left
//! is known for ours even without the agent.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use crate::agent::{Attachment, GATEWAY_V4, GATEWAY_V6, Reservation};
use crate::ethtool::{Ethtool, Shortfall};
use crate::mac::MacAddr;
use crate::netlink::{Address, Link, Netlink, Route, Veth, VethEnd};
use crate::netns::Netns;
use crate::request::IfName;
use crate::spec::{CniError, code};
use crate::sysctl::set_ipv6;

/// What the alias of each host end begins with.
const ALIAS_PREFIX: &str = "skein:";

/// The loopback has this index in every namespace (`LOOPBACK_IFINDEX`).
const LOOPBACK: u32 = 1;

/// How long a pod's end may take to get carrier once the agent says that it is attached.
const CARRIER_DEADLINE: Duration = Duration::from_secs(2);
const CARRIER_INTERVAL: Duration = Duration::from_millis(2);

/// A checked reservation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Name of the host end.
    pub host_ifname: IfName,
    /// Name of the pod's end.
    pub ifname: IfName,
    /// MAC of the host end.
    pub host_mac: MacAddr,
    /// MAC of the pod's end.
    pub pod_mac: MacAddr,
    /// Addresses of the pod's end.
    pub ips: Vec<IpAddr>,
    /// Device MTU of both ends, bytes.
    pub device_mtu: u32,
    /// MTU of the pod's routes, bytes.
    pub route_mtu: u32,
    /// Features of the pod's end to turn off.
    pub disable_features: Vec<String>,
    /// Queues of each end.
    pub queues: u32,
}

impl Plan {
    /// Checks what the agent reserved.
    pub fn new(reservation: Reservation, ifname: &IfName) -> Result<Self, CniError> {
        let mac = |text: &str| {
            text.parse::<MacAddr>()
                .ok()
                .filter(|mac| mac.is_station())
                .ok_or_else(|| nonsense(&format!("the MAC address {text:?}")))
        };
        let host_ifname = IfName::new(&reservation.host_ifname)
            .ok_or_else(|| nonsense(&format!("the name {:?}", reservation.host_ifname)))?;
        if reservation.ips.is_empty() {
            return Err(nonsense("no address"));
        }
        if reservation.queues == 0 {
            return Err(nonsense("no queue"));
        }
        if reservation.route_mtu > reservation.device_mtu {
            return Err(nonsense("routes with a larger MTU than the device"));
        }
        Ok(Self {
            host_mac: mac(&reservation.host_mac)?,
            pod_mac: mac(&reservation.pod_mac)?,
            host_ifname,
            ifname: ifname.clone(),
            ips: reservation.ips,
            device_mtu: reservation.device_mtu,
            route_mtu: reservation.route_mtu,
            disable_features: reservation.disable_features,
            queues: reservation.queues,
        })
    }

    /// The pod's routes, in the order that they must be added in.
    pub fn routes(&self, ifindex: u32) -> Vec<Route> {
        let mtu = Some(self.route_mtu);
        let mut routes = Vec::new();
        if self.ips.iter().any(IpAddr::is_ipv4) {
            routes.push(Route {
                mtu,
                ..Route::on_link(GATEWAY_V4.into(), 32, ifindex)
            });
            routes.push(Route {
                mtu,
                onlink: true,
                ..Route::default_via(GATEWAY_V4.into(), ifindex)
            });
        }
        if self.ips.iter().any(IpAddr::is_ipv6) {
            routes.push(Route {
                mtu,
                ..Route::default_via(GATEWAY_V6.into(), ifindex)
            });
        }
        routes
    }
}

fn nonsense(what: &str) -> CniError {
    CniError::new(
        code::AGENT_PROTOCOL,
        format!("the Skein agent reserved {what}"),
        "plugin and agent may be of different versions",
    )
}

/// The alias of an attachment's host end.
pub fn alias(attachment: &Attachment) -> String {
    let Attachment {
        container_id,
        ifname,
    } = attachment;
    format!("{ALIAS_PREFIX}{container_id}/{ifname}")
}

/// Creates the veth pair, both ends down; returns the host end's index.
pub fn create(host: &mut Netlink, pod: &Netns, plan: &Plan) -> Result<u32, CniError> {
    host.add_veth(&Veth {
        end: VethEnd {
            name: plan.host_ifname.as_str(),
            mac: Some(plan.host_mac),
            netns: None,
        },
        peer: VethEnd {
            name: plan.ifname.as_str(),
            mac: Some(plan.pod_mac),
            netns: Some(pod.as_fd()),
        },
        mtu: plan.device_mtu,
        queues: plan.queues,
    })?;
    let link = host.link_by_name(plan.host_ifname.as_str())?;
    link.map(|link| link.index).ok_or_else(|| {
        CniError::interface(
            format!("{} vanished", plan.host_ifname.as_str()),
            &"something else deletes links on this host",
        )
    })
}

/// Marks the host end as ours, and keeps the host's IPv6 off it: the kernel would join
/// multicast groups and announce an address of its own there.
pub fn configure_host_end(
    host: &mut Netlink,
    index: u32,
    plan: &Plan,
    attachment: &Attachment,
) -> Result<(), CniError> {
    host.set_link_alias(index, &alias(attachment))?;
    set_ipv6(&plan.host_ifname, "disable_ipv6", "1")
        .map(|_| ())
        .map_err(|e| CniError::interface("cannot keep IPv6 off the host's end", &e))
}

/// Configures and starts the pod's end, from inside the pod's namespace; returns its index.
pub fn configure_pod_end(pod: &mut Netlink, plan: &Plan) -> Result<u32, CniError> {
    let name = plan.ifname.as_str();
    let ifindex = pod
        .link_by_name(name)?
        .map(|link| link.index)
        .ok_or_else(|| CniError::interface(format!("{name} vanished"), &"the pod deleted it"))?;
    pod.set_link_up(LOOPBACK, true)?;
    disable_features(plan)?;
    let ipv6 = |key, value| {
        set_ipv6(&plan.ifname, key, value)
            .map(|_| ())
            .map_err(|e| CniError::interface(format!("cannot set up IPv6 on {name}"), &e))
    };
    // A router in the pod's network is none of the pod's business, and nobody else can have
    // its address.
    ipv6("accept_ra", "0")?;
    ipv6("accept_dad", "0")?;
    if plan.ips.iter().any(IpAddr::is_ipv6) {
        ipv6("disable_ipv6", "0")?;
    }
    pod.set_link_up(ifindex, true)?;
    for ip in &plan.ips {
        pod.add_address(&Address::host(ifindex, *ip))?;
    }
    for route in plan.routes(ifindex) {
        pod.add_route(&route)?;
    }
    Ok(ifindex)
}

/// Turns off what the datapath cannot take. A name that this kernel does not know is no
/// offload that it could do; one that stays on would lose packets later and fails now.
fn disable_features(plan: &Plan) -> Result<(), CniError> {
    if plan.disable_features.is_empty() {
        return Ok(());
    }
    let name = plan.ifname.as_str();
    Ethtool::open(name)
        .and_then(|device| device.set_features(&plan.disable_features, false))
        .map_err(|e| CniError::interface(format!("cannot turn offloads of {name} off"), &e))
        .and_then(|shortfall| judge(name, &shortfall))
}

fn judge(name: &str, shortfall: &Shortfall) -> Result<(), CniError> {
    if shortfall.unchanged.is_empty() {
        return Ok(());
    }
    Err(CniError::interface(
        format!("cannot turn offloads of {name} off"),
        &format!("{} stayed on", shortfall.unchanged.join(", ")),
    ))
}

/// Waits until the pod's end has carrier: before that its packets are dropped unseen.
pub fn wait_for_carrier(pod: &mut Netlink, ifindex: u32) -> Result<(), CniError> {
    let deadline = Instant::now() + CARRIER_DEADLINE;
    loop {
        match pod.link_by_index(ifindex)? {
            Some(link) if link.is_running => return Ok(()),
            Some(_) if Instant::now() < deadline => thread::sleep(CARRIER_INTERVAL),
            Some(_) => {
                return Err(CniError::new(
                    code::AGENT_PROTOCOL,
                    "the pod's interface has no carrier",
                    "the Skein agent attached it without setting the host's end up",
                ));
            }
            None => {
                return Err(CniError::interface(
                    "the pod's interface vanished",
                    &"something deleted it during ADD",
                ));
            }
        }
    }
}

/// Removes what earlier calls for this attachment left: the veth whose host end has its alias,
/// and one that was killed before it got an alias. `pod` is the namespace, where it is left.
pub fn remove(
    host: &mut Netlink,
    pod: Option<&Netns>,
    attachment: &Attachment,
) -> Result<(), CniError> {
    let ours = alias(attachment);
    for link in host.links()? {
        if link.kind == "veth" && link.alias == ours {
            delete(host, link.index)?;
        }
    }
    let Some(pod) = pod else { return Ok(()) };
    let Some(link) = in_pod(pod, |pod| Ok(pod.link_by_name(&attachment.ifname)?))? else {
        return Ok(());
    };
    if let Some(host_end) = half_made(host, &link)? {
        delete(host, host_end)?;
    }
    Ok(())
}

/// Deletes a link that something else may delete at the same time.
fn delete(host: &mut Netlink, index: u32) -> Result<(), CniError> {
    match host.delete_link(index) {
        Err(error) if !error.is_missing() => Err(error.into()),
        _ => Ok(()),
    }
}

/// The host end of a pod's veth that was made and never got further: no alias, never up.
fn half_made(host: &mut Netlink, pod_end: &Link) -> Result<Option<u32>, CniError> {
    let (true, Some(index)) = (is_split_veth(pod_end), pod_end.peer_index) else {
        return Ok(None);
    };
    let host_end = host.link_by_index(index)?.filter(|link| {
        is_split_veth(link)
            && link.peer_index == Some(pod_end.index)
            && link.alias.is_empty()
            && !link.is_up
    });
    Ok(host_end.map(|link| link.index))
}

fn is_split_veth(link: &Link) -> bool {
    link.kind == "veth" && link.peer_is_elsewhere
}

/// Makes sure that both names are free: removes the remains of another attachment that had
/// the host end's name before, refuses what is not ours.
pub fn claim_names(host: &mut Netlink, pod: &Netns, plan: &Plan) -> Result<(), CniError> {
    let taken = |name: &str, place: &str| {
        CniError::new(
            code::INTERFACE_TAKEN,
            format!("the {place} already has an interface {name}"),
            "it is not one that Skein made; remove or rename it",
        )
    };
    let name = plan.host_ifname.as_str();
    if let Some(link) = host.link_by_name(name)? {
        if link.kind != "veth" || !link.alias.starts_with(ALIAS_PREFIX) {
            return Err(taken(name, "host"));
        }
        delete(host, link.index)?;
    }
    let name = plan.ifname.as_str();
    match in_pod(pod, |pod| Ok(pod.link_by_name(name)?))? {
        Some(_) => Err(taken(name, "container")),
        None => Ok(()),
    }
}

/// Runs `work` in the pod's namespace with a netlink socket of it.
pub fn in_pod<T: Send>(
    pod: &Netns,
    work: impl FnOnce(&mut Netlink) -> Result<T, CniError> + Send,
) -> Result<T, CniError> {
    pod.run(|| work(&mut Netlink::open()?)).map_err(|e| {
        CniError::new(
            code::INVALID_ENVIRONMENT,
            "CNI_NETNS names no network namespace that can be entered",
            e.to_string(),
        )
    })?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reservation() -> Reservation {
        Reservation {
            host_ifname: "skein7".into(),
            pod_mac: "02:00:00:00:07:02".into(),
            host_mac: "02:00:00:00:07:01".into(),
            ips: vec!["10.7.0.2".parse().unwrap()],
            device_mtu: 65535,
            route_mtu: 1450,
            disable_features: Vec::new(),
            queues: 1,
        }
    }

    fn plan(change: impl FnOnce(&mut Reservation)) -> Result<Plan, CniError> {
        let mut reservation = reservation();
        change(&mut reservation);
        Plan::new(reservation, &IfName::new("eth0").unwrap())
    }

    #[test]
    fn a_reservation_that_makes_no_sense_is_refused_before_anything_is_made() {
        plan(|_| {}).unwrap();
        let faults: [fn(&mut Reservation); 7] = [
            |r| r.host_ifname = "a/b".into(),
            |r| r.pod_mac = "01:00:00:00:00:00".into(),
            |r| r.host_mac = "x".into(),
            |r| r.ips.clear(),
            |r| r.queues = 0,
            |r| r.route_mtu = 65536,
            |r| r.device_mtu = 1000,
        ];
        for fault in faults {
            assert_eq!(plan(fault).unwrap_err().code, code::AGENT_PROTOCOL);
        }
    }

    #[test]
    fn routes_are_of_the_families_of_the_addresses() {
        let v6: IpAddr = "fd00::2".parse().unwrap();
        let count = |ips: Vec<IpAddr>| plan(|r| r.ips = ips).unwrap().routes(1).len();
        let v4 = reservation().ips[0];
        assert_eq!(
            (count(vec![v4]), count(vec![v6]), count(vec![v4, v6])),
            (2, 1, 3)
        );
    }

    #[test]
    fn an_offload_that_stays_on_is_an_error_and_an_unknown_one_is_not() {
        let unknown = Shortfall {
            unknown: vec!["tx-of-another-kernel".into()],
            ..Shortfall::default()
        };
        assert_eq!(judge("eth0", &unknown), Ok(()));
        let unchanged = Shortfall {
            unchanged: vec!["tx-udp-segmentation".into()],
            ..Shortfall::default()
        };
        let error = judge("eth0", &unchanged).unwrap_err();
        assert_eq!(error.details, "tx-udp-segmentation stayed on");
    }
}

//! ADD where something fails, was killed before, or is in the way.

use std::os::fd::AsFd;

use serde_json::{Value, json};
use skein_cni::netlink::{Veth, VethEnd};

use crate::agent::OnAttach;
use crate::setup::{Setup, attachment, until};

#[test]
fn a_refused_attach_undoes_everything() {
    for on_attach in [OnAttach::Refuse, OnAttach::HangUp] {
        let setup = Setup::new();
        setup.agent.with(|state| state.on_attach = on_attach);
        let ran = setup.add();
        assert_eq!(ran.code(), 11);
        assert_eq!(setup.agent.requests(), ["add", "attach", "del"]);
        setup.assert_clean();
        let log = std::fs::read_to_string(setup.log()).unwrap();
        assert!(
            log.contains("ADD container=c1 ifname=eth0 network=skein failed "),
            "{log}"
        );
    }
}

#[test]
fn an_attach_without_carrier_is_no_success() {
    let setup = Setup::new();
    setup
        .agent
        .with(|state| state.on_attach = OnAttach::LeaveDown);
    assert_eq!(setup.add().code(), 102);
    setup.assert_clean();
}

#[test]
fn a_refused_reservation_passes_the_agents_error_on() {
    let setup = Setup::new();
    setup.agent.with(|state| state.refuse_add = true);
    let error = setup.add().json();
    assert_eq!(
        error,
        json!({"cniVersion": "1.1.0", "code": 11, "msg": "no address left",
               "details": "try again"})
    );
    assert_eq!(setup.agent.requests(), ["add"]);
    setup.assert_clean();
}

#[test]
fn add_twice_leaks_nothing() {
    let setup = Setup::new();
    let first = setup.add().success().json();
    let old = setup.host_link().unwrap();
    let second = setup.add().success().json();
    assert_eq!(first, second);
    let new = setup.host_link().unwrap();
    assert_ne!(old.index, new.index, "made anew");
    assert_eq!(setup.host.netlink(|n| n.links().unwrap().len()), 2);
    assert_eq!(setup.pod.netlink(|n| n.links().unwrap().len()), 2);
    assert_eq!(
        setup.agent.with(|state| state.attached[&attachment()]),
        new.index
    );
    setup.del().success();
    setup.assert_clean();
}

#[test]
fn add_after_one_that_was_killed_midway() {
    let setup = Setup::new();
    setup.agent.with(|state| state.on_attach = OnAttach::Wait);
    let mut killed = setup.start("ADD", &Value::Null);
    until("the plugin waits for the agent", || {
        setup.agent.requests().last() == Some(&"attach")
    });
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(setup.pod_link().is_some(), "its interface is left behind");

    setup.agent.with(|state| state.on_attach = OnAttach::SetUp);
    setup.add().success();
    assert!(setup.pod_link().unwrap().is_running);
    setup.del().success();
    setup.assert_clean();
}

#[test]
fn the_remains_of_an_add_that_was_killed_before_it_marked_them() {
    let setup = Setup::new();
    for command in ["ADD", "DEL"] {
        let end = |name, netns| VethEnd {
            name,
            mac: None,
            netns,
        };
        setup.host.netlink(|n| {
            n.add_veth(&Veth {
                end: end("skein6", None),
                peer: end("eth0", Some(setup.pod.netns.as_fd())),
                mtu: 1500,
                queues: 1,
            })
            .unwrap();
        });
        setup.run(command, &Value::Null).success();
        assert_eq!(
            setup.host.netlink(|n| n.link_by_name("skein6").unwrap()),
            None
        );
        setup.del().success();
        setup.assert_clean();
    }
}

#[test]
fn an_interface_of_somebody_else_stays() {
    let setup = Setup::new();
    let end = |name, netns| VethEnd {
        name,
        mac: None,
        netns,
    };
    let other = setup.host.netlink(|n| {
        n.add_veth(&Veth {
            end: end("other0", None),
            peer: end("eth0", Some(setup.pod.netns.as_fd())),
            mtu: 1500,
            queues: 1,
        })
        .unwrap();
        let other = n.link_by_name("other0").unwrap().unwrap().index;
        n.set_link_up(other, true).unwrap();
        other
    });
    let ran = setup.add();
    assert_eq!(ran.code(), 101);
    assert!(
        ran.stdout
            .contains("container already has an interface eth0"),
        "{ran:?}"
    );
    setup.del().success();
    assert!(setup.pod_link().is_some());

    // The same for the name on the host.
    setup.host.netlink(|n| {
        n.delete_link(other).unwrap();
        n.add_veth(&Veth {
            end: end("skein7", None),
            peer: end("peer7", None),
            mtu: 1500,
            queues: 1,
        })
        .unwrap();
    });
    assert_eq!(setup.add().code(), 101);
    setup.del().success();
    assert!(setup.host_link().is_some());
}

//! The plugin as a runtime runs it: the binary, with its environment and standard input,
//! between network namespaces, against an agent on a unix socket.

#[path = "../common/mod.rs"]
mod common;

mod add;
mod agent;
mod del;
mod faults;
mod ipam;
mod setup;

use serde_json::{Value, json};
use skein_cni::agent::Request;
use skein_cni::netlink::Address;

use agent::FakeAgent;
use common::TestNetns;
use setup::{Setup, attachment};

#[test]
fn add_and_status_with_the_agent_down() {
    let mut setup = Setup::new();
    setup.run("STATUS", &Value::Null).success();
    setup.agent.stop();
    assert_eq!(setup.add().code(), 11);
    assert_eq!(setup.run("STATUS", &Value::Null).code(), 50);
    assert_eq!(setup.pod_link(), None);
}

#[test]
fn add_waits_for_an_agent_that_starts() {
    let mut setup = Setup::new();
    setup.agent.stop();
    let child = setup.start("ADD", &Value::Null);
    // Long enough that it finds nobody at first.
    std::thread::sleep(std::time::Duration::from_millis(300));
    setup.agent = FakeAgent::start(&setup.agent.socket.clone(), &setup.host.netns);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    setup.del().success();
    setup.assert_clean();
}

#[test]
fn add_into_the_hosts_own_namespace_is_refused() {
    let mut setup = Setup::new();
    let pod = std::mem::replace(&mut setup.pod, TestNetns::new());
    drop(pod);
    let host_path = setup.host.path();
    let run = |command: &str| {
        let conf = setup.conf(&Value::Null).to_string();
        setup
            .host
            .netns
            .run(|| {
                let env = |name: &str| {
                    let value = match name {
                        "CNI_COMMAND" => command.into(),
                        "CNI_CONTAINERID" => "c1".into(),
                        "CNI_IFNAME" => "eth0".into(),
                        "CNI_NETNS" => host_path.clone().into_os_string(),
                        _ => return None,
                    };
                    Some(value)
                };
                skein_cni::plugin::run(&env, conf.as_bytes())
            })
            .unwrap()
    };
    let added = run("ADD");
    assert!(
        !added.is_success && added.stdout.contains("host's own"),
        "{added:?}"
    );
    assert!(run("DEL").is_success);
    assert_eq!(setup.agent.requests(), ["del"]);
}

#[test]
fn check_names_what_differs() {
    let setup = Setup::new();
    let result = setup.add().success().json();
    setup.pod.netlink(|n| {
        let eth0 = n.link_by_name("eth0").unwrap().unwrap().index;
        n.set_link_mtu(eth0, 9000).unwrap();
        let address = Address::host(eth0, "10.7.0.2".parse().unwrap());
        n.delete_address(&address).unwrap();
    });
    let ran = setup.run("CHECK", &json!({"prevResult": result}));
    assert_eq!(ran.code(), 103);
    for difference in [
        "the MTU is 9000, not 65535",
        "the address 10.7.0.2 is missing",
    ] {
        assert!(ran.stdout.contains(difference), "{ran:?}");
    }
    assert_eq!(setup.run("CHECK", &Value::Null).code(), 7);
    setup.del().success();
    assert_eq!(
        setup.run("CHECK", &json!({"prevResult": result})).code(),
        11
    );
}

#[test]
fn gc_hands_the_list_to_the_agent() {
    let setup = Setup::new();
    setup.add().success();
    let valid = json!([{"containerID": "c1", "ifname": "eth0"}]);
    setup
        .run("GC", &json!({"cni.dev/valid-attachments": valid}))
        .success();
    assert!(
        setup
            .agent
            .with(|state| state.reserved.contains_key(&attachment()))
    );
    setup.agent.with(|state| {
        let Some(Request::Gc { network, .. }) = state.requests.last() else {
            panic!("{:?}", state.requests)
        };
        assert_eq!(network, "skein");
    });
    setup
        .run("GC", &json!({"cni.dev/valid-attachments": []}))
        .success();
    assert!(setup.agent.with(|state| state.reserved.is_empty()));
    assert_eq!(setup.run("GC", &Value::Null).code(), 7);
    setup.del().success();
}

#[test]
fn version_and_bad_calls_print_what_the_specification_says() {
    let setup = Setup::new();
    assert_eq!(
        setup
            .run("VERSION", &json!({"cniVersion": "0.4.0"}))
            .success()
            .stdout,
        r#"{"cniVersion":"0.4.0","supportedVersions":["0.3.1","0.4.0","1.0.0","1.1.0"]}"#
    );
    assert_eq!(setup.run("ADD", &json!({"cniVersion": "0.2.0"})).code(), 1);
    assert_eq!(setup.run("ADD", &json!({"mtu": 5})).code(), 7);
    assert_eq!(setup.run("NONE", &Value::Null).code(), 4);
    let log = std::fs::read_to_string(setup.log()).unwrap();
    assert!(
        log.contains("NONE container=c1 ifname=eth0 network=skein failed "),
        "{log}"
    );
    assert!(setup.agent.requests().is_empty());
}

#[test]
fn a_log_that_cannot_be_written_fails_nothing() {
    let setup = Setup::new();
    let extra = json!({"logFile": "/proc/none/log"});
    setup.run("ADD", &extra).success();
    setup.run("DEL", &extra).success();
    setup.assert_clean();
}

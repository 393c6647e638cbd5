//! DEL, with and without what it removes.

use crate::setup::Setup;

#[test]
fn del_is_idempotent() {
    let setup = Setup::new();
    setup.del().success();
    setup.add().success();
    setup.del().success();
    setup.assert_clean();
    setup.del().success();
    setup.assert_clean();
}

#[test]
fn del_with_the_namespace_gone() {
    let setup = Setup::new();
    setup.add().success();
    // The test's own descriptor keeps the namespace, and the veth in it, alive: DEL finds the
    // host's end by its mark.
    setup.pod.remove();
    setup.del().success();
    setup.assert_host_clean();
    setup.del().success();
}

#[test]
fn del_with_the_agent_down() {
    let mut setup = Setup::new();
    setup.add().success();
    setup.agent.stop();
    setup.del().success();
    assert_eq!((setup.pod_link(), setup.host_link()), (None, None));
    let log = std::fs::read_to_string(setup.log()).unwrap();
    assert!(log.contains("DEL container=c1 ifname=eth0 network=skein ok the Skein agent does not"));
}

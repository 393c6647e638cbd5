//! Addresses from another plugin, played by a shell script that keeps a list of its calls.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use serde_json::{Value, json};
use skein_cni::agent::Request;

use crate::agent::OnAttach;
use crate::setup::Setup;

/// Says what a file beside it holds, `ipam.ADD` and so on; with `ipam.ADD.error`, fails.
const SCRIPT: &str = r#"#!/bin/sh
cat > "$0.stdin"
echo "$CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME $CNI_NETNS" >> "$0.calls"
if [ -e "$0.$CNI_COMMAND.error" ]; then
    cat "$0.$CNI_COMMAND.error"
    exit 1
fi
if [ -e "$0.$CNI_COMMAND" ]; then cat "$0.$CNI_COMMAND"; fi
"#;

struct Delegate {
    setup: Setup,
    program: PathBuf,
}

impl Delegate {
    fn new() -> Self {
        let setup = Setup::new();
        let program = setup.bin().join("ipam");
        fs::create_dir(setup.bin()).unwrap();
        fs::write(&program, SCRIPT).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let delegate = Self { setup, program };
        delegate.says(
            "ADD",
            &json!({
                "cniVersion": "1.1.0",
                "ips": [{"address": "10.9.0.7/16", "gateway": "10.9.0.1"}],
                "routes": [{"dst": "0.0.0.0/0"}],
                "dns": {"nameservers": ["10.9.0.53"]},
            }),
        );
        delegate
    }

    fn says(&self, what: &str, document: &Value) {
        let path = format!("{}.{what}", self.program.display());
        fs::write(path, document.to_string()).unwrap();
    }

    fn fails(&self, command: &str) {
        let error = json!({"cniVersion": "1.1.0", "code": 42, "msg": "no", "details": "full"});
        self.says(&format!("{command}.error"), &error);
    }

    fn run(&self, command: &str, extra: &Value) -> crate::setup::Ran {
        let mut extra = extra.clone();
        extra["ipam"] = json!({"type": "ipam", "range": "x"});
        self.setup.run(command, &extra)
    }

    /// The commands so far, without the rest of their lines.
    fn calls(&self) -> Vec<String> {
        let path = format!("{}.calls", self.program.display());
        let calls = fs::read_to_string(path).unwrap_or_default();
        let commands = calls.lines().filter_map(|line| line.split(' ').next());
        commands.map(str::to_owned).collect()
    }
}

#[test]
fn an_ipam_plugins_addresses_are_the_pods() {
    let delegate = Delegate::new();
    let asked = json!({"runtimeConfig": {"ips": ["10.9.0.7"]}});
    let result = delegate.run("ADD", &asked).success().json();
    assert_eq!(
        result["ips"],
        json!([{"address": "10.9.0.7/32", "gateway": "169.254.1.1", "interface": 1}])
    );
    assert_eq!(result["dns"], json!({"nameservers": ["10.9.0.53"]}));
    // The pod's way out is ours.
    assert_eq!(result["routes"][1]["gw"], "169.254.1.1");
    delegate.setup.agent.with(|state| {
        let Request::Add { ips, .. } = &state.requests[0] else {
            panic!("{:?}", state.requests)
        };
        assert_eq!(ips.len(), 1);
        assert_eq!(ips[0].to_string(), "10.9.0.7");
    });
    // It sees the configuration and the variables that we were given.
    let stdin = fs::read_to_string(format!("{}.stdin", delegate.program.display())).unwrap();
    let stdin: Value = serde_json::from_str(&stdin).unwrap();
    assert_eq!(stdin["ipam"], json!({"type": "ipam", "range": "x"}));
    assert_eq!(stdin["runtimeConfig"], asked["runtimeConfig"]);
    let calls = fs::read_to_string(format!("{}.calls", delegate.program.display())).unwrap();
    let netns = delegate.setup.pod.path();
    assert_eq!(calls, format!("ADD c1 eth0 {}\n", netns.display()));

    let previous = json!({"prevResult": result});
    delegate.run("CHECK", &previous).success();
    delegate.run("STATUS", &Value::Null).success();
    let valid = json!({"cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth0"}]});
    delegate.run("GC", &valid).success();
    delegate.run("DEL", &previous).success();
    delegate.setup.assert_clean();
    assert_eq!(delegate.calls(), ["ADD", "CHECK", "STATUS", "GC", "DEL"]);
}

#[test]
fn what_an_ipam_plugin_gave_is_given_back_when_the_rest_fails() {
    let delegate = Delegate::new();
    let on_attach = |what| delegate.setup.agent.with(|state| state.on_attach = what);
    on_attach(OnAttach::Refuse);
    assert_eq!(delegate.run("ADD", &Value::Null).code(), 11);
    assert_eq!(delegate.calls(), ["ADD", "DEL"]);
    delegate.setup.assert_clean();
    // Its own failure too, after a second attempt: the first may be about an earlier ADD.
    delegate.fails("ADD");
    let ran = delegate.run("ADD", &Value::Null);
    assert_eq!(ran.code(), 42);
    assert_eq!(ran.json()["msg"], "IPAM plugin ipam, ADD: no");
    assert_eq!(ran.json()["details"], "full");
    assert_eq!(delegate.calls()[2..], ["ADD", "DEL", "ADD", "DEL"]);
    delegate.setup.assert_clean();
}

#[test]
fn an_ipam_plugins_errors_are_ours() {
    let delegate = Delegate::new();
    let result = delegate.run("ADD", &Value::Null).success().json();
    for command in ["CHECK", "STATUS", "GC", "DEL"] {
        delegate.fails(command);
    }
    let check = delegate.run("CHECK", &json!({"prevResult": result}));
    assert_eq!(check.code(), 103);
    assert!(
        check.stdout.contains("IPAM plugin ipam, CHECK: no"),
        "{check:?}"
    );
    assert_eq!(delegate.run("STATUS", &Value::Null).code(), 42);
    let valid = json!({"cni.dev/valid-attachments": []});
    assert_eq!(delegate.run("GC", &valid).code(), 42);
    // The rest is removed all the same.
    assert_eq!(delegate.run("DEL", &Value::Null).code(), 42);
    delegate.setup.assert_clean();
}

#[test]
fn an_ipam_plugin_that_cannot_be_had_is_named() {
    let setup = Setup::new();
    let run = |command, ipam| setup.run(command, &json!({ "ipam": ipam }));
    let missing = run("ADD", json!({"type": "nowhere"}));
    assert_eq!(missing.code(), 4);
    assert!(
        missing
            .stdout
            .contains("no IPAM plugin nowhere in CNI_PATH")
    );
    for bad in [json!({"range": "x"}), json!({"type": "../ipam"}), json!(7)] {
        assert_eq!(run("ADD", bad.clone()).code(), 7, "{bad}");
        run("DEL", bad).success();
    }
    setup.assert_clean();
}

//! A CNI call, checked: what the commands see has passed here.
//!
//! Parameters come as `CNI_*` environment variables and a network configuration on standard
//! input. Names follow the specification: a container id is letters, digits, `_`, `.` and
//! `-` with a letter or digit first; an interface name is what Linux takes. Each bad variable
//! is named in the error.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::agent::{Attachment, PodRef};
use crate::ipam::Ipam;
use crate::spec::{self, CniError, NetConf, Version, code};

/// The longest container id, so that it fits, with an interface name, in a link's alias.
pub const MAX_CONTAINER_ID_BYTES: usize = 200;

/// The longest interface name: `IFNAMSIZ` without the NUL.
pub const MAX_IFNAME_BYTES: usize = 15;

/// The longest namespace path: `PATH_MAX` without the NUL.
const MAX_PATH_BYTES: usize = 4095;

/// An interface name that Linux takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IfName(String);

impl IfName {
    /// Checks a name by the rules of `dev_valid_name` and of the specification.
    pub fn new(name: &str) -> Option<Self> {
        let is_valid = !name.is_empty()
            && name.len() <= MAX_IFNAME_BYTES
            && name != "."
            && name != ".."
            && !name
                .chars()
                .any(|c| matches!(c, '/' | ':') || c.is_whitespace() || c.is_control());
        is_valid.then(|| Self(name.to_owned()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A checked call.
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    /// Make an interface.
    Add(Call),
    /// Remove an interface; its namespace may be gone.
    Del(Call),
    /// Verify an interface.
    Check(Call),
    /// Remove what the runtime no longer has.
    Gc(NetConf, Option<Ipam>),
    /// Could an ADD succeed?
    Status(NetConf, Option<Ipam>),
    /// Which versions? Holds the `cniVersion` of the question.
    Version(Option<String>),
}

/// A call about one interface of one container.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The network configuration.
    pub conf: NetConf,
    /// The interface, as the agent knows it.
    pub attachment: Attachment,
    /// Its name.
    pub ifname: IfName,
    /// Path of the container's network namespace. Always there but for DEL.
    pub netns: Option<PathBuf>,
    /// The Kubernetes pod, where the runtime names one; never for DEL.
    pub pod: Option<PodRef>,
    /// The plugin that gives addresses, where the configuration names one.
    pub ipam: Option<Ipam>,
}

impl Call {
    /// The namespace's path, which ADD and CHECK need.
    pub fn netns(&self) -> Result<&PathBuf, CniError> {
        self.netns.as_ref().ok_or_else(|| {
            bad(
                "CNI_NETNS",
                "is not set",
                "it is the path of a network namespace",
            )
        })
    }
}

/// Reads environment variables by name.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

impl Request {
    /// Checks a call. `env` looks environment variables up.
    pub fn parse(env: Environment<'_>, stdin: &[u8]) -> Result<Self, CniError> {
        let command = variable(env, "CNI_COMMAND")?.unwrap_or_default();
        if command == "VERSION" {
            // An old runtime may ask without a document.
            let is_blank = stdin.iter().all(u8::is_ascii_whitespace);
            let asked = if is_blank {
                None
            } else {
                NetConf::version_of(stdin)?
            };
            return Ok(Self::Version(asked));
        }
        let since = match command.as_str() {
            "ADD" | "DEL" => Version::V0_3_1,
            "CHECK" => Version::V0_4_0,
            "GC" | "STATUS" => Version::V1_1_0,
            _ => {
                return Err(bad(
                    "CNI_COMMAND",
                    &format!("is {command:?}"),
                    "it is one of ADD, DEL, CHECK, GC, STATUS, VERSION",
                ));
            }
        };
        let conf = if command == "DEL" {
            NetConf::parse_for_removal(stdin)?
        } else {
            NetConf::parse(stdin)?
        };
        if conf.version < since {
            return Err(CniError::new(
                code::INCOMPATIBLE_VERSION,
                format!("{command} is not in cniVersion {}", conf.version.as_str()),
                format!("it needs {} or later", since.as_str()),
            ));
        }
        let ipam = conf.ipam.as_ref();
        let ipam = ipam.map(|name| Ipam::new(name, env, stdin));
        match command.as_str() {
            "GC" => Ok(Self::Gc(conf, ipam)),
            "STATUS" => Ok(Self::Status(conf, ipam)),
            "DEL" => Ok(Self::Del(call(env, conf, ipam, |_| Ok(None))?)),
            _ => {
                let call = call(env, conf, ipam, pod)?;
                call.netns()?;
                Ok(if command == "ADD" {
                    Self::Add(call)
                } else {
                    Self::Check(call)
                })
            }
        }
    }
}

/// Checks the variables that name an interface; `pod` reads `CNI_ARGS`, which DEL does not
/// need and so does not judge.
fn call(
    env: Environment<'_>,
    conf: NetConf,
    ipam: Option<Ipam>,
    pod: impl Fn(&str) -> Result<Option<PodRef>, CniError>,
) -> Result<Call, CniError> {
    let container_id = variable(env, "CNI_CONTAINERID")?.unwrap_or_default();
    if !spec::is_identifier(&container_id) || container_id.len() > MAX_CONTAINER_ID_BYTES {
        return Err(bad(
            "CNI_CONTAINERID",
            &format!("is {container_id:?}"),
            "it is 1 to 200 letters, digits, '_', '.' and '-', a letter or digit first",
        ));
    }
    let name = variable(env, "CNI_IFNAME")?.unwrap_or_default();
    let ifname = IfName::new(&name).ok_or_else(|| {
        bad(
            "CNI_IFNAME",
            &format!("is {name:?}"),
            "it is 1 to 15 bytes without '/', ':' or blanks, and neither '.' nor '..'",
        )
    })?;
    let netns = variable(env, "CNI_NETNS")?
        .filter(|path| !path.is_empty())
        .map(PathBuf::from);
    if let Some(path) = &netns
        && (!path.is_absolute() || path.as_os_str().len() > MAX_PATH_BYTES)
    {
        return Err(bad(
            "CNI_NETNS",
            &format!("is {:?}", path.display().to_string()),
            "it is an absolute path",
        ));
    }
    let arguments = variable(env, "CNI_ARGS")?.unwrap_or_default();
    Ok(Call {
        conf,
        attachment: Attachment {
            container_id,
            ifname: name,
        },
        ifname,
        netns,
        pod: pod(&arguments)?,
        ipam,
    })
}

/// Reads `CNI_ARGS`: `KEY=VALUE` pairs between semicolons.
fn pod(arguments: &str) -> Result<Option<PodRef>, CniError> {
    let invalid = |what: &str, why: &str| bad("CNI_ARGS", what, why);
    let mut ignores_unknown = false;
    let mut unknown = None;
    let (mut namespace, mut name, mut uid) = (None, None, None);
    for pair in arguments.split(';').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair
            .split_once('=')
            .ok_or_else(|| invalid(&format!("holds {pair:?}"), "it holds KEY=VALUE pairs"))?;
        match key {
            "IgnoreUnknown" => ignores_unknown = is_true(value),
            "K8S_POD_NAMESPACE" => namespace = Some(value),
            "K8S_POD_NAME" => name = Some(value),
            "K8S_POD_UID" => uid = Some(value),
            // The container id again, which every Kubernetes runtime adds.
            "K8S_POD_INFRA_CONTAINER_ID" => {}
            _ => unknown = Some(key),
        }
    }
    if let Some(key) = unknown.filter(|_| !ignores_unknown) {
        return Err(invalid(
            &format!("holds the unknown key {key:?}"),
            "IgnoreUnknown=1 lets unknown keys pass",
        ));
    }
    // Runtimes outside Kubernetes may set the keys to nothing.
    let given = |value: Option<&str>| value.unwrap_or_default().to_owned();
    let pod = PodRef {
        namespace: given(namespace),
        name: given(name),
        uid: given(uid),
    };
    if pod.namespace.is_empty() && pod.name.is_empty() {
        return Ok(None);
    }
    if pod.namespace.len() > 63 || !is_dns_name(&pod.namespace) || pod.namespace.contains('.') {
        return Err(invalid(
            &format!("holds K8S_POD_NAMESPACE={:?}", pod.namespace),
            "it is a DNS label",
        ));
    }
    if pod.name.len() > 253 || !is_dns_name(&pod.name) {
        return Err(invalid(
            &format!("holds K8S_POD_NAME={:?}", pod.name),
            "it is a DNS subdomain",
        ));
    }
    if pod.uid.len() > 128 || !(pod.uid.is_empty() || spec::is_identifier(&pod.uid)) {
        return Err(invalid(
            &format!("holds K8S_POD_UID={:?}", pod.uid),
            "it is letters, digits and '-'",
        ));
    }
    Ok(Some(pod))
}

/// Labels of lower-case letters, digits and '-' between dots (RFC 1123), as Kubernetes has it.
fn is_dns_name(name: &str) -> bool {
    name.split('.').all(|label| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    })
}

fn is_true(value: &str) -> bool {
    value == "1" || value.eq_ignore_ascii_case("true") || value.eq_ignore_ascii_case("t")
}

fn variable(env: Environment<'_>, name: &'static str) -> Result<Option<String>, CniError> {
    env(name)
        .map(|value| {
            value
                .into_string()
                .map_err(|raw| bad(name, &format!("is {raw:?}"), "it is UTF-8 text"))
        })
        .transpose()
}

fn bad(variable: &str, what: &str, why: &str) -> CniError {
    CniError::new(
        code::INVALID_ENVIRONMENT,
        format!("the environment variable {variable} {what}"),
        why,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CONF: &[u8] = br#"{"cniVersion":"1.1.0","name":"skein","type":"skein-cni"}"#;

    /// A good call, changed by `overrides`; an empty value removes a variable.
    fn parse(overrides: &[(&str, &str)]) -> Result<Request, CniError> {
        parse_with(overrides, CONF)
    }

    fn parse_with(overrides: &[(&str, &str)], stdin: &[u8]) -> Result<Request, CniError> {
        let good = [
            ("CNI_COMMAND", "ADD"),
            ("CNI_CONTAINERID", "c1"),
            ("CNI_NETNS", "/run/netns/c1"),
            ("CNI_IFNAME", "eth0"),
        ];
        let env = |name: &str| {
            let (_, value) = overrides
                .iter()
                .chain(&good)
                .find(|(key, _)| *key == name)?;
            (!value.is_empty()).then(|| OsString::from(value))
        };
        Request::parse(&env, stdin)
    }

    fn pod_of(arguments: &str) -> Result<Option<PodRef>, CniError> {
        match parse(&[("CNI_ARGS", arguments)])? {
            Request::Add(call) => Ok(call.pod),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_kubernetes_runtimes_arguments_name_the_pod() {
        let arguments = "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-0.a;\
                         K8S_POD_INFRA_CONTAINER_ID=c1;K8S_POD_UID=0a-b;OTHER=x";
        assert_eq!(
            pod_of(arguments).unwrap(),
            Some(PodRef {
                namespace: "default".into(),
                name: "web-0.a".into(),
                uid: "0a-b".into(),
            })
        );
        assert_eq!(pod_of("").unwrap(), None);
        assert_eq!(pod_of("K8S_POD_NAMESPACE=;K8S_POD_NAME=").unwrap(), None);
    }

    #[test]
    fn bad_arguments_are_refused() {
        for arguments in [
            "OTHER=x",
            "IgnoreUnknown=0;OTHER=x",
            "K8S_POD_NAME",
            "K8S_POD_NAME=web",
            "K8S_POD_NAMESPACE=default",
            "K8S_POD_NAMESPACE=a.b;K8S_POD_NAME=web",
            "K8S_POD_NAMESPACE=../x;K8S_POD_NAME=web",
            "K8S_POD_NAMESPACE=default;K8S_POD_NAME=Web",
            "K8S_POD_NAMESPACE=default;K8S_POD_NAME=web;K8S_POD_UID=a/b",
        ] {
            let error = pod_of(arguments).unwrap_err();
            assert_eq!(error.code, code::INVALID_ENVIRONMENT, "{arguments}");
            assert!(error.msg.contains("CNI_ARGS"), "{error}");
        }
    }

    #[test]
    fn each_bad_variable_is_named() {
        for (name, value) in [
            ("CNI_COMMAND", "add"),
            ("CNI_COMMAND", ""),
            ("CNI_CONTAINERID", ""),
            ("CNI_CONTAINERID", "-c1"),
            ("CNI_CONTAINERID", "c1/../c2"),
            ("CNI_IFNAME", ""),
            ("CNI_IFNAME", ".."),
            ("CNI_IFNAME", "sixteen-bytes-xx"),
            ("CNI_IFNAME", "eth0:1"),
            ("CNI_IFNAME", "a b"),
            ("CNI_NETNS", ""),
            ("CNI_NETNS", "run/netns/c1"),
        ] {
            let error = parse(&[(name, value)]).unwrap_err();
            assert_eq!(error.code, code::INVALID_ENVIRONMENT, "{name}={value}");
            assert!(error.msg.contains(name), "{name}={value}: {error}");
        }
    }

    #[test]
    fn del_needs_neither_namespace_nor_good_arguments() {
        let del = [("CNI_COMMAND", "DEL"), ("CNI_NETNS", ""), ("CNI_ARGS", "?")];
        let request = parse(&del).unwrap();
        assert!(matches!(request, Request::Del(Call { netns: None, .. })));
    }

    #[test]
    fn commands_need_their_version() {
        let conf = |version: &str| format!(r#"{{"cniVersion":"{version}","name":"skein"}}"#);
        for (command, too_old, since) in [
            ("CHECK", "0.3.1", "0.4.0"),
            ("GC", "1.0.0", "1.1.0"),
            ("STATUS", "1.0.0", "1.1.0"),
        ] {
            let overrides = [("CNI_COMMAND", command)];
            let error = parse_with(&overrides, conf(too_old).as_bytes()).unwrap_err();
            assert_eq!(error.code, code::INCOMPATIBLE_VERSION, "{command}");
            parse_with(&overrides, conf(since).as_bytes()).unwrap();
        }
    }

    #[test]
    fn version_needs_nothing_else() {
        let version = [("CNI_COMMAND", "VERSION"), ("CNI_CONTAINERID", "")];
        let asked = br#"{"cniVersion":"9.9.9"}"#;
        assert_eq!(
            parse_with(&version, asked).unwrap(),
            Request::Version(Some("9.9.9".into()))
        );
        assert_eq!(parse_with(&version, b"\n").unwrap(), Request::Version(None));
    }

    proptest! {
        /// Whatever comes in, what passes has the form that the rules give.
        #[test]
        fn nothing_unchecked_passes(
            command in "ADD|DEL|CHECK|GC|STATUS|VERSION|\\PC{0,4}",
            id in "[a-zA-Z0-9][a-zA-Z0-9_.-]{0,3}|[^\0]{0,300}",
            ifname in "[a-z]{1,16}|[^\0]{0,20}",
            netns in "/[a-z/]{0,10}|[^\0]{0,10}",
            arguments in "(K8S_POD_(NAME|NAMESPACE|UID)=[a-zA-Z0-9./-]{0,5};?){0,4}|[^\0]{0,20}",
        ) {
            let parsed = parse(&[
                ("CNI_COMMAND", &command), ("CNI_CONTAINERID", &id), ("CNI_IFNAME", &ifname),
                ("CNI_NETNS", &netns), ("CNI_ARGS", &arguments),
            ]);
            let Ok(Request::Add(call) | Request::Del(call) | Request::Check(call)) = parsed else {
                return Ok(());
            };
            let id = &call.attachment.container_id;
            prop_assert!(!id.is_empty() && id.len() <= MAX_CONTAINER_ID_BYTES);
            prop_assert!(!id.contains(['/', ' ', '\n']) && !id.starts_with('.'));
            prop_assert_eq!(&call.attachment.ifname, call.ifname.as_str());
            prop_assert!(call.ifname.as_str().len() <= MAX_IFNAME_BYTES);
            prop_assert!(!call.ifname.as_str().contains(['/', ':', ' ', '\t', '\n']));
            prop_assert!(call.netns.is_none_or(|path| path.is_absolute()));
            if let Some(pod) = call.pod {
                prop_assert!(!pod.namespace.is_empty() && !pod.name.is_empty());
                let text = format!("{}{}{}", pod.namespace, pod.name, pod.uid);
                prop_assert!(!text.contains(['/', ';', '=', ' ', '\n']));
            }
        }

        #[test]
        fn any_bytes_on_standard_input_are_an_error_or_a_call(stdin: Vec<u8>) {
            let _ = parse_with(&[], &stdin);
        }

        #[test]
        fn good_names_pass(id in "[a-zA-Z0-9][a-zA-Z0-9_.-]{0,199}", ifname in "[a-z0-9._-]{3,15}") {
            let parsed = parse(&[("CNI_CONTAINERID", &id), ("CNI_IFNAME", &ifname)]);
            prop_assert!(parsed.is_ok() || ifname == "..", "{:?}", parsed);
        }
    }
}

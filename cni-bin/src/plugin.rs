//! One call of the plugin, from environment and standard input to what is printed.

use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crate::agent::{self, Client, Reply};
use crate::request::{Environment, Request};
use crate::spec::{self, CniError, NetConf, Version, code};
use crate::{add, call_log, check, del, gc, status};

/// How long one answer of the agent may take: it gives up by itself after about 10 s.
pub const AGENT_DEADLINE: Duration = Duration::from_secs(15);

/// How long an ADD waits for an agent that does not listen, and how often it looks.
const START_PATIENCE: Duration = Duration::from_secs(5);
const START_INTERVAL: Duration = Duration::from_millis(50);

/// What a call printed and how it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// For standard output: a result, an error, or nothing.
    pub stdout: String,
    /// Whether the process exits with 0.
    pub is_success: bool,
}

/// Serves one call. `env` looks environment variables up, `stdin` is all of standard input.
pub fn run(env: Environment<'_>, stdin: &[u8]) -> Outcome {
    let outcome = Request::parse(env, stdin).and_then(|request| serve(&request));
    log(env, stdin, &outcome);
    match outcome {
        Ok(answer) => Outcome {
            stdout: answer.stdout,
            is_success: true,
        },
        Err(error) => Outcome {
            stdout: error.to_json(version_of(stdin)),
            is_success: false,
        },
    }
}

/// An error that happened before there was a call.
pub fn failed_to_read(error: &std::io::Error) -> Outcome {
    let error = CniError::new(
        code::IO_FAILURE,
        "cannot read the network configuration from standard input",
        error.to_string(),
    );
    Outcome {
        stdout: error.to_json(Version::LATEST),
        is_success: false,
    }
}

/// A success: what to print, and what the log tells beyond it.
#[derive(Default)]
struct Answer {
    stdout: String,
    remark: String,
}

fn serve(request: &Request) -> Result<Answer, CniError> {
    match request {
        Request::Add(call) => add::run(call).map(|added| {
            let mut remark: Vec<_> = added
                .result
                .ips
                .iter()
                .map(|ip| ip.address.to_string())
                .collect();
            remark.extend(added.note);
            Answer {
                stdout: added.result.to_json(call.conf.version),
                remark: remark.join(" "),
            }
        }),
        Request::Del(call) => del::run(call).map(|note| Answer {
            remark: note.unwrap_or_default(),
            ..Answer::default()
        }),
        Request::Check(call) => check::run(call).map(|()| Answer::default()),
        Request::Gc(conf, ipam) => gc::run(conf, ipam.as_ref()).map(|()| Answer::default()),
        Request::Status(conf, ipam) => status::run(conf, ipam.as_ref()).map(|()| Answer::default()),
        Request::Version(asked) => Ok(Answer {
            stdout: spec::version_reply(asked.as_deref()),
            ..Answer::default()
        }),
    }
}

/// The version to write an error in: the configuration's, where it can be told.
fn version_of(stdin: &[u8]) -> Version {
    NetConf::version_of(stdin)
        .and_then(|text| Version::negotiate(text.as_deref()))
        .unwrap_or(Version::LATEST)
}

/// Writes the call's line, where the configuration names a file. It takes its names from the
/// environment, so that a call that was refused for them is seen too. A log that cannot be
/// written is told on standard error and otherwise no matter.
fn log(env: Environment<'_>, stdin: &[u8], outcome: &Result<Answer, CniError>) {
    let Ok(NetConf {
        name,
        log_file: Some(path),
        ..
    }) = NetConf::parse_for_removal(stdin)
    else {
        return;
    };
    let variable = |name: &str| env(name).map(|value| value.to_string_lossy().into_owned());
    let mut line = variable("CNI_COMMAND").unwrap_or_default();
    for (label, key) in [("container", "CNI_CONTAINERID"), ("ifname", "CNI_IFNAME")] {
        if let Some(value) = variable(key).filter(|value| !value.is_empty()) {
            line += &format!(" {label}={value}");
        }
    }
    line += &format!(" network={name}");
    match outcome {
        Ok(answer) if answer.remark.is_empty() => line += " ok",
        Ok(answer) => line += &format!(" ok {}", answer.remark),
        Err(error) => line += &format!(" failed {error}"),
    }
    if let Err(error) = call_log::append(&path, SystemTime::now(), &line) {
        eprintln!("skein-cni: cannot write {}: {error}", path.display());
    }
}

/// Connects to the agent that the configuration names.
pub(crate) fn connect(conf: &NetConf) -> Result<Client, CniError> {
    Ok(Client::connect(&conf.socket, AGENT_DEADLINE)?)
}

/// The same, but for an agent that does not listen waits a little: it may only just start.
pub(crate) fn connect_patiently(conf: &NetConf) -> Result<Client, CniError> {
    let deadline = Instant::now() + START_PATIENCE;
    loop {
        match Client::connect(&conf.socket, AGENT_DEADLINE) {
            Err(_) if Instant::now() < deadline => thread::sleep(START_INTERVAL),
            connected => return Ok(connected?),
        }
    }
}

/// Asks the agent; its own errors are ours.
pub(crate) fn ask(agent: &mut Client, request: &agent::Request) -> Result<Reply, CniError> {
    match agent.call(request)? {
        Reply::Error(error) => Err(error.into()),
        reply => Ok(reply),
    }
}

/// An answer that does not belong to the question.
pub(crate) fn unexpected(reply: &Reply) -> CniError {
    let name = match reply {
        Reply::Reserved(_) => "reserved",
        Reply::Attached => "attached",
        Reply::Done => "done",
        Reply::View { .. } => "view",
        Reply::Error(_) => "error",
    };
    CniError::new(
        code::AGENT_PROTOCOL,
        format!("the Skein agent answered {name:?} to another question"),
        "plugin and agent may be of different versions",
    )
}

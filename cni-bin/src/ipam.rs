//! Addresses from another plugin: `ipam.type` of the configuration, run as the specification's
//! section "Plugin Delegation" has it.
//!
//! The delegate gets our own configuration and variables, and its addresses are handed to the
//! agent as if the runtime had asked for them. Deliberately absent: the delegate's gateways and
//! routes, since a pod's one way out is the datapath's gateway.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde::Deserialize;

use crate::spec::{CniError, CniResult, code};

/// The variables of a call, which the delegate gets as we did, but for the command.
const VARIABLES: [&str; 5] = [
    "CNI_CONTAINERID",
    "CNI_NETNS",
    "CNI_IFNAME",
    "CNI_ARGS",
    "CNI_PATH",
];

/// A delegate, ready to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ipam {
    name: String,
    document: Vec<u8>,
    variables: Vec<(&'static str, OsString)>,
}

/// The specification's error document.
#[derive(Deserialize)]
struct Refusal {
    code: u32,
    #[serde(default)]
    msg: String,
    #[serde(default)]
    details: String,
}

impl Ipam {
    /// The delegate of that name for the call that `env` and `document` (standard input)
    /// describe.
    pub fn new(name: &str, env: &dyn Fn(&str) -> Option<OsString>, document: &[u8]) -> Self {
        let given = |name: &'static str| env(name).map(|value| (name, value));
        Self {
            name: name.to_owned(),
            document: document.to_vec(),
            variables: VARIABLES.into_iter().filter_map(given).collect(),
        }
    }

    /// Takes addresses. What an earlier ADD for the same interface took is given back first
    /// where the delegate minds it; what a failed one took is given back, too.
    pub fn add(&self) -> Result<CniResult, CniError> {
        let add = || {
            let stdout = self.run("ADD")?;
            let result: CniResult = serde_json::from_str(&stdout)
                .map_err(|e| self.failed("ADD", &format!("wrote no result: {e}")))?;
            if result.ips.is_empty() {
                return Err(self.failed("ADD", "gave no address"));
            }
            Ok(result)
        };
        let give_back = |error: CniError| match self.run("DEL") {
            Ok(_) => error,
            Err(second) => error.also(&second.to_string()),
        };
        add()
            .map_err(give_back)
            .or_else(|_| add().map_err(give_back))
    }

    /// Runs one of the commands that answer nothing.
    pub fn call(&self, command: &str) -> Result<(), CniError> {
        self.run(command).map(drop)
    }

    fn run(&self, command: &str) -> Result<String, CniError> {
        let program = self.find()?;
        let failed = |e: std::io::Error| self.failed(command, &e.to_string());
        let mut child = Command::new(program)
            .env_clear()
            // A plugin may be a script, and scripts call programs.
            .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .env("CNI_COMMAND", command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        if let Some(mut stdin) = child.stdin.take() {
            // A delegate that does not read says by its exit what it thinks.
            drop(stdin.write_all(&self.document));
        }
        let output = child.wait_with_output().map_err(failed)?;
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return Ok(stdout);
        }
        Err(match serde_json::from_str::<Refusal>(&stdout) {
            Ok(refusal) => CniError::new(
                refusal.code,
                format!("IPAM plugin {}, {command}: {}", self.name, refusal.msg),
                refusal.details,
            ),
            Err(_) => {
                let stderr = String::from_utf8_lossy(&output.stderr);
                self.failed(command, &format!("{}: {}", output.status, stderr.trim()))
            }
        })
    }

    /// The delegate's file: the first of its name in the folders of `CNI_PATH`.
    fn find(&self) -> Result<PathBuf, CniError> {
        let path = self.variables.iter().find(|(name, _)| *name == "CNI_PATH");
        let path = path.map_or_else(OsString::new, |(_, value)| value.clone());
        std::env::split_paths(&path)
            .map(|folder| folder.join(&self.name))
            .find(|file| file.is_file())
            .ok_or_else(|| {
                CniError::new(
                    code::INVALID_ENVIRONMENT,
                    format!("there is no IPAM plugin {} in CNI_PATH", self.name),
                    format!("CNI_PATH is {}", path.display()),
                )
            })
    }

    fn failed(&self, command: &str, why: &str) -> CniError {
        CniError::new(
            code::DELEGATE,
            format!("IPAM plugin {}, {command}, failed", self.name),
            why,
        )
    }
}

//! A long-lived program on a node: started with its log in the node's folder, and waited for.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::bins;
use crate::cmd::{Cmd, tail};
use crate::node::NodeInfo;
use crate::state::Owner;

/// What the record keeps of a program that was started.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DaemonRecord {
    /// The program.
    pub name: String,
    /// Its node.
    pub node: String,
    /// Its process.
    pub process: Owner,
}

/// A started program. Dropping it leaves the program alone: the lab's end ends it.
#[derive(Debug)]
pub struct Daemon {
    record: DaemonRecord,
    child: Child,
    log: PathBuf,
}

impl Daemon {
    /// Starts `command`, which runs inside `node`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(node: &NodeInfo, name: &str, command: Cmd) -> Result<Self> {
        let log = node.node_directory().join(format!("{name}.log"));
        let mut file = std::fs::File::options()
            .create(true)
            .append(true)
            .open(&log)?;
        writeln!(file, "--- {command}")?;
        let child = command.spawn_detached(Stdio::null(), file.try_clone()?.into(), file.into())?;
        let process = Owner::of(child.id())
            .with_context(|| format!("{name} on {} ended at once", node.name))?;
        let record = DaemonRecord {
            name: name.to_owned(),
            node: node.name.clone(),
            process,
        };
        Ok(Self { record, child, log })
    }

    /// The record.
    pub fn record(&self) -> &DaemonRecord {
        &self.record
    }

    /// Waits until `ready` succeeds.
    ///
    /// # Errors
    /// If the program ends first, or is not ready in time; with the end of its log.
    pub fn wait(&mut self, patience: Duration, ready: impl Fn() -> Result<()>) -> Result<()> {
        let deadline = Instant::now() + patience;
        loop {
            self.check()?;
            let Err(error) = ready() else {
                return Ok(());
            };
            if Instant::now() >= deadline {
                return Err(error.context(format!(
                    "{} on {} is not ready after {patience:?}; its log ends: {}",
                    self.record.name,
                    self.record.node,
                    self.log_tail()
                )));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Fails with the end of its log if the program has ended.
    ///
    /// # Errors
    /// See above.
    pub fn check(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!(
                "{} on {} ended with {status}; its log ends: {}",
                self.record.name,
                self.record.node,
                self.log_tail()
            );
        }
        Ok(())
    }

    fn log_tail(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        tail(&log).to_owned()
    }
}

/// The body of a page that a program on `node` serves; fails unless it says 200.
///
/// # Errors
/// If nothing answers, or not with 200.
pub fn http_get(node: &NodeInfo, address: &str, path: &str) -> Result<String> {
    let output = node
        .cmd(bins::find("skein-lab")?)
        .args(["probe", "http-get", address, path])
        .timeout(Duration::from_secs(10))
        .run()?;
    Ok(output.stdout)
}

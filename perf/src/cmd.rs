//! Programs run with a deadline, inside or outside a lab's namespaces.
//!
//! Everything that the lab does to the machine goes through [`Cmd`], so that every failure names
//! the command line, the exit status and what the program wrote, and so that every process of a
//! lab carries the lab's name in its environment ([`LAB_ENV`]): that is how teardown finds
//! processes whose parent is long gone.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// The variable that marks a process as a lab's.
pub const LAB_ENV: &str = "SKEIN_LAB";

/// How long a command may take unless [`Cmd::timeout`] says otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// Searched after what `PATH` says.
pub(crate) const SYSTEM_FOLDERS: &str = "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin";

/// Set once a signal has asked the program to end.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Refuses to start commands from now on, except those that [`Cmd::even_if_interrupted`] marks.
///
/// The signal thread calls this before it takes labs down, so that the main thread does not
/// build while the other removes.
pub fn interrupt() {
    INTERRUPTED.store(true, Ordering::SeqCst);
}

/// A program to run: arguments, environment, input and deadline.
#[derive(Clone, Debug)]
pub struct Cmd {
    argv: Vec<OsString>,
    env: Vec<(String, String)>,
    stdin: Vec<u8>,
    timeout: Duration,
    even_if_interrupted: bool,
}

/// What a program wrote and how it ended.
#[derive(Clone, Debug)]
pub struct Output {
    /// The exit status.
    pub status: ExitStatus,
    /// Standard output, invalid UTF-8 replaced.
    pub stdout: String,
    /// Standard error, invalid UTF-8 replaced.
    pub stderr: String,
}

impl Cmd {
    /// A command on the machine itself.
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        Self {
            argv: vec![program.as_ref().to_owned()],
            env: Vec::new(),
            stdin: Vec::new(),
            timeout: DEFAULT_TIMEOUT,
            even_if_interrupted: false,
        }
    }

    /// A command from words separated by white space: `Cmd::line("ip link show")`.
    pub fn line(line: &str) -> Self {
        let mut words = line.split_whitespace();
        Self::new(words.next().unwrap_or_default()).args(words)
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.argv.push(arg.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(mut self, args: I) -> Self {
        self.argv
            .extend(args.into_iter().map(|a| a.as_ref().to_owned()));
        self
    }

    /// Puts words before the command: `prefix(["nsenter", "--net=…"])`.
    #[must_use]
    pub fn prefix<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(mut self, words: I) -> Self {
        let mut argv: Vec<OsString> = words.into_iter().map(|w| w.as_ref().to_owned()).collect();
        argv.append(&mut self.argv);
        self.argv = argv;
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Marks the process as one of lab `name`.
    #[must_use]
    pub fn of_lab(self, name: &str) -> Self {
        self.env(LAB_ENV, name)
    }

    /// Standard input, all of it; empty by default.
    #[must_use]
    pub fn stdin(mut self, input: impl Into<Vec<u8>>) -> Self {
        self.stdin = input.into();
        self
    }

    /// The deadline after which the program is killed and the run fails.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Runs the program on one CPU alone, if one is given.
    #[must_use]
    pub fn on_cpu(self, cpu: Option<usize>) -> Self {
        match cpu {
            Some(cpu) => self.prefix(["taskset".to_owned(), "-c".to_owned(), cpu.to_string()]),
            None => self,
        }
    }

    /// For teardown: runs also after [`interrupt`].
    #[must_use]
    pub fn even_if_interrupted(mut self) -> Self {
        self.even_if_interrupted = true;
        self
    }

    /// Runs to the end; fails unless the exit status is 0.
    pub fn run(self) -> Result<Output> {
        let name = self.to_string();
        let output = self.try_run()?;
        if !output.status.success() {
            bail!("`{name}` failed with {}", output.describe());
        }
        Ok(output)
    }

    /// Runs to the end, whatever the exit status; fails if it cannot start or runs too long.
    pub fn try_run(self) -> Result<Output> {
        let timeout = self.timeout;
        self.spawn()?.finish(timeout)
    }

    /// Runs to the end and reads standard output as JSON.
    pub fn json(self) -> Result<serde_json::Value> {
        let name = self.to_string();
        let output = self.run()?;
        serde_json::from_str(&output.stdout)
            .with_context(|| format!("`{name}` wrote no JSON but: {}", tail(&output.stdout)))
    }

    /// Starts the program with its output captured; dropping the result kills it.
    pub fn spawn(self) -> Result<Running> {
        let name = self.to_string();
        let mut child = self
            .command()?
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| cannot_start(&name))?;
        let input = self.stdin;
        if let Some(mut stdin) = child.stdin.take()
            && !input.is_empty()
        {
            // A program that ends without reading its input shows that by its exit status.
            std::thread::spawn(move || drop(stdin.write_all(&input)));
        }
        let (sender, lines) = channel();
        let stdout = child.stdout.take().context("no pipe for standard output")?;
        std::thread::spawn(move || {
            let mut reader = BufReader::new(stdout);
            let mut line = Vec::new();
            while matches!(reader.read_until(b'\n', &mut line), Ok(1..)) {
                let text = String::from_utf8_lossy(&line).into_owned();
                if sender.send(text).is_err() {
                    return;
                }
                line.clear();
            }
        });
        let mut stderr = child.stderr.take().context("no pipe for standard error")?;
        let stderr = std::thread::spawn(move || {
            let mut text = Vec::new();
            // What arrived before an error is still worth showing.
            drop(stderr.read_to_end(&mut text));
            String::from_utf8_lossy(&text).into_owned()
        });
        Ok(Running {
            name,
            child,
            lines,
            seen: String::new(),
            stderr: Some(stderr),
        })
    }

    /// Starts a long-lived process of its own process group, so that ^C in the terminal does not
    /// reach it; its standard output and error go where the caller says.
    pub fn spawn_detached(self, stdin: Stdio, stdout: Stdio, stderr: Stdio) -> Result<Child> {
        let name = self.to_string();
        self.command()?
            .process_group(0)
            .stdin(stdin)
            .stdout(stdout)
            .stderr(stderr)
            .spawn()
            .with_context(|| cannot_start(&name))
    }

    /// Runs the program with the caller's terminal and waits for it: for `skein-lab exec`.
    pub fn run_in_foreground(self) -> Result<ExitStatus> {
        let name = self.to_string();
        self.command()?
            .status()
            .with_context(|| cannot_start(&name))
    }

    fn command(&self) -> Result<Command> {
        if INTERRUPTED.load(Ordering::SeqCst) && !self.even_if_interrupted {
            bail!("not starting `{self}`: a signal asked to stop");
        }
        let mut command = Command::new(&self.argv[0]);
        command.args(&self.argv[1..]);
        // Output is parsed: keep it in one language. A lab inside a lab is not a thing.
        command.env("LC_ALL", "C").env_remove(LAB_ENV);
        // `ip` and its like are in folders that not every shell searches, not even root's.
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{path}:{SYSTEM_FOLDERS}"));
        command.envs(self.env.iter().map(|(k, v)| (k, v)));
        Ok(command)
    }
}

impl std::fmt::Display for Cmd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, word) in self.argv.iter().enumerate() {
            let space = if i == 0 { "" } else { " " };
            write!(f, "{space}{}", word.to_string_lossy())?;
        }
        Ok(())
    }
}

impl Output {
    /// Exit status and the ends of both outputs, for an error message.
    pub fn describe(&self) -> String {
        let mut text = self.status.to_string();
        for (name, output) in [("stderr", &self.stderr), ("stdout", &self.stdout)] {
            if !output.trim().is_empty() {
                text += &format!("; {name}: {}", tail(output));
            }
        }
        text
    }
}

/// A program that runs, its output captured.
#[derive(Debug)]
pub struct Running {
    name: String,
    child: Child,
    lines: Receiver<String>,
    seen: String,
    stderr: Option<JoinHandle<String>>,
}

impl Running {
    /// The process id: that of the program itself, since the wrappers (`nsenter`, `taskset`) exec.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has not ended yet.
    pub fn is_alive(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Waits for a line of standard output that begins with `prefix`; returns the rest of it.
    pub fn expect_line(&mut self, prefix: &str, timeout: Duration) -> Result<String> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    self.seen += &line;
                    if let Some(rest) = line.trim().strip_prefix(prefix) {
                        return Ok(rest.trim().to_owned());
                    }
                }
                Err(error) => {
                    if error == RecvTimeoutError::Disconnected {
                        // It is ending by itself: let its own exit status be the one reported.
                        std::thread::sleep(Duration::from_millis(50));
                    }
                    // Dead or killed here, so that standard error has an end.
                    drop(self.child.kill());
                    let status = self.child.wait()?;
                    let stderr = self.stderr();
                    let why = match error {
                        RecvTimeoutError::Timeout => format!("within {timeout:?}"),
                        RecvTimeoutError::Disconnected => format!("but ended with {status}"),
                    };
                    bail!(
                        "`{}` did not write \"{prefix}\" {why}; stdout: {}; stderr: {}",
                        self.name,
                        tail(&self.seen),
                        tail(&stderr)
                    );
                }
            }
        }
    }

    /// Waits for the end; kills the program and fails once `timeout` has passed.
    pub fn finish(mut self, timeout: Duration) -> Result<Output> {
        let deadline = Instant::now() + timeout;
        let mut pause = Duration::from_millis(1);
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if Instant::now() >= deadline {
                drop(self.child.kill());
                self.child.wait()?;
                let (stdout, stderr) = (self.stdout(), self.stderr());
                bail!(
                    "`{}` did not end within {timeout:?} and was killed; stdout: {}; stderr: {}",
                    self.name,
                    tail(&stdout),
                    tail(&stderr)
                );
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        };
        Ok(Output {
            status,
            stdout: self.stdout(),
            stderr: self.stderr(),
        })
    }

    fn stdout(&mut self) -> String {
        let mut text = std::mem::take(&mut self.seen);
        text.extend(self.lines.iter());
        text
    }

    fn stderr(&mut self) -> String {
        self.stderr
            .take()
            .and_then(|thread| thread.join().ok())
            .unwrap_or_default()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Fails only where the program has ended already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn cannot_start(name: &str) -> String {
    format!("cannot start `{name}`; is its first word installed and in PATH?")
}

/// The last kilobyte or so of a text.
pub fn tail(text: &str) -> &str {
    const LIMIT: usize = 1500;
    let text = text.trim();
    let mut start = text.len().saturating_sub(LIMIT);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_command_and_what_it_wrote() {
        let error = Cmd::new("sh")
            .args(["-c", "echo out; echo err >&2; exit 3"])
            .run()
            .unwrap_err()
            .to_string();
        for part in ["sh -c", "3", "out", "err"] {
            assert!(error.contains(part), "{part} missing from: {error}");
        }
    }

    #[test]
    fn a_program_past_its_deadline_is_killed_and_named() {
        let error = Cmd::line("sleep 60")
            .timeout(Duration::from_millis(50))
            .run()
            .unwrap_err()
            .to_string();
        assert!(error.contains("sleep 60"), "{error}");
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = Cmd::new("no-such-program-here").run().unwrap_err();
        assert!(error.to_string().contains("no-such-program-here"));
    }

    #[test]
    fn a_line_can_be_waited_for_and_input_is_passed_on() {
        let mut running = Cmd::new("sh")
            .args(["-c", "echo ready 17; cat"])
            .stdin("hello\n")
            .spawn()
            .unwrap();
        let rest = running.expect_line("ready", Duration::from_secs(10));
        assert_eq!(rest.unwrap(), "17");
        let output = running.finish(Duration::from_secs(10)).unwrap();
        assert_eq!(output.stdout, "ready 17\nhello\n");
    }

    #[test]
    fn a_program_that_ends_before_the_line_is_an_error_with_its_stderr() {
        let mut running = Cmd::new("sh")
            .args(["-c", "echo sorry >&2; exit 1"])
            .spawn()
            .unwrap();
        let error = running.expect_line("ready", Duration::from_secs(10));
        assert!(error.unwrap_err().to_string().contains("sorry"));
    }
}

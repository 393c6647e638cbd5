//! The CNI plugin `skein-cni`: parameters in the environment and on standard input, the answer
//! on standard output. All that it does is in the library.

use std::io::{self, Read, Write};
use std::process::ExitCode;

use skein_cni::plugin::{self, Outcome};

/// More than the attachments of the fullest node.
const MAX_STDIN_BYTES: u64 = 16 << 20;

fn main() -> ExitCode {
    let mut stdin = Vec::new();
    let outcome = match io::stdin().take(MAX_STDIN_BYTES).read_to_end(&mut stdin) {
        Ok(_) => plugin::run(&|name| std::env::var_os(name), &stdin),
        Err(error) => plugin::failed_to_read(&error),
    };
    print(&outcome)
}

fn print(outcome: &Outcome) -> ExitCode {
    let mut stdout = io::stdout();
    let written = stdout
        .write_all(outcome.stdout.as_bytes())
        .and_then(|()| stdout.flush());
    match written {
        Ok(()) if outcome.is_success => ExitCode::SUCCESS,
        Ok(()) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("skein-cni: cannot write to standard output: {error}");
            ExitCode::FAILURE
        }
    }
}

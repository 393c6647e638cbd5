//! `skeind`, the Skein node agent.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use skein_control::config::{Config, Fault};
use skein_control::netlink::ThisMachine;
use skein_control::{observe, run};

/// The Skein node agent. Ends with 0 after SIGTERM, with 2 for a bad configuration, else with 1.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The configuration, TOML; each key can also be set by SKEIN_<SECTION>_<KEY>.
    #[arg(long)]
    config: PathBuf,
    /// Only check the configuration.
    #[arg(long)]
    check_config: bool,
}

/// A worker that has panicked moves no packet any more: better to end, and be started again,
/// than to go on without it.
fn end_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::exit(1);
    }));
}

fn main() -> ExitCode {
    end_on_panic();
    let arguments = Arguments::parse();
    let environment = |name: &str| std::env::var(name).ok();
    let refused = |faults: Vec<Fault>| {
        for fault in faults {
            eprintln!("skeind: {}: {fault}", arguments.config.display());
        }
        ExitCode::from(2)
    };
    let mut config = match Config::load(&arguments.config, &environment) {
        Ok(config) => config,
        Err(faults) => return refused(faults),
    };
    if arguments.check_config {
        return ExitCode::SUCCESS;
    }
    if let Err(faults) = config.resolve(&environment, &ThisMachine) {
        return refused(faults);
    }
    observe::log(config.log.format, config.log.level);
    match run::run(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

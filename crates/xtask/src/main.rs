//! `cargo xtask`: everything a person or CI does with this repository beyond plain cargo.

mod cargo;
mod chaos;
mod ci;
mod dev;
mod test;
mod tidy;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Runs, tests and checks the engine")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Starts the whole engine on this machine, shows it at work, and stays up until Ctrl-C.
    Dev(dev::Args),
    /// Runs all tests against an engine started for them; arguments go to the test runner.
    Test(test::Args),
    /// Runs the crash tests in full. Takes long; arguments go to the test runner.
    Chaos(test::Args),
    /// What CI runs: fmt, clippy, docs, tidy, test.
    Ci,
    /// Checks the rules of this code base that no compiler knows.
    Tidy,
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Dev(args) => dev::run(args),
        Command::Test(args) => test::run(&args),
        Command::Chaos(args) => chaos::run(args),
        Command::Ci => ci::run(),
        Command::Tidy => tidy::run(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

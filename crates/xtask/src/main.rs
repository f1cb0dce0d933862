//! `cargo xtask`: everything a person or CI does with this repository beyond plain cargo.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool")]

mod attack;
mod cargo;
mod chaos;
mod chart;
mod ci;
mod dev;
mod features;
mod image;
mod node;
mod openapi;
mod python;
mod sbom;
mod stop_requests;
mod test;
mod tidy;
mod tree;
mod upgrade;

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
    /// Starts a broker with three demo agents at the engine of `dev`, shows it at work, and stays up until Ctrl-C.
    Node(node::Args),
    /// Runs all tests against an engine started for them; arguments go to the test runner.
    Test(test::Args),
    /// Runs the crash tests in full. Takes long; arguments go to the test runner.
    Chaos(test::Args),
    /// Runs the attacks of one tenant on the others; arguments go to the test runner.
    Attack(test::Args),
    /// Checks the Helm chart, the alerts and the dashboards.
    Chart(chart::Args),
    /// Builds the container image and writes it into an archive.
    Image(image::Args),
    /// Writes the bills of materials of the engine's programs (CycloneDX, JSON).
    Sbom(sbom::Args),
    /// Runs the chart's pods from the image with podman, and sends a message through them.
    Smoke,
    /// Runs this version beside the one before it, under load. Builds the one before, which takes long the first time.
    Upgrade(upgrade::Args),
    /// Runs the checks of CI: fmt, tidy, chart, clippy, docs, test, smoke.
    Ci,
    /// Writes the manifest that gives every selection of packages the same features. Run it after changing
    /// dependencies.
    Features,
    /// Writes docs/openapi.json from the gateway's handlers.
    Openapi,
    /// Checks the rules of this code base that no compiler knows.
    Tidy,
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Dev(args) => dev::run(args),
        Command::Node(args) => node::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Chaos(args) => chaos::run(args),
        Command::Attack(args) => attack::run(args),
        Command::Chart(args) => chart::run(&args),
        Command::Image(args) => image::run(&args),
        Command::Sbom(args) => sbom::run(&args),
        Command::Smoke => image::smoke::run(),
        Command::Upgrade(args) => upgrade::run(&args),
        Command::Ci => ci::run(),
        Command::Features => features::run(),
        Command::Openapi => openapi::run(),
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

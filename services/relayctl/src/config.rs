//! `relayctl config`: checks and explains the configuration of the services, by running their binaries beside this
//! one.

use std::process::{Command as Process, ExitCode};

use anyhow::{Context as _, Result};
use clap::ValueEnum;

use crate::output::Output;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Report every problem of the configuration that this environment gives a program.
    Check {
        /// Program to check.
        program: Program,
    },
    /// Show each setting of a program: its meaning, source, and value unless it is a secret.
    Explain {
        /// Program to check.
        program: Program,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Program {
    /// relay-gateway.
    Gateway,
    /// relay-worker.
    Worker,
}

/// Runs the program, whose output, as JSON if requested, is passed through.
pub(crate) fn run(command: &Command, out: Output) -> Result<ExitCode> {
    let (program, flag) = match command {
        Command::Check { program } => (program, "--config-check"),
        Command::Explain { program } => (program, "--config-explain"),
    };
    let name = match program {
        Program::Gateway => "relay-gateway",
        Program::Worker => "relay-worker",
    };
    let own = std::env::current_exe().context("find this program")?;
    let beside = own.with_file_name(name);
    let path = if beside.is_file() { beside } else { name.into() };
    let status = Process::new(&path)
        .arg(flag)
        .args(out.is_json().then_some("--config-json"))
        .status()
        .with_context(|| format!("run {}", path.display()))?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

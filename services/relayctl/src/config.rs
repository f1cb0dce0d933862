//! `relayctl config`: asks the programs themselves, which lie beside this one.

use std::process::{Command as Process, ExitCode};

use anyhow::{Context as _, Result};
use clap::ValueEnum;

use crate::output::Output;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Say everything that is wrong with the configuration that this environment gives a program, all at once.
    Check {
        /// Whose configuration.
        program: Program,
    },
    /// Show each option of a program: what it means, where its value comes from, and the value unless it is a secret.
    Explain {
        /// Whose configuration.
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

/// The program's own answer, as JSON if that is asked for, is this one's.
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

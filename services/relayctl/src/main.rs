//! `relayctl`: command line for operators of an engine.
//!
//! Commands access Postgres and NATS directly, so that they work while no gateway runs; `tail` uses a gateway. Each
//! command has its own module.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool")]

mod completions;
mod config;
mod connection;
mod dead_letter;
#[cfg(test)]
mod docs;
mod doctor;
mod mailbox;
mod migrate;
mod node;
mod output;
mod quotas;
mod restore;
mod secret_files;
mod tail;
mod token;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "relayctl", version, about = "Operate a Relay engine", arg_required_else_help = true)]
pub(crate) struct Arguments {
    /// Print JSON instead of a table.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Bring the database schema up to date. Safe to run again, and while an older version is running.
    Migrate(migrate::Arguments),
    /// Create, list, suspend, export and delete workspaces.
    #[command(subcommand)]
    Workspace(workspace::Command),
    /// Create and revoke tokens.
    #[command(subcommand)]
    Token(token::Command),
    /// List and drain nodes.
    #[command(subcommand)]
    Node(node::Command),
    /// Inspect an agent's mailbox.
    #[command(subcommand)]
    Mailbox(mailbox::Command),
    /// List, redrive and purge dead letters.
    #[command(subcommand)]
    DeadLetter(dead_letter::Command),
    /// Redrive dead letters: one, or all that match a filter. The same as `dead-letter redrive`.
    Redrive(dead_letter::Redrive),
    /// Follow the events of a workspace.
    Tail(tail::Arguments),
    /// Recover a restored database manually, which gateways and workers do automatically when they start.
    Restore(restore::Arguments),
    /// Check Postgres, NATS, their settings, the clocks and the schema. Exits with 1 if something must be repaired.
    Doctor(doctor::Arguments),
    /// Check and explain the configuration of gateways and workers.
    #[command(subcommand)]
    Config(config::Command),
    /// Print the completions of a shell.
    Completions(completions::Arguments),
}

// One thread: commands run one statement at a time.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let done = match secret_files::parse_arguments() {
        Ok(arguments) => run(arguments).await,
        Err(error) => Err(error),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: Arguments) -> Result<ExitCode> {
    let out = output::Output::new(arguments.json);
    match arguments.command {
        Command::Migrate(arguments) => migrate::run(arguments, out).await?,
        Command::Workspace(command) => workspace::run(command, out).await?,
        Command::Token(command) => token::run(command, out).await?,
        Command::Node(command) => node::run(command, out).await?,
        Command::Mailbox(command) => mailbox::run(command, out).await?,
        Command::DeadLetter(command) => dead_letter::run(command, out).await?,
        Command::Redrive(arguments) => dead_letter::run(dead_letter::Command::Redrive(arguments), out).await?,
        Command::Restore(arguments) => restore::run(arguments, out).await?,
        Command::Tail(arguments) => tail::run(arguments, out).await?,
        Command::Doctor(arguments) => return doctor::run(&arguments, out).await,
        Command::Config(command) => return config::run(&command, out),
        Command::Completions(arguments) => completions::run(&arguments),
    }
    Ok(ExitCode::SUCCESS)
}

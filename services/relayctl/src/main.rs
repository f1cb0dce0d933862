//! `relayctl`: what an operator does to an engine from a terminal.
//!
//! Commands go to Postgres and NATS directly, so that they work while no gateway runs; `tail` asks a gateway.

mod completions;
mod config;
mod connection;
mod dead_letter;
#[cfg(test)]
mod docs;
mod doctor;
mod files;
mod mailbox;
mod migrate;
mod node;
mod output;
mod quotas;
mod restore;
mod tail;
mod token;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "relayctl", version, about = "Operate a Relay engine", arg_required_else_help = true)]
pub(crate) struct Arguments {
    /// Print JSON for programs instead of a table for people.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Bring the database schema up to date. Safe to run again, and while an older version is running.
    Migrate(migrate::Arguments),
    /// Make, list, suspend, export and remove workspaces.
    #[command(subcommand)]
    Workspace(workspace::Command),
    /// Make and kill tokens.
    #[command(subcommand)]
    Token(token::Command),
    /// Look at nodes, and empty them.
    #[command(subcommand)]
    Node(node::Command),
    /// Look into an agent's mailbox.
    #[command(subcommand)]
    Mailbox(mailbox::Command),
    /// Look at deliveries that could not be made, send them again, put them away.
    #[command(subcommand)]
    DeadLetter(dead_letter::Command),
    /// Send dead letters again: one, or all that a filter asks for. The same as `dead-letter redrive`.
    Redrive(dead_letter::Redrive),
    /// Follow what happens in a workspace.
    Tail(tail::Arguments),
    /// Recover a restored database by hand, which gateways and workers do by themselves when they start.
    Restore(restore::Arguments),
    /// Check Postgres, NATS, their settings, the clocks and the schema. Ends with 1 if something must be mended.
    Doctor(doctor::Arguments),
    /// Check and explain the configuration of gateways and workers.
    #[command(subcommand)]
    Config(config::Command),
    /// Print the completions of a shell.
    Completions(completions::Arguments),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let done = match files::arguments() {
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

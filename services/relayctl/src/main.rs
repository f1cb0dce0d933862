//! `relayctl`: what an operator does to an engine from a terminal.

mod migrate;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "relayctl", version, about = "Operate a Relay engine", arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Bring the database schema up to date. Safe to run again, and while an older version is running.
    Migrate(migrate::Arguments),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Migrate(arguments) => migrate::run(arguments).await,
    }
}

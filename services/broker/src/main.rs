//! `agent-relay-broker`: the node of one machine. It hosts command-line agents in terminals, types the messages of the
//! engine into them, and tells the engine what is known to have arrived.
//!
//! A message goes from the node socket (`engine_link`) into its agent's mailbox (`mailbox`), from there to the agent's
//! task (`agents`), which feeds the pure pipeline (`injection`) and performs its effects on the terminal; the outcome
//! goes through the ledger (`state`) back to the engine. Drivers use the listen API (`api`) and its events (`events`).

mod agents;
mod api;
mod cli;
mod clock;
mod commands;
#[cfg(test)]
#[path = "../../../crates/verification/tests/fuzz/edits.rs"]
mod edits;
mod engine;
mod engine_link;
mod events;
mod harness;
mod injection;
mod insight;
mod invocations;
mod lease;
mod linux;
mod mailbox;
mod metric_help;
mod metric_names;
mod process_group;
mod restore;
mod runner;
mod startup;
mod state;
mod unreadable_json;
mod version;

use std::{
    io::{self, Write},
    process::ExitCode,
    sync::mpsc::sync_channel,
    thread,
    time::Duration,
};

use clap::Parser as _;

use cli::{Cli, Command};

/// A line for the terminal is given up after this time.
const LINE_TIMEOUT: Duration = Duration::from_secs(1);

#[tokio::main]
async fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Init(settings) => startup::run(*settings).await,
        Command::DumpPty(arguments) => commands::dump_pty(arguments).await,
        Command::Ack(arguments) => commands::ack(&arguments),
        Command::Mcp => commands::mcp().await,
        Command::McpArgs(arguments) => commands::mcp_args(*arguments),
        Command::Verification(arguments) => commands::verification(arguments).await,
        Command::Verify => commands::verify(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The last line of stderr is shown to the person who started it.
            print_line(io::stderr(), format!("agent-relay-broker: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Writes a line to a stream that may be closed or full: neither stops the broker.
fn print_line(mut stream: impl Write + Send + 'static, line: String) {
    let (written, wait) = sync_channel(1);
    // A plain thread: a write to a full pipe never returns, and the runtime would wait at the exit for a blocking task
    // of its own. Only the wait is bounded; the thread ends with the process.
    let writer = thread::Builder::new().name("print-line".to_owned()).spawn(move || {
        let _ = writeln!(stream, "{line}").and_then(|()| stream.flush());
        let _ = written.send(());
    });
    if writer.is_ok() {
        let _ = wait.recv_timeout(LINE_TIMEOUT);
    }
}

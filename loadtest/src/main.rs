//! `relay-loadtest`: starts a private engine, measures it under load, and measures the bare servers for comparison.
//!
//! It uses the engine as clients do, over HTTP and WebSockets, never writes to the engine's database or streams, and
//! stops every process that it started.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool")]

mod api;
mod baseline;
mod batches;
mod cli;
mod collector;
mod drive;
mod endpoint;
mod fleet;
mod http;
mod inbox;
mod invoker;
mod observer;
mod payload;
mod posts;
mod report;
mod scenario;
mod socket;
mod stats;
mod table;
mod target;
mod usage;
mod window;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::Cli;
use crate::report::Report;

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    let mut report = Report::new(std::env::args().skip(1).collect());
    let ended = bounded(&cli, &mut report).await;
    if cli.common.small {
        // The targets apply to full-sized runs.
        report.ratios.clear();
    }
    if !report.rows.is_empty() {
        println!("\n{}", report.render());
    }
    let written = write_json(&cli, &report);
    let mut code = ExitCode::SUCCESS;
    for error in [ended, written].into_iter().filter_map(Result::err) {
        eprintln!("relay-loadtest: {error:#}");
        code = ExitCode::FAILURE;
    }
    if report.has_problems() { ExitCode::FAILURE } else { code }
}

/// Runs the scenario until it ends, its time limit expires or a signal arrives; dropping the future stops the stack.
async fn bounded(cli: &Cli, report: &mut Report) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let limit = Duration::from_secs(cli.common.limit);
    tokio::select! {
        ended = scenario::run(&cli.scenario, &cli.common, report) => ended,
        () = tokio::time::sleep(limit) => bail!("gave up after {limit:?} (--limit)"),
        _ = tokio::signal::ctrl_c() => bail!("interrupted"),
        _ = terminate.recv() => bail!("terminated"),
    }
}

fn write_json(cli: &Cli, report: &Report) -> Result<()> {
    let Some(path) = &cli.common.json else {
        return Ok(());
    };
    let json = serde_json::to_string_pretty(report)?;
    std::fs::write(path, json + "\n").with_context(|| format!("write {}", path.display()))
}

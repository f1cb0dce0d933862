//! `cargo xtask test`: builds the engine, starts one for the tests to share, runs them all.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use relay_stack::binaries::BIN_DIR_VARIABLE;
use relay_stack::stack::Stack;

use crate::cargo;

/// Two cores are the least we expect; a test with its own stack runs six processes.
const TEST_THREADS: &str = "2";

#[derive(clap::Args, Default)]
pub(crate) struct Args {
    /// Passed on to `cargo nextest run` (or `cargo test` where nextest is not installed).
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) runner_args: Vec<String>,
    /// The nextest profile.
    #[arg(skip)]
    pub(crate) profile: Option<&'static str>,
    /// Environment for the tests.
    #[arg(skip)]
    pub(crate) env: Vec<(&'static str, String)>,
}

impl Args {
    fn names_packages(&self) -> bool {
        let selects = |arg: &String| arg.starts_with("-p") || arg.starts_with("--package");
        self.runner_args.iter().any(selects)
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let bin_dir = build(args)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    println!("starting the engine that the tests share");
    let stack = runtime
        .block_on(Stack::builder().gateways(2).bin_dir(&bin_dir).start())
        .context("start the engine for the tests")?;
    let gateways: Vec<&str> = stack.gateways().iter().map(|gateway| gateway.url()).collect();
    let mut command = runner(args);
    command
        .env("RELAY_TEST_GATEWAYS", gateways.join(","))
        .env("RELAY_TEST_DATABASE_URL", stack.database_url())
        .env("RELAY_TEST_NATS_URL", stack.nats_url())
        .env(BIN_DIR_VARIABLE, &bin_dir)
        .envs(args.env.iter().map(|(name, value)| (name, value)));
    let outcome = cargo::run(&mut command);
    if outcome.is_err() {
        eprintln!("the shared engine's logs end:\n{}", stack.logs(20));
    }
    outcome
}

/// Builds the engine, and with it all tests if all are to run: in one go, so that both get the same features and
/// nothing is compiled twice.
fn build(args: &Args) -> Result<PathBuf> {
    if args.names_packages() || std::env::var_os(BIN_DIR_VARIABLE).is_some() {
        return cargo::built_for_tests();
    }
    let bin_dir = cargo::bin_dir(false)?;
    cargo::run(&mut cargo::cargo(&["build", "--workspace", "--bins", "--tests"]))?;
    Ok(bin_dir)
}

fn runner(args: &Args) -> Command {
    let nextest = nextest_is_installed();
    let mut command = cargo::cargo(if nextest { &["nextest", "run"] } else { &["test"] });
    if !args.names_packages() {
        command.arg("--workspace");
    }
    match (nextest, args.profile) {
        (true, Some(profile)) => {
            command.args(["--profile", profile]);
        }
        (true, None) => {}
        (false, _) => {
            command.arg("--no-fail-fast");
            if std::env::var_os("RUST_TEST_THREADS").is_none() {
                command.env("RUST_TEST_THREADS", TEST_THREADS);
            }
        }
    }
    command.args(&args.runner_args);
    command
}

fn nextest_is_installed() -> bool {
    let mut probe = cargo::cargo(&["nextest", "--version"]);
    probe.stdout(Stdio::null()).stderr(Stdio::null());
    probe.status().is_ok_and(|status| status.success())
}

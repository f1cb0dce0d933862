//! Running cargo, and where it puts things.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use relay_stack::binaries::BIN_DIR_VARIABLE;

/// The packages whose binaries make up the engine.
pub(crate) const ENGINE_PACKAGES: [&str; 3] = ["relay-gateway", "relay-worker", "relayctl"];

/// The repository's root, from where cargo set it for this run.
pub(crate) fn root() -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let own = manifest.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")));
    own.ancestors().nth(2).map(PathBuf::from).unwrap_or_default()
}

/// The folder that holds the binaries of a profile. Ask before building: a build replaces the running xtask, and
/// the kernel then no longer knows its path.
pub(crate) fn bin_dir(release: bool) -> Result<PathBuf> {
    let own = std::env::current_exe().context("find the running xtask")?;
    let debug = own.parent().context("xtask lies in no folder")?;
    let target = debug.parent().context("xtask lies in no target folder")?;
    Ok(if release { target.join("release") } else { debug.to_owned() })
}

/// `cargo <args>` in the repository's root.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.args(args).current_dir(root()).stdin(Stdio::null());
    // What cargo tells about xtask's own package must not reach the build of others.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
            command.env_remove(name);
        }
    }
    command
}

/// Runs a command with its output on the terminal; its failure is an error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("run {}", command.get_program().display()))?;
    if !status.success() {
        let args: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy()).collect();
        bail!("cargo {} ended with {status}", args.join(" "));
    }
    Ok(())
}

/// The folder with the engine's binaries, built now unless `RELAY_BIN_DIR` names ready ones.
pub(crate) fn built_engine(release: bool) -> Result<PathBuf> {
    built_packages(release, ENGINE_PACKAGES.iter())
}

/// The folder with the binaries that tests start: the engine's, the broker, and the fake agent.
pub(crate) fn built_for_tests() -> Result<PathBuf> {
    built_packages(false, ENGINE_PACKAGES.iter().chain(&["relay-broker", "relay-testkit"]))
}

/// The folder with the broker.
pub(crate) fn built_broker(release: bool) -> Result<PathBuf> {
    built_packages(release, ["relay-broker"].iter())
}

/// The folder with the broker and the program that plays agents.
pub(crate) fn built_node() -> Result<PathBuf> {
    built_packages(false, ["relay-broker", "relay-testkit"].iter())
}

fn built_packages<'a>(release: bool, packages: impl Iterator<Item = &'a &'a str>) -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os(BIN_DIR_VARIABLE) {
        // Tests run in the folders of their packages.
        return std::path::absolute(dir).context("find the folder of the binaries");
    }
    let bin_dir = bin_dir(release)?;
    println!("building (the first time takes minutes)");
    let mut command = cargo(&["build", "--bins"]);
    for package in packages {
        command.args(["--package", package]);
    }
    if release {
        command.arg("--release");
    }
    run(&mut command)?;
    Ok(bin_dir)
}

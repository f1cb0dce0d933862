//! `cargo xtask upgrade`: this version beside the one before it, under load. The one before is built from its commit,
//! in a folder of its own; that takes as long as a first build does, so CI only checks the migrations (`tidy`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use relay_stack::binaries;

use crate::{cargo, test};

/// Names the commit of the version before this one; lines that begin with `#` are comments.
const RECORD: &str = "deploy/previous-version";
/// Tells the test where that version's binaries are; set before, nothing is built.
const VARIABLE: &str = "RELAY_PREVIOUS_BIN_DIR";
/// The test that needs them.
const TEST: &str = "an_upgrade_from_the_previous_version_loses_nothing";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A commit or tag to upgrade from, instead of the recorded one.
    #[arg(long)]
    from: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let previous = match std::env::var_os(VARIABLE) {
        Some(dir) => PathBuf::from(dir),
        None => build(args)?,
    };
    println!("the version before: {}", version(&previous)?);
    let previous = previous.to_str().context("a folder whose name is not UTF-8")?.to_owned();
    test::run(&test::Args {
        runner_args: vec![TEST.to_owned()],
        profile: None,
        // The runner shows what a test says only when it fails, unless told otherwise.
        env: vec![(VARIABLE, previous), ("NEXTEST_SUCCESS_OUTPUT", "immediate".to_owned())],
    })
}

/// Builds the commit in a worktree below the target folder, which keeps what was compiled for the next time.
fn build(args: &Args) -> Result<PathBuf> {
    let commit = match &args.from {
        Some(commit) => commit.clone(),
        None => recorded(&fs::read_to_string(cargo::root().join(RECORD))?)?,
    };
    let dir = cargo::bin_dir(false)?.parent().context("the build folder lies nowhere")?.join("upgrade");
    let (source, target) = (dir.join("source"), dir.join("target"));
    fs::create_dir_all(&dir)?;
    // A run that was killed may have left a worktree of another commit.
    forget(&source)?;
    git(&["worktree", "add", "--quiet", "--force", "--detach"], &[source.as_os_str(), commit.as_ref()])
        .with_context(|| format!("check out {commit}; a shallow clone lacks it: git fetch --unshallow"))?;
    println!("building {commit} (the first time takes minutes)");
    let mut build = cargo::cargo(&["build", "--locked"]);
    for package in cargo::ENGINE_PACKAGES {
        build.args(["--package", package]);
    }
    let built = cargo::run(build.current_dir(&source).env("CARGO_TARGET_DIR", &target));
    // Also after a failed build, whose error is returned afterwards.
    forget(&source)?;
    built?;
    Ok(target.join("debug"))
}

/// Removes the worktree, if there is one.
fn forget(source: &Path) -> Result<()> {
    if source.exists() {
        git(&["worktree", "remove", "--force"], &[source.as_os_str()])?;
    }
    Ok(())
}

fn git(args: &[&str], paths: &[&std::ffi::OsStr]) -> Result<()> {
    let mut command = Command::new("git");
    command.args(["-c", "safe.directory=*"]).args(args).args(paths).current_dir(cargo::root()).stdin(Stdio::null());
    let status = command.status().context("run git")?;
    ensure!(status.success(), "git {} ended with {status}", args.join(" "));
    Ok(())
}

fn recorded(text: &str) -> Result<String> {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    Ok(lines.next().with_context(|| format!("{RECORD} names no commit"))?.to_owned())
}

fn version(bin_dir: &Path) -> Result<String> {
    let gateway = binaries::find(bin_dir, "relay-gateway")?;
    let output =
        Command::new(&gateway).arg("--version").output().with_context(|| format!("run {}", gateway.display()))?;
    Ok(format!("{} in {}", String::from_utf8_lossy(&output.stdout).trim(), bin_dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_is_recorded() {
        assert_eq!(recorded("# why\n\nabc\n").unwrap(), "abc");
        assert!(recorded("# nothing\n").is_err());
        let record = fs::read_to_string(cargo::root().join(RECORD)).unwrap();
        assert!(recorded(&record).unwrap().bytes().all(|byte| byte.is_ascii_hexdigit()));
    }
}

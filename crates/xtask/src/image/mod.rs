//! `cargo xtask image`: the container image, from binaries that were just built. `cargo xtask smoke` runs it.

mod probe;
pub(crate) mod smoke;
mod storage;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cargo;

pub(crate) use storage::Storage;

/// The time that everything in the image carries, unless SOURCE_DATE_EPOCH says another: the image depends on its content only.
const EPOCH: &str = "1700000000";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Name and tag inside the archive.
    #[arg(long, default_value = "localhost/relay:dev")]
    tag: String,
    /// Where the archive is written. `podman load` and `docker load` read it.
    #[arg(long, default_value = "relay-image.tar")]
    archive: PathBuf,
    /// Without optimisation: for trying out, and several times as large.
    #[arg(long)]
    debug: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let binaries = cargo::built_engine(!args.debug)?;
    let storage = Storage::new()?;
    let id = build(&storage, &binaries, &args.tag)?;
    let target = format!("docker-archive:{}:{}", std::path::absolute(&args.archive)?.display(), args.tag);
    if args.archive.exists() {
        std::fs::remove_file(&args.archive)?;
    }
    storage::run(storage.buildah().args(["push", "--quiet", &args.tag, &target]))?;
    println!("wrote {} ({}, {id})", args.archive.display(), args.tag);
    Ok(())
}

/// Builds the image from the folder of binaries and returns its id.
pub(super) fn build(storage: &Storage, binaries: &Path, tag: &str) -> Result<String> {
    let root = gather(storage, binaries)?;
    let mut bud = storage.buildah();
    bud.args(["bud", "--quiet", "--isolation", "chroot", "--timestamp", &epoch(), "--tag", tag, "--file"]);
    let printed = storage::run(bud.arg(cargo::root().join("deploy/Containerfile")).arg(&root))?;
    let id = printed.lines().last().context("buildah named no image")?.trim().to_owned();
    std::fs::remove_dir_all(&root)?;
    Ok(id)
}

/// The folder of everything that goes into the image. The programs have run on it.
fn gather(storage: &Storage, binaries: &Path) -> Result<PathBuf> {
    let root = storage.fresh_dir("rootfs");
    let mut script = Command::new(cargo::root().join("deploy/rootfs.sh"));
    storage::run(script.arg(binaries).arg(&root).env("SOURCE_DATE_EPOCH", epoch()))?;
    runs_by_itself(&root)?;
    Ok(root)
}

fn epoch() -> String {
    std::env::var("SOURCE_DATE_EPOCH").unwrap_or_else(|_| EPOCH.to_owned())
}

/// Whether the gathered files are enough for the programs, whatever containers can do here. Root only: it changes its root.
fn runs_by_itself(root: &Path) -> Result<()> {
    for program in ["relay-gateway", "relay-worker", "relayctl"] {
        let output = Command::new("chroot").arg(root).arg(format!("/usr/bin/{program}")).arg("--version").output()?;
        let refused = String::from_utf8_lossy(&output.stderr).contains("Operation not permitted");
        ensure!(
            output.status.success() || refused,
            "{program} does not run on the gathered files: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}

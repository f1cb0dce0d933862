//! `cargo xtask image`: the container image, from binaries that were just built. `cargo xtask smoke` runs it.

mod probe;
pub(crate) mod smoke;
mod storage;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cargo;

pub(crate) use storage::Storage;

/// The time that everything in the image carries, unless SOURCE_DATE_EPOCH says another: the image depends on its
/// content only.
const EPOCH: &str = "1700000000";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Builds the image of a node, with the broker, in place of the engine's.
    #[arg(long)]
    node: bool,
    /// Name and tag inside the archive. Default: `localhost/relay:dev` or `localhost/relay-node:dev`.
    #[arg(long)]
    tag: Option<String>,
    /// File that the archive is written to. `podman load` and `docker load` read it. Default: `relay-image.tar` or
    /// `relay-node-image.tar`.
    #[arg(long)]
    archive: Option<PathBuf>,
    /// Without optimisation: for trying out, and several times as large.
    #[arg(long)]
    debug: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let name = if args.node { "relay-node" } else { "relay" };
    let tag = args.tag.clone().unwrap_or_else(|| format!("localhost/{name}:dev"));
    let archive = args.archive.clone().unwrap_or_else(|| format!("{name}-image.tar").into());
    let binaries = if args.node { cargo::built_broker(!args.debug)? } else { cargo::built_engine(!args.debug)? };
    let storage = Storage::new()?;
    let id = if args.node { build_node(&storage, &binaries, &tag)? } else { build(&storage, &binaries, &tag)? };
    let target = format!("docker-archive:{}:{tag}", std::path::absolute(&archive)?.display());
    if archive.exists() {
        std::fs::remove_file(&archive)?;
    }
    storage::run(storage.buildah().args(["push", "--quiet", &tag, &target]))?;
    println!("wrote {} ({tag}, {id})", archive.display());
    Ok(())
}

/// Builds the image of a node and returns its id. Needs debootstrap.
fn build_node(storage: &Storage, binaries: &Path, tag: &str) -> Result<String> {
    let root = storage.fresh_dir("node-rootfs");
    let mut script = Command::new(cargo::root().join("deploy/node/rootfs.sh"));
    storage::run(script.arg(binaries).arg(&root).env("SOURCE_DATE_EPOCH", epoch()))?;
    commit(storage, &root, "deploy/node/Containerfile", tag)
}

/// Builds the image from the folder of binaries and returns its id.
pub(super) fn build(storage: &Storage, binaries: &Path, tag: &str) -> Result<String> {
    commit(storage, &gather(storage, binaries)?, "deploy/Containerfile", tag)
}

/// Makes an image of a folder, and removes the folder.
fn commit(storage: &Storage, root: &Path, containerfile: &str, tag: &str) -> Result<String> {
    let mut bud = storage.buildah();
    bud.args(["bud", "--quiet", "--isolation", "chroot", "--timestamp", &epoch(), "--tag", tag, "--file"]);
    let printed = storage::run(bud.arg(cargo::root().join(containerfile)).arg(root))?;
    let id = printed.lines().last().context("buildah named no image")?.trim().to_owned();
    std::fs::remove_dir_all(root)?;
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

/// Checks that the programs run with the gathered files only, also where containers cannot run. Needs root, since it
/// changes its root.
fn runs_by_itself(root: &Path) -> Result<()> {
    for program in ["relay-gateway", "relay-worker", "relayctl"] {
        let output = Command::new("chroot").arg(root).arg(format!("/usr/bin/{program}")).arg("--version").output()?;
        // Without the right to change its root, this run says nothing about the program.
        let refused = String::from_utf8_lossy(&output.stderr).contains("Operation not permitted");
        ensure!(
            output.status.success() || refused,
            "{program} does not run on the gathered files: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}

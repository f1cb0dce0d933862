//! Location of the engine's binaries.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Overrides the folder of `relay-gateway`, `relay-worker` and `relayctl`.
pub const BIN_DIR_VARIABLE: &str = "RELAY_BIN_DIR";

/// Returns the folder with the engine's binaries: `RELAY_BIN_DIR`, else the `debug` or `release` folder that the
/// running executable was built into.
pub fn directory() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os(BIN_DIR_VARIABLE) {
        return Ok(dir.into());
    }
    let exe = std::env::current_exe().context("find the running executable")?;
    let built = |dir: &&Path| dir.ends_with("debug") || dir.ends_with("release");
    match exe.ancestors().skip(1).find(built) {
        Some(dir) => Ok(dir.to_owned()),
        None => {
            bail!("{} lies in no debug or release folder; set {BIN_DIR_VARIABLE}", exe.display())
        }
    }
}

/// Returns the path of one binary in `dir`.
pub fn find(dir: &Path, name: &str) -> Result<PathBuf> {
    let path = dir.join(name);
    if !path.is_file() {
        bail!(
            "{} is missing: build it first (`cargo xtask test` and `cargo xtask dev` do, or `cargo build`)",
            path.display()
        );
    }
    Ok(path)
}

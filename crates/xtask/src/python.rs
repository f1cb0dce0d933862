//! Pinned Python packages for checks that are written in Python: installed once into the build folder.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::cargo;

/// Of the chart's tests and tools.
const REQUIREMENTS: &str = "helm/tests/requirements.txt";
/// List of the installed packages with their versions, written last.
const MARKER: &str = "installed.txt";

/// The packages that the chart's tests and tools need.
pub(crate) struct Packages {
    dir: PathBuf,
}

impl Packages {
    /// Installs them if they are not there yet. Ask before building: see [`cargo::bin_dir`].
    pub(crate) fn installed() -> Result<Self> {
        let requirements = cargo::root().join(REQUIREMENTS);
        let version = Command::new("python3").arg("--version").output().context("run python3")?;
        let pins = format!("{}{}", String::from_utf8_lossy(&version.stdout), fs::read_to_string(&requirements)?);
        let dir = cargo::bin_dir(false)?.join("python").join("chart");
        if fs::read_to_string(dir.join(MARKER)).is_ok_and(|installed| installed == pins) {
            return Ok(Self { dir });
        }
        if dir.exists() {
            fs::remove_dir_all(&dir)?;
        }
        fs::create_dir_all(&dir)?;
        println!("installing the packages of {REQUIREMENTS} into {}", dir.display());
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]);
        pip.arg("--target").arg(&dir).arg("--requirement").arg(&requirements).stdin(Stdio::null());
        let status = pip.status().context("run pip")?;
        ensure!(status.success(), "pip could not install the packages of {REQUIREMENTS} ({status})");
        fs::write(dir.join(MARKER), pins)?;
        Ok(Self { dir })
    }

    /// `python3 <args>` in the repository's root, with the packages.
    pub(crate) fn python(&self, args: &[&str]) -> Command {
        let mut python = Command::new("python3");
        python.args(args).current_dir(cargo::root()).stdin(Stdio::null());
        python.env("PYTHONPATH", &self.dir).env("PYTHONDONTWRITEBYTECODE", "1");
        python
    }
}

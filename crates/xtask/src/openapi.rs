//! `cargo xtask openapi`: writes the OpenAPI document into `docs/`. A test of the gateway checks that it is current.

use std::fs;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};

use crate::cargo;

pub(crate) fn run() -> Result<()> {
    let mut print = cargo::cargo(&["run", "--quiet", "--package", "relay-gateway", "--example", "openapi"]);
    let output = print.stderr(Stdio::inherit()).output().context("run cargo")?;
    ensure!(output.status.success(), "the document could not be made: {}", output.status);
    let path = cargo::root().join("docs/openapi.json");
    fs::write(&path, output.stdout).with_context(|| format!("write {}", path.display()))?;
    println!("wrote {}", path.display());
    Ok(())
}

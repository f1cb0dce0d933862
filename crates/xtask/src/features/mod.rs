//! `cargo xtask features`: writes the manifest of `crates/workspace-hack`, so that every selection of packages resolves
//! the same features and no dependency is compiled twice. `cargo xtask tidy` checks that this still holds.

mod manifest;
mod survey;

use std::fs;

use anyhow::{Result, ensure};

use crate::cargo;
use survey::{Origins, Survey};

const MANIFEST: &str = "crates/workspace-hack/Cargo.toml";
/// A feature that is added can bring in packages with further features.
const ROUNDS: usize = 5;

/// Begins with an empty manifest, so that entries that are no longer needed go.
pub(crate) fn run() -> Result<()> {
    let path = cargo::root().join(MANIFEST);
    let before = fs::read_to_string(&path)?;
    fs::write(&path, manifest::empty())?;
    let generated = generate(&path);
    if generated.is_err() {
        fs::write(&path, before)?;
    }
    println!("{} packages are listed in {MANIFEST}", generated?);
    Ok(())
}

fn generate(path: &std::path::Path) -> Result<usize> {
    // Who uses a package is seen best before the manifest lists any.
    let mut origins = Origins::of_workspace()?;
    let mut survey = Survey::of_workspace()?;
    let mut varying = survey.varying();
    let mut listed = varying.clone();
    for _ in 0..ROUNDS {
        fs::write(path, manifest::listing(&listed, &survey, &origins))?;
        survey = Survey::of_workspace()?;
        varying = survey.varying();
        if varying.is_empty() {
            return Ok(listed.len());
        }
        // One that varies although it is listed was brought in by a feature, where nothing had used it before.
        varying.intersection(&listed).for_each(|package| origins.add_everywhere(package));
        listed.extend(varying.iter().cloned());
    }
    anyhow::bail!("features still vary after {ROUNDS} rounds: {varying:?}")
}

/// Reports packages that are compiled with different features, depending on what is built.
pub(crate) fn check(findings: &mut Vec<String>) -> Result<()> {
    let survey = Survey::of_workspace()?;
    ensure!(!survey.is_empty(), "cargo tree named no package");
    for package in survey.varying() {
        findings.push(format!("{MANIFEST}: {package} is built with different features; run `cargo xtask features`"));
    }
    Ok(())
}

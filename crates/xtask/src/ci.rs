//! `cargo xtask ci`: the checks of CI, cheapest first.

use std::time::Instant;

use anyhow::{Context, Result};

use crate::python::Packages;
use crate::{cargo, chart, image, test, tidy};

pub(crate) fn run() -> Result<()> {
    // Before anything is built, which may replace the running xtask.
    let packages = Packages::installed()?;
    let bin_dir = cargo::bin_dir(false)?;
    step("fmt", || cargo::run(&mut cargo::cargo(&["fmt", "--all", "--check"])))?;
    step("tidy", tidy::run)?;
    step("chart", || chart::check(&packages, &chart::Args::default()))?;
    step("clippy", || {
        let args = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
        cargo::run(&mut cargo::cargo(&args))
    })?;
    step("doc", || {
        let mut doc = cargo::cargo(&["doc", "--workspace", "--no-deps"]);
        cargo::run(doc.env("RUSTDOCFLAGS", "-D warnings"))
    })?;
    step("test", || test::run(&test::Args::default()))?;
    // With the binaries that were just tested.
    step("smoke", || image::smoke::check(&packages, &bin_dir))
}

fn step(name: &str, check: impl FnOnce() -> Result<()>) -> Result<()> {
    println!("== {name}");
    let started = Instant::now();
    check().with_context(|| format!("{name} failed"))?;
    println!("== {name}: ok in {:.0?}", started.elapsed());
    Ok(())
}

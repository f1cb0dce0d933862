//! `cargo xtask ci`: the checks of CI, cheapest first.

use std::time::Instant;

use anyhow::{Context, Result};

use crate::{cargo, test, tidy};

pub(crate) fn run() -> Result<()> {
    step("fmt", || cargo::run(&mut cargo::cargo(&["fmt", "--all", "--check"])))?;
    step("tidy", tidy::run)?;
    step("clippy", || {
        let args = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
        cargo::run(&mut cargo::cargo(&args))
    })?;
    step("doc", || {
        let mut doc = cargo::cargo(&["doc", "--workspace", "--no-deps"]);
        cargo::run(doc.env("RUSTDOCFLAGS", "-D warnings"))
    })?;
    step("test", || test::run(&test::Args::default()))
}

fn step(name: &str, check: impl FnOnce() -> Result<()>) -> Result<()> {
    println!("== {name}");
    let started = Instant::now();
    check().with_context(|| format!("{name} failed"))?;
    println!("== {name}: ok in {:.0?}", started.elapsed());
    Ok(())
}

//! `cargo xtask tidy`: the rules of docs/ and style that a machine can check. Each failure says where and why.

mod boundaries;
mod dependencies;
mod folders;
mod length;
mod migrations;
mod names;
mod packages;
mod paths;
mod references;
mod state_codes;
mod unused;

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{cargo, features};

/// A file of the repository: its path from the root, and its text.
struct Source {
    path: String,
    text: String,
}

pub(crate) fn run() -> Result<()> {
    let sources = sources(&cargo::root())?;
    let mut findings = Vec::new();
    let checks = [
        boundaries::check,
        dependencies::check,
        folders::check,
        length::check,
        migrations::check,
        names::check,
        paths::check,
        references::check,
        state_codes::check,
        unused::check,
    ];
    for check in checks {
        check(&sources, &mut findings);
    }
    packages::check(&sources, &mut findings)?;
    features::check(&mut findings)?;
    for finding in &findings {
        eprintln!("tidy: {finding}");
    }
    if !findings.is_empty() {
        bail!("{} findings", findings.len());
    }
    println!("tidy: {} files are fine", sources.len());
    Ok(())
}

/// Every text file that is tracked, or new and not ignored.
fn sources(root: &Path) -> Result<Vec<Source>> {
    // CI may run as another user than the one who cloned; listing files is safe all the same.
    let output = Command::new("git")
        .args(["-c", "safe.directory=*"])
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
        .current_dir(root)
        .output()
        .context("run git")?;
    if !output.status.success() {
        bail!("git ls-files failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    let listed = String::from_utf8(output.stdout).context("a path that is not UTF-8")?;
    let files = listed.split('\0').filter(|path| !path.is_empty());
    // Unreadable as text: binary, or deleted but still tracked.
    let read = |path: &str| std::fs::read_to_string(root.join(path)).ok();
    Ok(files.filter_map(|path| Some(Source { path: path.to_owned(), text: read(path)? })).collect())
}

impl Source {
    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// [`Self::code_lines`] up to the unit tests, which end a file.
    fn production_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.code_lines().take_while(|(_, line)| !line.starts_with("#[cfg(test)]"))
    }

    /// Lines of code with their numbers; lines that are only a comment are left out.
    fn code_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let numbered = self.text.lines().enumerate().map(|(index, line)| (index + 1, line));
        numbered.filter(|(_, line)| !line.trim_start().starts_with("//"))
    }
}

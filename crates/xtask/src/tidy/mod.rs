//! `cargo xtask tidy`: the rules of docs/ and style that a machine can check. Each failure says where and why.
//!
//! Other checks compare each generated file with its source, because that takes a build or a server:
//!
//! | file | compared by |
//! |---|---|
//! | `docs/openapi.json` | unit test of the gateway (`openapi/mod.rs`) |
//! | `docs/schema.md` | `crates/store/tests/schema/` |
//! | commands in `docs/operations/relayctl.md` and other pages | unit test of relayctl (`docs.rs`) |
//! | snapshots, dashboards and table of values of the chart | `cargo xtask chart` (`helm/tests/`) |
//! | `crates/workspace-hack/Cargo.toml` | [`features::check`], which runs here |

mod boundaries;
mod cycles;
mod dependencies;
mod folders;
mod generated;
mod identifiers;
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
        cycles::check,
        dependencies::check,
        folders::check,
        generated::check,
        identifiers::check,
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

    /// The whole file is a module of unit tests.
    fn is_test_module(&self) -> bool {
        self.path.ends_with("tests.rs") || self.path.contains("_tests/")
    }

    /// [`Self::code_lines`] without modules of unit tests: one line if they are in another file, otherwise up to the
    /// brace that closes them.
    fn production_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let (mut is_attributed, mut is_within) = (false, false);
        self.code_lines().filter(move |(_, line)| {
            if is_within {
                // rustfmt indents everything inside, so that the first brace without indentation closes the module.
                is_within = *line != "}";
                return false;
            }
            if is_attributed {
                is_attributed = line.starts_with("#[");
                is_within = line.ends_with('{');
                return false;
            }
            is_attributed = line.starts_with("#[cfg(test)]");
            !is_attributed
        })
    }

    /// Lines of code with their numbers; lines that are only a comment are left out.
    fn code_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let numbered = self.text.lines().enumerate().map(|(index, line)| (index + 1, line));
        numbered.filter(|(_, line)| !line.trim_start().starts_with("//"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_item_behind_cfg_test_is_left_out() {
        let text = "mod a;\n#[cfg(test)]\n#[path = \"x.rs\"]\nmod tests;\nfn b() {}\n#[cfg(test)]\nmod more {\n    \
                    fn c() {\n    }\n}\nfn d() {}\n";
        let source = Source { path: "a.rs".into(), text: text.into() };
        assert_eq!(
            source.production_lines().map(|(_, line)| line).collect::<Vec<_>>(),
            ["mod a;", "fn b() {}", "fn d() {}"]
        );
    }
}

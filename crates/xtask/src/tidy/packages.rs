//! Packages in `Cargo.lock` come from crates.io under a license that `deny.toml` allows, and none of them is banned
//! there.
//!
//! `cargo deny check bans licenses sources` judges the same lists more thoroughly; building it takes longer than all
//! other static checks, so CI does without it.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::Source;
use crate::cargo;

const RULES: &str = "deny.toml";
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    license: Option<String>,
    /// Absent for members of the workspace.
    source: Option<String>,
}

pub(super) fn check(sources: &[Source], findings: &mut Vec<String>) -> Result<()> {
    let rules = sources.iter().find(|source| source.path == RULES).context("deny.toml is missing")?;
    let rules = Rules::parse(&rules.text)?;
    let mut command = cargo::cargo(&["metadata", "--format-version", "1", "--locked"]);
    let output = command.stderr(Stdio::inherit()).output().context("run cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata ended with {}", output.status);
    let metadata: Metadata = serde_json::from_slice(&output.stdout)?;
    findings.extend(metadata.packages.iter().filter_map(|package| rules.violation(package)));
    Ok(())
}

struct Rules<'a> {
    licenses: Vec<&'a str>,
    banned: Vec<&'a str>,
}

impl<'a> Rules<'a> {
    /// Reads `licenses.allow`, one license a line, and `bans.deny`, one crate a line.
    fn parse(text: &'a str) -> Result<Self> {
        let quoted = |line: &'a str| line.split('"').nth(1);
        let (_, licenses) = text.split_once("[licenses]").context("deny.toml has no [licenses]")?;
        let (licenses, rest) = licenses.split_once("\n]").context("deny.toml allows no license")?;
        let licenses: Vec<_> = licenses.lines().filter_map(quoted).collect();
        let banned: Vec<_> = rest.lines().filter(|line| line.contains("{ crate =")).filter_map(quoted).collect();
        ensure!(!licenses.is_empty() && !banned.is_empty(), "deny.toml lists no license or no banned crate");
        Ok(Self { licenses, banned })
    }

    fn violation(&self, package: &Package) -> Option<String> {
        let source = package.source.as_deref()?;
        let name = &package.name;
        if source != REGISTRY {
            return Some(format!("Cargo.lock: {name} comes from {source}"));
        }
        if self.banned.contains(&name.as_str()) {
            return Some(format!("Cargo.lock: {name} is banned in {RULES}"));
        }
        let license = package.license.as_deref().unwrap_or_default();
        (!self.allows(license)).then(|| format!("Cargo.lock: the license of {name}, {license:?}, is not in {RULES}"))
    }

    /// Evaluates an SPDX expression without nested parentheses; the slash is its old form of `OR`.
    fn allows(&self, license: &str) -> bool {
        license.split(" AND ").all(|alternatives| {
            let mut alternatives = alternatives.split(" OR ").flat_map(|license| license.split('/'));
            alternatives.any(|license| self.licenses.contains(&license.trim_matches(['(', ')', ' '])))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licenses_sources_and_banned_crates_are_checked() -> Result<()> {
        let rules = Rules::parse(
            "[licenses]\nallow = [\n  \"MIT\",\n  \"ISC\",\n]\n[bans]\ndeny = [\n  { crate = \"bad\", reason = \"x\" },\n]\n",
        )?;
        let finding = |name: &str, license: &str, source: &str| {
            rules.violation(&Package {
                name: name.to_owned(),
                license: Some(license.to_owned()),
                source: Some(source.to_owned()),
            })
        };
        for license in ["MIT", "GPL-3.0 OR MIT", "Apache-2.0/MIT", "(MIT OR GPL-3.0) AND ISC"] {
            assert_eq!(finding("good", license, REGISTRY), None, "{license}");
        }
        for license in ["", "GPL-3.0", "MIT AND GPL-3.0"] {
            assert!(finding("good", license, REGISTRY).is_some_and(|text| text.contains("license")), "{license}");
        }
        assert!(finding("bad", "MIT", REGISTRY).is_some_and(|text| text.contains("banned")));
        assert!(finding("good", "MIT", "git+https://example.com/x").is_some_and(|text| text.contains("comes from")));
        Ok(())
    }
}

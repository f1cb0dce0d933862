//! Dependencies as `cargo tree` reports them.

use std::fmt;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};

use crate::cargo;

/// The package that holds the union of all features; see `cargo xtask features`. It contains no code.
pub(crate) const HACK: &str = "workspace-hack";

/// Name and version of a package.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
}

impl fmt::Display for Package {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.version)
    }
}

/// A line of `cargo tree`.
pub(crate) struct Node {
    /// Below the last node before it that has a smaller one.
    pub(crate) depth: usize,
    pub(crate) package: Package,
    pub(crate) is_proc_macro: bool,
    /// True if it lies in this workspace.
    pub(crate) is_member: bool,
    pub(crate) detail: String,
}

/// Lines of `cargo tree <args>`, with one detail of each package: `{f}` gives its features, `{l}` its licence.
pub(crate) fn tree(args: &[&str], detail: &str) -> Result<Vec<Node>> {
    let format = format!("{{p}}|{detail}");
    let mut tree = cargo::cargo(&["tree", "--quiet", "--prefix", "depth", "--format", &format]);
    let output = tree.args(args).stderr(Stdio::inherit()).output().context("run cargo tree")?;
    ensure!(output.status.success(), "cargo tree {} ended with {}", args.join(" "), output.status);
    let text = String::from_utf8(output.stdout).context("cargo tree printed no UTF-8")?;
    let lines = text.lines().filter(|line| !line.is_empty());
    lines.map(|line| parse(line).with_context(|| format!("read the line {line:?} of cargo tree"))).collect()
}

/// `3tokio v1.54.1 (proc-macro)|rt,net (*)`: depth, name, version, remarks, detail, and a mark if it was printed
/// before.
fn parse(line: &str) -> Option<Node> {
    let (described, detail) = line.trim_end_matches(" (*)").split_once('|')?;
    let (depth, described) = described.split_at(described.find(|c: char| !c.is_ascii_digit())?);
    let (name, rest) = described.split_once(" v")?;
    let (version, remarks) = rest.split_once(' ').unwrap_or((rest, ""));
    Some(Node {
        depth: depth.parse().ok()?,
        package: Package { name: name.to_owned(), version: version.to_owned() },
        is_proc_macro: remarks.contains("(proc-macro)"),
        // Only members of the workspace have a path among their remarks.
        is_member: remarks.contains("(/"),
        detail: detail.to_owned(),
    })
}

/// Nodes of a tree in a few words, for tests of what reads them.
#[cfg(test)]
pub(crate) fn parsed(lines: &[&str]) -> Vec<Node> {
    lines.iter().map(|line| parse(line).unwrap()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_cargo_tree_is_read() {
        let tokio = parse("12tokio v1.54.1|net,rt (*)").unwrap();
        assert_eq!((tokio.depth, tokio.package.to_string().as_str()), (12, "tokio 1.54.1"));
        assert_eq!((tokio.detail.as_str(), tokio.is_proc_macro, tokio.is_member), ("net,rt", false, false));
        assert!(parse("4serde_derive v1.0.229 (proc-macro)|default").unwrap().is_proc_macro);
        assert!(parse("0relay-store v0.1.0 (/somewhere/crates/store)|").unwrap().is_member);
        assert!(parse("nonsense").is_none());
    }
}

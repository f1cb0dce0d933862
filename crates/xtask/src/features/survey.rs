//! The features that cargo resolves, for each selection of packages that may be built.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Stdio;
use std::sync::Mutex;

use anyhow::{Context, Result};

use crate::cargo;
use crate::tree::{self, HACK, Node, Package};

/// Platform of the engine. Other platforms have other dependencies.
const TARGET: &str = "x86_64-unknown-linux-gnu";

pub(super) type Features = BTreeSet<String>;

/// The feature sets of each package over all selections.
#[derive(Default)]
pub(super) struct Survey {
    sets: BTreeMap<Package, BTreeSet<Features>>,
}

impl Survey {
    /// Asks for the whole workspace and for each member, with and without development dependencies.
    pub(super) fn of_workspace() -> Result<Self> {
        let members = members()?;
        let selections = std::iter::once(vec!["--workspace"]).chain(members.iter().map(|name| vec!["--package", name]));
        let edges = ["normal,build", "normal,build,dev"];
        let questions: Vec<_> =
            selections.flat_map(|selection| edges.map(|edges| (selection.clone(), edges))).collect();
        let (open, survey) = (Mutex::new(questions.iter()), Mutex::new(Self::default()));
        // Each question starts cargo; two at a time keep two cores busy.
        let ask = || {
            loop {
                // A poisoned lock ends this thread; the panic of the other one is resumed below.
                let Some((selection, edges)) = open.lock().ok().and_then(|mut open| open.next()) else { return Ok(()) };
                let nodes = nodes(selection, edges, false)?;
                if let Ok(mut survey) = survey.lock() {
                    nodes.into_iter().for_each(|node| survey.add(node));
                }
            }
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(ask);
            let own: Result<()> = ask();
            own.and(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })?;
        survey.into_inner().ok().context("a thread panicked")
    }

    fn add(&mut self, node: Node) {
        if !node.is_member {
            let features = node.detail.split(',').filter(|feature| !feature.is_empty()).map(str::to_owned).collect();
            self.sets.entry(node.package).or_default().insert(features);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sets.is_empty()
    }

    /// The packages with more than one feature set.
    pub(super) fn varying(&self) -> BTreeSet<Package> {
        self.sets.iter().filter(|(_, sets)| sets.len() > 1).map(|(package, _)| package.clone()).collect()
    }

    /// Every feature of a package that any selection asks for.
    pub(super) fn union(&self, package: &Package) -> Features {
        self.sets.get(package).into_iter().flatten().flatten().cloned().collect()
    }
}

/// Packages linked into programs, and packages linked into procedural macros, which run in the compiler.
pub(super) struct Origins {
    pub(super) whole: Sides,
    /// The same for xtask, which must stay small.
    pub(super) xtask: Sides,
}

#[derive(Default)]
pub(super) struct Sides {
    pub(super) target: BTreeSet<Package>,
    pub(super) host: BTreeSet<Package>,
}

impl Origins {
    pub(super) fn of_workspace() -> Result<Self> {
        let sides = |selection: &[&str]| anyhow::Ok(Sides::from_nodes(nodes(selection, "normal", true)?));
        Ok(Self { whole: sides(&["--workspace"])?, xtask: sides(&["--package", "xtask"])? })
    }

    /// Adds a package to all sides.
    pub(super) fn add_everywhere(&mut self, package: &Package) {
        for sides in [&mut self.whole, &mut self.xtask] {
            sides.target.insert(package.clone());
            sides.host.insert(package.clone());
        }
    }
}

impl Sides {
    fn from_nodes(nodes: Vec<Node>) -> Self {
        let mut sides = Self::default();
        // For each ancestor of the current node, whether it runs in the compiler.
        let mut ancestors: Vec<bool> = Vec::new();
        for node in nodes {
            ancestors.truncate(node.depth);
            let on_host = node.is_proc_macro || ancestors.last().is_some_and(|on_host| *on_host);
            ancestors.push(on_host);
            if !node.is_member {
                if on_host { &mut sides.host } else { &mut sides.target }.insert(node.package);
            }
        }
        sides
    }
}

/// The packages that a selection builds. `cargo tree` names one again wherever it is used if `repeated`.
fn nodes(selection: &[&str], edges: &str, repeated: bool) -> Result<Vec<Node>> {
    let mut args = selection.to_vec();
    args.extend(["--target", TARGET, "--edges", edges]);
    if repeated {
        args.push("--no-dedupe");
    }
    let mut nodes = tree::tree(&args, "{f}")?;
    nodes.retain(|node| node.package.name != HACK);
    Ok(nodes)
}

/// The names of the workspace's packages.
fn members() -> Result<Vec<String>> {
    let output = cargo::cargo(&["metadata", "--format-version", "1", "--no-deps"])
        .stderr(Stdio::inherit())
        .output()
        .context("run cargo metadata")?;
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).context("read cargo's metadata")?;
    let packages = metadata["packages"].as_array().context("no packages in cargo's metadata")?;
    let names = packages.iter().filter_map(|package| package["name"].as_str());
    Ok(names.filter(|name| *name != HACK).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_that_a_macro_links_run_in_the_compiler() {
        let lines = ["0a v1.0.0|", "1m v1.0.0 (proc-macro)|", "2s v1.0.0|", "1t v1.0.0|", "2u v1.0.0|"];
        let sides = Sides::from_nodes(tree::parsed(&lines));
        let names = |packages: &BTreeSet<Package>| packages.iter().map(|it| it.name.clone()).collect::<Vec<_>>();
        assert_eq!(
            (names(&sides.target), names(&sides.host)),
            (vec!["a".into(), "t".into(), "u".into()], vec!["m".into(), "s".into()])
        );
    }
}

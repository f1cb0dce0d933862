//! `cargo xtask sbom`: the bills of materials of the engine's programs: each crate that is linked in, with version,
//! licence and checksum, and which crate needs which.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::cargo;
use crate::tree::{self, HACK, Node, Package};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder for `relay-gateway.cdx.json`, `relay-worker.cdx.json` and `relayctl.cdx.json`.
    #[arg(default_value = "sbom")]
    folder: PathBuf,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    for (path, bill) in write(&args.folder)? {
        println!("wrote {}: {} crates", path.display(), bill["components"].as_array().map_or(0, Vec::len));
    }
    Ok(())
}

/// Writes a bill for each program, and returns them with their paths.
pub(crate) fn write(folder: &Path) -> Result<Vec<(PathBuf, Value)>> {
    let lock = fs::read_to_string(cargo::root().join("Cargo.lock")).context("read Cargo.lock")?;
    let checksums = checksums(&lock);
    fs::create_dir_all(folder)?;
    let mut written = Vec::new();
    for program in cargo::ENGINE_PACKAGES {
        // Procedural macros and build scripts run in the compiler only.
        let nodes = tree::tree(&["--package", program, "--edges", "normal,no-proc-macro", "--no-dedupe"], "{l}")?;
        let bill = bill(nodes, &checksums).with_context(|| format!("{program} has no dependencies"))?;
        let path = folder.join(format!("{program}.cdx.json"));
        fs::write(&path, format!("{bill:#}\n")).with_context(|| format!("write {}", path.display()))?;
        written.push((path, bill));
    }
    Ok(written)
}

/// The bill of the program at the root of the tree.
fn bill(nodes: Vec<Node>, checksums: &BTreeMap<Package, String>) -> Option<Value> {
    let program = component(nodes.first()?, "application", checksums);
    let mut components = BTreeMap::new();
    let mut needs: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut ancestors: Vec<Node> = Vec::new();
    for node in nodes {
        ancestors.truncate(node.depth);
        // Nothing of what only this package depends on is linked in.
        if node.package.name != HACK && ancestors.iter().all(|ancestor| ancestor.package.name != HACK) {
            let reference = reference(&node);
            if let Some(parent) = ancestors.last() {
                components.entry(reference.clone()).or_insert_with(|| component(&node, "library", checksums));
                needs.entry(self::reference(parent)).or_default().insert(reference.clone());
            }
            needs.entry(reference).or_default();
        }
        ancestors.push(node);
    }
    let dependencies: Vec<Value> =
        needs.into_iter().map(|(reference, needed)| json!({ "ref": reference, "dependsOn": needed })).collect();
    Some(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": program },
        "components": components.into_values().collect::<Vec<_>>(),
        "dependencies": dependencies,
    }))
}

fn component(node: &Node, kind: &str, checksums: &BTreeMap<Package, String>) -> Value {
    let Package { name, version } = &node.package;
    let mut component = json!({ "type": kind, "bom-ref": reference(node), "name": name, "version": version });
    // Manifests from before SPDX expressions separate alternatives by a slash.
    let licence = node.detail.split('/').map(str::trim).collect::<Vec<_>>().join(" OR ");
    if !licence.is_empty() {
        component["licenses"] = json!([{ "expression": licence }]);
    }
    if !node.is_member {
        component["purl"] = json!(reference(node));
    }
    if let Some(checksum) = checksums.get(&node.package) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
    }
    component
}

fn reference(node: &Node) -> String {
    let Package { name, version } = &node.package;
    if node.is_member { format!("{name}@{version}") } else { format!("pkg:cargo/{name}@{version}") }
}

/// The checksums in the text of a lock file; crates of the workspace have none.
fn checksums(lock: &str) -> BTreeMap<Package, String> {
    let value = |block: &str, key: &str| {
        let line = block.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "))?;
        Some(line.trim_matches('"').to_owned())
    };
    let package = |block: &str| {
        let package = Package { name: value(block, "name")?, version: value(block, "version")? };
        Some((package, value(block, "checksum")?))
    };
    lock.split("[[package]]").filter_map(package).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCK: &str = "version = 4\n\n[[package]]\nname = \"own\"\nversion = \"0.1.0\"\ndependencies = [\n \"b\",\n]\n\n\
                        [[package]]\nname = \"b\"\nversion = \"1.2.3\"\nsource = \"registry\"\nchecksum = \"c0ffee\"\n";

    #[test]
    fn a_bill_names_what_is_linked_in_and_who_needs_it() {
        let nodes = tree::parsed(&[
            "0own v0.1.0 (/x)|Apache-2.0",
            "1b v1.2.3|MIT/Apache-2.0",
            "2c v1.0.0|ISC",
            "1workspace-hack v0.1.0 (/x)|Apache-2.0",
            "2d v1.0.0|MIT",
            "2c v1.0.0|ISC",
        ]);
        let bill = bill(nodes, &checksums(LOCK)).unwrap();
        assert_eq!(bill["metadata"]["component"]["bom-ref"], "own@0.1.0");
        let components = bill["components"].as_array().unwrap();
        let names: Vec<_> = components.iter().filter_map(|component| component["name"].as_str()).collect();
        assert_eq!(names, ["b", "c"]);
        assert_eq!(components[0]["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(components[0]["hashes"][0]["content"], "c0ffee");
        assert_eq!(components[0]["purl"], "pkg:cargo/b@1.2.3");
        let needs = bill["dependencies"].as_array().unwrap();
        assert_eq!(needs.len(), 3);
        assert_eq!(needs[0], json!({ "ref": "own@0.1.0", "dependsOn": ["pkg:cargo/b@1.2.3"] }));
    }
}

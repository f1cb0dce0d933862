//! The text of `crates/workspace-hack/Cargo.toml`.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::survey::{Origins, Survey};
use crate::tree::Package;

const HEAD: &str = r#"# Written by `cargo xtask features`; `cargo xtask tidy` says when it must be written again.
# Lists the packages that would otherwise be built with other features for other selections. What xtask needs comes with any
# dependency on this package, the rest with the feature `engine`.
[package]
name = "workspace-hack"
version.workspace = true
edition.workspace = true
rust-version.workspace = true
license.workspace = true
publish.workspace = true
"#;

/// The manifest that lists nothing.
pub(super) fn empty() -> String {
    format!("{HEAD}\n[features]\nengine = []\n")
}

/// The manifest that lists these packages with the features that the survey found.
pub(super) fn listing(listed: &BTreeSet<Package>, survey: &Survey, origins: &Origins) -> String {
    let (mut engine, mut target, mut host) = (Vec::new(), String::new(), String::new());
    for package in listed {
        let key = key(package, listed);
        let mut is_optional = false;
        for (text, whole, xtask) in [
            (&mut target, &origins.whole.target, &origins.xtask.target),
            (&mut host, &origins.whole.host, &origins.xtask.host),
        ] {
            if whole.contains(package) {
                let optional = !xtask.contains(package);
                is_optional |= optional;
                // Writing to a string cannot fail.
                let _ = writeln!(text, "{}", entry(&key, package, survey, optional));
            }
        }
        if is_optional {
            engine.push(format!("    \"dep:{key}\",\n"));
        }
    }
    let engine = engine.concat();
    format!(
        "{HEAD}\n[features]\nengine = [\n{engine}]\n\n[dependencies]\n{target}\n\
         # Of procedural macros. The same features here and above let both share what is compiled.\n\
         [build-dependencies]\n{host}\n[lints]\nworkspace = true\n"
    )
}

fn entry(key: &str, package: &Package, survey: &Survey, optional: bool) -> String {
    let Package { name, version } = package;
    // What follows a plus sign says nothing about compatibility.
    let version = version.split('+').next().unwrap_or_default();
    let mut fields = Vec::new();
    if key != name {
        fields.push(format!("package = \"{name}\""));
    }
    fields.push(format!("version = \"{version}\""));
    fields.push("default-features = false".to_owned());
    let features: Vec<_> = survey.union(package).into_iter().map(|feature| format!("\"{feature}\"")).collect();
    fields.push(format!("features = [{}]", features.join(", ")));
    if optional {
        fields.push("optional = true".to_owned());
    }
    format!("{key} = {{ {} }}", fields.join(", "))
}

/// The package's name, with its version where two versions are listed.
fn key(package: &Package, listed: &BTreeSet<Package>) -> String {
    if listed.iter().filter(|other| other.name == package.name).count() == 1 {
        return package.name.clone();
    }
    let mut numbers = package.version.split('.');
    let major = numbers.next().unwrap_or_default();
    match (major, numbers.next()) {
        ("0", Some(minor)) => format!("{}-0_{minor}", package.name),
        _ => format!("{}-{major}", package.name),
    }
}

//! Every dependency is used by the crate that lists it.

use super::Source;
use crate::tree::HACK;

/// Dependencies that no source names, each with the reason.
const ALLOWED: &[(&str, &str)] = &[
    // The reqwest of the object store has no TLS without the features that are named here.
    ("crates/blobs", "reqwest"),
];

/// The folders of a package whose sources see its development dependencies only.
const OF_TESTS: [&str; 3] = ["tests/", "examples/", "benches/"];

pub(super) fn check(sources: &[Source], findings: &mut Vec<String>) {
    for manifest in sources {
        let Some(folder) = manifest.path.strip_suffix("/Cargo.toml").filter(|folder| !folder.ends_with(HACK)) else {
            continue;
        };
        for (section, name) in dependencies(&manifest.text).filter(|(_, name)| *name != HACK) {
            let allowed = ALLOWED.contains(&(folder, name));
            match (use_of(sources, folder, name), section) {
                (Use::None, _) if !allowed => findings.push(format!("{}: {name} is not used", manifest.path)),
                (Use::Tests, Section::Normal) => {
                    findings.push(format!("{}: {name} belongs to dev-dependencies: only tests use it", manifest.path));
                }
                (Use::Library | Use::Tests, _) if allowed => {
                    findings.push(format!("{}: {name} no longer needs its place in {}", manifest.path, file!()));
                }
                _ => {}
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Section {
    Normal,
    Dev,
}

/// Part of a package that names one of its dependencies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Use {
    None,
    Tests,
    Library,
}

fn use_of(sources: &[Source], folder: &str, dependency: &str) -> Use {
    let name = dependency.replace('-', "_");
    let own = sources.iter().filter(|source| source.is_rust()).filter_map(|source| {
        let inside = source.path.strip_prefix(folder)?.strip_prefix('/')?;
        Some((inside, source))
    });
    let using = own.filter(|(_, source)| source.code_lines().any(|(_, line)| names(line, &name)));
    let kind =
        |inside: &str| if OF_TESTS.iter().any(|place| inside.starts_with(place)) { Use::Tests } else { Use::Library };
    using.map(|(inside, _)| kind(inside)).max().unwrap_or(Use::None)
}

/// Returns whether the line has a path that begins with `name`, or imports it.
fn names(line: &str, name: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(name).any(|(at, _)| {
        let (before, after) = (&line[..at], &line[at + name.len()..]);
        let is_word = !before.ends_with(is_part) && !after.starts_with(is_part);
        is_word && (after.starts_with("::") || before.ends_with("use ") || before.ends_with("extern crate "))
    })
}

/// The names in `[dependencies]` and `[dev-dependencies]`.
fn dependencies(manifest: &str) -> impl Iterator<Item = (Section, &str)> {
    let mut section = None;
    manifest.lines().filter_map(move |line| {
        if line.starts_with('[') {
            section = match line.trim() {
                "[dependencies]" => Some(Section::Normal),
                "[dev-dependencies]" => Some(Section::Dev),
                _ => None,
            };
            return None;
        }
        let name = line.split(['.', '=', ' ', '#']).next().filter(|name| !name.is_empty())?;
        Some((section?, name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings_of(manifest: &str, files: &[(&str, &str)]) -> Vec<String> {
        let source = |path: &str, text: &str| Source { path: path.into(), text: text.into() };
        let mut sources = vec![source("crates/a/Cargo.toml", manifest)];
        sources.extend(files.iter().map(|(path, text)| source(path, text)));
        let mut findings = Vec::new();
        check(&sources, &mut findings);
        findings
    }

    #[test]
    fn a_dependency_must_be_named_where_it_is_visible() {
        let manifest = "[dependencies]\n# why\ntokio-util.workspace = true\nworkspace-hack.workspace = true\n";
        assert!(findings_of(manifest, &[("crates/a/src/lib.rs", "use tokio_util::sync::X;")]).is_empty());
        assert!(findings_of(manifest, &[("crates/a/src/lib.rs", "    let x = tokio_util::x();")]).is_empty());
        for unused in ["// tokio_util::x", "my_tokio_util::x()", "tokio_utility::x()"] {
            let findings = findings_of(manifest, &[("crates/a/src/lib.rs", unused)]);
            assert!(findings.len() == 1 && findings[0].contains("not used"), "{unused}: {findings:?}");
        }
        let findings = findings_of(manifest, &[("crates/b/src/lib.rs", "use tokio_util::sync::X;")]);
        assert_eq!(findings.len(), 1, "another crate's use does not count");
        let findings = findings_of(manifest, &[("crates/a/tests/t.rs", "use tokio_util::sync::X;")]);
        assert!(findings[0].contains("dev-dependencies"), "{findings:?}");
    }

    #[test]
    fn a_development_dependency_may_be_used_anywhere() {
        let manifest = "[dev-dependencies]\ntempfile = \"3\"\n";
        for path in ["crates/a/tests/t.rs", "crates/a/src/lib.rs", "crates/a/examples/e.rs"] {
            assert!(findings_of(manifest, &[(path, "use tempfile;")]).is_empty());
        }
        assert_eq!(findings_of(manifest, &[]).len(), 1);
    }
}

//! Arrows point down only: which of our crates may depend on which.

use super::Source;

/// Each crate of the engine with the crates of ours that it may depend on. What is not listed may depend on
/// anything (tools and tests).
const ARROWS: &[(&str, &[&str])] = &[
    ("crates/domain", &[]),
    ("crates/wire", &["relay-domain"]),
    ("crates/store", &["relay-domain", "relay-wire"]),
    ("crates/stream", &["relay-domain"]),
    ("crates/blobs", &["relay-domain"]),
    ("crates/egress", &[]),
    ("crates/tasks", &[]),
    ("crates/trace", &[]),
    ("crates/dispatch", &["relay-domain", "relay-wire", "relay-egress", "relay-tasks", "relay-trace"]),
    ("crates/pty", &[]),
    ("crates/verification", &[]),
    ("crates/runtime", &["relay-domain", "relay-tasks"]),
    (
        "crates/engine",
        &[
            "relay-domain",
            "relay-wire",
            "relay-store",
            "relay-stream",
            "relay-blobs",
            "relay-egress",
            "relay-tasks",
            "relay-trace",
        ],
    ),
    (
        "services/gateway",
        &["relay-domain", "relay-wire", "relay-engine", "relay-runtime", "relay-tasks", "relay-trace"],
    ),
    (
        "services/broker",
        &["relay-domain", "relay-wire", "relay-runtime", "relay-tasks", "relay-pty", "relay-verification"],
    ),
    (
        "services/worker",
        &["relay-domain", "relay-dispatch", "relay-egress", "relay-engine", "relay-runtime", "relay-tasks"],
    ),
    ("crates/admin", &["relay-domain", "relay-engine", "relay-store", "relay-stream"]),
    ("services/relayctl", &["relay-domain", "relay-engine", "relay-admin", "relay-runtime"]),
];

pub(super) fn check(sources: &[Source], findings: &mut Vec<String>) {
    for source in sources {
        let Some(folder) = source.path.strip_suffix("/Cargo.toml") else {
            continue;
        };
        let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| *name == folder) else {
            continue;
        };
        for dependency in dependencies(&source.text) {
            if dependency.starts_with("relay-") && !allowed.contains(&dependency) {
                findings
                    .push(format!("{}: it may not depend on {dependency}; is a type in the wrong crate?", source.path));
            }
        }
    }
}

/// The names in `[dependencies]`. Dev-dependencies may point anywhere.
fn dependencies(manifest: &str) -> impl Iterator<Item = &str> {
    let mut within = false;
    manifest.lines().filter_map(move |line| {
        if line.starts_with('[') {
            within = line.trim() == "[dependencies]";
            return None;
        }
        let name = line.split(['.', '=', ' ']).next()?;
        (within && !name.is_empty()).then_some(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arrow_upward_is_found_and_a_dev_dependency_is_not() {
        let manifest = "[dependencies]\nserde.workspace = true\nrelay-engine = { path = \"x\" }\n\n\
                        [dev-dependencies]\nrelay-testkit.workspace = true\n";
        let mut findings = Vec::new();
        let source = Source { path: "crates/store/Cargo.toml".into(), text: manifest.into() };
        check(&[source], &mut findings);
        assert_eq!(findings.len(), 1);
        assert!(findings[0].contains("relay-engine"));
    }
}

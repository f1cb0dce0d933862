//! Arrows point down only: which of our crates depend on which. The document draws the same graph.

use super::Source;

/// Each crate with the crates of ours that it depends on, without the prefix `relay-`. Dev-dependencies may point
/// anywhere.
const ARROWS: &[(&str, &[&str])] = &[
    ("crates/domain", &[]),
    ("crates/wire", &["domain"]),
    ("crates/store", &["domain", "wire"]),
    ("crates/stream", &["domain"]),
    ("crates/blobs", &[]),
    ("crates/egress", &[]),
    ("crates/tasks", &[]),
    ("crates/trace", &[]),
    ("crates/dispatch", &["domain", "egress", "tasks", "trace", "wire"]),
    ("crates/pty", &[]),
    ("crates/verification", &[]),
    ("crates/runtime", &["domain", "tasks"]),
    ("crates/engine", &["blobs", "domain", "egress", "store", "stream", "tasks", "trace", "wire"]),
    ("crates/admin", &["domain", "engine", "store", "stream"]),
    ("services/gateway", &["domain", "engine", "runtime", "tasks", "trace", "wire"]),
    ("services/worker", &["dispatch", "domain", "egress", "engine", "runtime", "tasks"]),
    ("services/relayctl", &["admin", "domain", "engine"]),
    ("services/broker", &["pty", "runtime", "tasks", "verification", "wire"]),
    // Tools: xtask must build in seconds, so it knows neither Postgres nor NATS.
    ("crates/stack", &[]),
    ("crates/testkit", &["stack"]),
    ("crates/xtask", &["stack"]),
];

/// Document that shows the graph as a table, one row for each crate.
const DOCUMENT: &str = "docs/architecture.md";

pub(super) fn check(sources: &[Source], findings: &mut Vec<String>) {
    for source in sources {
        let folder = source.path.strip_suffix("/Cargo.toml");
        if let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| Some(*name) == folder) {
            compare(source, allowed, findings);
        }
        if source.path == DOCUMENT {
            let rows = ARROWS.iter().map(|(name, allowed)| row(name, allowed));
            let missing = rows.filter(|row| !source.text.lines().any(|line| line == row));
            findings.extend(missing.map(|row| format!("{DOCUMENT}: it has no row `{row}`")));
        }
    }
}

fn compare(manifest: &Source, allowed: &[&str], findings: &mut Vec<String>) {
    let used: Vec<&str> = dependencies(&manifest.text).filter_map(|name| name.strip_prefix("relay-")).collect();
    let path = &manifest.path;
    for name in used.iter().filter(|name| !allowed.contains(name)) {
        findings.push(format!("{path}: it may not depend on relay-{name}; is a type in the wrong crate?"));
    }
    for name in allowed.iter().filter(|name| !used.contains(name)) {
        findings.push(format!("{path}: it does not depend on relay-{name}, so the graph need not allow it"));
    }
}

fn row(name: &str, allowed: &[&str]) -> String {
    let used = if allowed.is_empty() { "none of ours".to_owned() } else { allowed.join(", ") };
    format!("| `{name}` | {used} |")
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

    fn findings_of(path: &str, text: &str) -> Vec<String> {
        let mut findings = Vec::new();
        check(&[Source { path: path.into(), text: text.into() }], &mut findings);
        findings
    }

    #[test]
    fn an_arrow_upward_is_found_and_a_dev_dependency_is_not() {
        let manifest = "[dependencies]\nserde.workspace = true\nrelay-domain.workspace = true\nrelay-wire.workspace = true\n\
                        relay-engine = { path = \"x\" }\n\n[dev-dependencies]\nrelay-testkit.workspace = true\n";
        let findings = findings_of("crates/store/Cargo.toml", manifest);
        assert_eq!(findings.len(), 1);
        assert!(findings[0].contains("relay-engine"));
    }

    #[test]
    fn an_arrow_that_no_crate_uses_and_a_row_that_is_not_drawn_are_found() {
        let findings = findings_of("crates/store/Cargo.toml", "[dependencies]\nrelay-domain.workspace = true\n");
        assert_eq!(findings.len(), 1);
        assert!(findings[0].contains("relay-wire"));
        let drawn: Vec<String> = ARROWS.iter().map(|(name, allowed)| row(name, allowed)).collect();
        assert_eq!(findings_of(DOCUMENT, &drawn.join("\n")), Vec::<String>::new());
        assert_eq!(findings_of(DOCUMENT, &drawn[1..].join("\n")).len(), 1);
    }
}

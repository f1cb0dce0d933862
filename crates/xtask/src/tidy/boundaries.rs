//! What may be written where: SQL in the store, NATS in the stream crate, no clock and no I/O in the rules.

use super::Source;

struct Boundary {
    /// Text that betrays the thing.
    needles: &'static [&'static str],
    applies_to: fn(&str) -> bool,
    rule: &'static str,
}

/// Tests, tools and the load generator look at the servers directly; they are not the engine.
const OUTSIDE_THE_ENGINE: [&str; 4] = ["crates/testkit/", "crates/xtask/", "loadtest/", "tests/"];

const BOUNDARIES: [Boundary; 3] = [
    Boundary {
        needles: &["sqlx::"],
        applies_to: |path| in_engine(path) && !path.starts_with("crates/store/"),
        rule: "SQL is written in crates/store only",
    },
    Boundary {
        needles: &["async_nats::"],
        applies_to: |path| in_engine(path) && !path.starts_with("crates/stream/"),
        rule: "NATS is spoken in crates/stream only",
    },
    Boundary {
        needles: &[
            ".await",
            "async fn",
            "SystemTime",
            "Instant::now",
            "Utc::now",
            "tokio::",
            "std::fs",
            "std::net",
            "std::env",
        ],
        applies_to: |path| path.starts_with("crates/domain/src/"),
        rule: "crates/domain computes: no await, no clock, no I/O",
    },
];

fn in_engine(path: &str) -> bool {
    !OUTSIDE_THE_ENGINE.iter().any(|place| path.starts_with(place))
}

pub(super) fn check(sources: &[Source], findings: &mut Vec<String>) {
    for source in sources.iter().filter(|source| source.is_rust()) {
        for boundary in BOUNDARIES.iter().filter(|boundary| (boundary.applies_to)(&source.path)) {
            for (number, line) in source.code_lines() {
                if let Some(needle) = boundary.needles.iter().find(|needle| line.contains(**needle)) {
                    findings.push(format!("{}:{number}: {needle}: {}", source.path, boundary.rule));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finds(path: &str, text: &str) -> bool {
        let mut findings = Vec::new();
        check(&[Source { path: path.into(), text: text.into() }], &mut findings);
        !findings.is_empty()
    }

    #[test]
    fn each_thing_is_refused_outside_its_place_only() {
        assert!(finds("crates/engine/src/a.rs", "let x = sqlx::query(\"\");"));
        assert!(!finds("crates/store/src/a.rs", "let x = sqlx::query(\"\");"));
        assert!(finds("services/gateway/src/a.rs", "use async_nats::Client;"));
        assert!(!finds("tests/tests/a.rs", "use async_nats::Client;"));
        assert!(finds("crates/domain/src/a.rs", "    let now = Instant::now();"));
        assert!(!finds("crates/domain/src/a.rs", "    // not Instant::now(), see above"));
    }
}

//! Boundaries of the crates: SQL in the store, NATS in the stream crate, no clock and no I/O in the rules.

use super::Source;

struct Boundary {
    /// Text that betrays the thing.
    needles: &'static [&'static str],
    applies_to: fn(&str) -> bool,
    rule: &'static str,
}

/// Tests, tools and the load generator look at the servers directly, and the broker is a client; they are not the
/// engine.
const OUTSIDE_THE_ENGINE: [&str; 6] =
    ["crates/stack/", "crates/testkit/", "crates/xtask/", "loadtest/", "services/broker/", "tests/"];

/// Files that call a URL of the operator, not of a tenant.
const NOT_TOWARDS_TENANTS: [&str; 1] = ["crates/engine/src/access/operators/issuer.rs"];

/// Crates of pure functions and state machines.
const COMPUTING: [&str; 2] = ["crates/domain/src/", "crates/verification/src/"];

/// Programs and crates that depend on Linux, in the module of that name.
const ON_LINUX: [&str; 2] = ["crates/pty/src/", "services/broker/src/"];

const BOUNDARIES: [Boundary; 6] = [
    Boundary {
        needles: &["sqlx::"],
        // The domain declares column types of its ids and enums; it executes nothing.
        applies_to: |path| {
            in_engine(path) && !["crates/store/", "crates/domain/"].iter().any(|own| path.starts_with(own))
        },
        rule: "SQL is written in crates/store only",
    },
    Boundary {
        needles: &["async_nats::"],
        applies_to: |path| in_engine(path) && !path.starts_with("crates/stream/"),
        rule: "NATS is spoken in crates/stream only",
    },
    Boundary {
        needles: &["object_store::"],
        applies_to: |path| in_engine(path) && !path.starts_with("crates/blobs/"),
        rule: "the bytes of files are kept by crates/blobs only",
    },
    Boundary {
        needles: &["hyper::client", "hyper_util::", "hyper_rustls::", "reqwest::", "TcpStream::connect"],
        applies_to: |path| {
            let own = ["crates/egress/", "crates/runtime/src/server/", "crates/tasks/tests/", "services/relayctl/"]
                .iter()
                .any(|place| path.starts_with(place));
            in_engine(path) && !own && !NOT_TOWARDS_TENANTS.contains(&path)
        },
        rule: "tenants' URLs are called through crates/egress only",
    },
    Boundary {
        needles: &["\"/proc", "\"/sys/", "inotify", "pidfd", "epoll", "set_child_subreaper", "Dumpable", "target_os"],
        applies_to: |path| {
            ON_LINUX.iter().any(|place| path.strip_prefix(place).is_some_and(|inside| !inside.starts_with("linux/")))
        },
        rule: "what depends on Linux is in the module `linux`",
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
            "std::io",
            "std::process",
            "std::thread",
            "sqlx::query",
            "PgPool",
            "PgConnection",
        ],
        applies_to: |path| COMPUTING.iter().any(|place| path.starts_with(place)),
        rule: "crates/domain and crates/verification compute: no await, no clock, no I/O",
    },
];

/// Tools whose tasks end with their process, and the crate that starts the tasks of the others.
const START_TASKS: [&str; 4] = ["crates/tasks/", "crates/stack/", "crates/testkit/", "crates/xtask/"];

/// A long-running task that ends unnoticed leaves a process that looks healthy; a panic that is not counted is not
/// seen. A library crate may own a `JoinSet`, which ends its tasks.
fn check_spawns(sources: &[Source], findings: &mut Vec<String>) {
    let supervises = |path: &str| {
        (path.starts_with("crates/") || path.starts_with("services/"))
            && path.contains("/src/")
            && !START_TASKS.iter().any(|place| path.starts_with(place))
    };
    for source in
        sources.iter().filter(|source| source.is_rust() && !source.is_test_module() && supervises(&source.path))
    {
        for (number, line) in source.production_lines() {
            if ["tokio::spawn(", "task::spawn("].iter().any(|call| line.contains(call)) {
                findings.push(format!("{}:{number}: tasks are started by relay_tasks", source.path));
            }
        }
    }
}

/// Crates that exchange JSON of types, those that leave of `crates/wire`.
const EXCHANGING: [&str; 7] = [
    "crates/dispatch/src/",
    "crates/domain/src/",
    "crates/engine/src/",
    "crates/store/src/",
    "crates/stream/src/",
    "services/gateway/src/",
    "services/worker/src/",
];

/// Frames and answers are written by `crates/wire`; the OpenAPI document has examples, and SQL has patterns of JSON.
fn check_json_shapes(sources: &[Source], findings: &mut Vec<String>) {
    let exchanges = |path: &str| {
        EXCHANGING.iter().any(|place| path.starts_with(place)) && !path.starts_with("services/gateway/src/openapi/")
    };
    for source in
        sources.iter().filter(|source| source.is_rust() && !source.is_test_module() && exchanges(&source.path))
    {
        for (number, line) in source.production_lines() {
            let line = line.replace("example = json!(", "");
            let is_text = ["{\"type\"", "{{\"type\"", "{{\"v\"", "{\\\"type"].iter().any(|start| line.contains(start));
            if line.contains("json!(") || is_text {
                findings.push(format!("{}:{number}: JSON shapes are types of crates/wire", source.path));
            }
        }
    }
}

fn in_engine(path: &str) -> bool {
    !OUTSIDE_THE_ENGINE.iter().any(|place| path.starts_with(place))
}

pub(super) fn check(sources: &[Source], findings: &mut Vec<String>) {
    check_json_shapes(sources, findings);
    check_spawns(sources, findings);
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
        assert!(finds("crates/engine/src/a.rs", "use hyper_util::client::legacy::Client;"));
        assert!(!finds("crates/egress/src/a.rs", "use hyper::client::conn::http1;"));
        assert!(finds("crates/domain/src/a.rs", "    let now = Instant::now();"));
        assert!(finds("crates/verification/src/a/b.rs", "use std::fs::File;"));
        assert!(finds("services/gateway/src/a.rs", "    tokio::spawn(async {});"));
        assert!(finds("crates/egress/src/a.rs", "    tokio::spawn(async {});"));
        assert!(!finds("crates/egress/src/a.rs", "    tasks.spawn(async {});"));
        assert!(!finds("crates/testkit/src/a.rs", "    tokio::spawn(async {});"));
        assert!(finds("crates/engine/src/a.rs", "let x = json!({});"));
        assert!(finds("crates/store/src/a.rs", "let x = json!({});"));
        assert!(finds("crates/domain/src/a.rs", "let x = json!({});"));
        assert!(finds("services/gateway/src/a.rs", "let x = r#\"{\"type\":\"pong\"}\"#;"));
        assert!(finds("crates/engine/src/a.rs", "#[cfg(test)]\nmod tests;\nlet x = json!({});"));
        assert!(!finds("crates/engine/src/a.rs", "#[cfg(test)]\nmod tests {\n    let x = json!({});\n}"));
        assert!(!finds("services/gateway/src/a.rs", "    request_body(content = B, example = json!({})),"));
        assert!(!finds("crates/domain/src/a.rs", "    // not Instant::now(), see above"));
        assert!(finds("services/broker/src/api/a.rs", "    fs::read_to_string(\"/proc/self/statm\")"));
        assert!(finds("crates/pty/src/a.rs", "    inotify::init(flags)"));
        assert!(!finds("services/broker/src/linux/a.rs", "    inotify::init(flags)"));
    }
}

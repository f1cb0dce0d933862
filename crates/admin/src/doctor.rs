//! Checks of Postgres, NATS and their settings for `relayctl doctor`, with advice for each problem.

mod recovery;
mod replication;
mod security;

use chrono::Utc;
use relay_engine::{access::secrets::KeyList, error::error_chain};
use relay_store::{
    Store,
    admin::{DatabaseHealth, SchemaState},
};
use relay_stream::{NatsServers, admin::NatsHealth};
use security::security_findings;

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Works as it should.
    Ok,
    /// Works with a risk or at a cost.
    Warn,
    /// The engine cannot work, or not safely.
    Fail,
}

/// Result of one check.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Finding {
    pub check: &'static str,
    pub verdict: Verdict,
    pub found: String,
    /// Advice, unless the verdict is `Ok`.
    pub fix: Option<&'static str>,
}

/// Servers and settings of an installation.
#[derive(Debug, Clone)]
pub struct Installation {
    pub database_url: String,
    pub nats: NatsServers,
    pub secret_keys: KeyList,
    pub has_signing_secret: bool,
    /// `true` to report missing keys.
    pub hosted: bool,
}

/// Oldest Postgres that the engine is tested with, as `server_version_num`.
const MIN_POSTGRES: i32 = 150_000;
/// Oldest NATS with all features that the engine uses.
const MIN_NATS: (u32, u32) = (2, 12);
/// Room for a `deliver` frame of up to 900 KiB and its headers.
const MIN_PAYLOAD_BYTES: usize = 1 << 20;
/// Connections of a gateway and two workers: 6 for a worker's loops, 2 for http_push.
const MIN_CONNECTIONS: i64 = 16 + 2 * (6 + 2);
/// As many stay free for upgrades: a new gateway starts before the old one stops.
const SPARE_CONNECTIONS: i64 = 16;
/// A larger difference makes ids and expiries wrong.
const MAX_CLOCK_SKEW_MS: i64 = 1000;
/// An older outbox has no process that publishes it.
const MAX_OUTBOX_LAG_SECONDS: f64 = 30.0;
/// Partitions are created 7 days ahead, each hour.
const MIN_PARTITION_DAYS: i64 = 3;

/// Checks everything that the URLs lead to, and the settings. Never fails: an unavailable server is a finding.
#[expect(clippy::disallowed_methods, reason = "this machine's clock is one of the things to examine")]
pub async fn examine(installation: &Installation) -> Vec<Finding> {
    let mut findings = security_findings(installation);
    // One connection: the checks run one after the other, and must also work when connections are scarce.
    match Store::connect(&installation.database_url, 1) {
        Err(error) => findings.push(failed("postgres", error_chain(&error), "correct DATABASE_URL")),
        Ok(store) => match store.database_health().await {
            Err(error) => {
                let fix = "start Postgres, or correct DATABASE_URL: host, port, password, database";
                findings.push(failed("postgres", error_chain(&error), fix));
            }
            Ok(health) => {
                findings.extend(postgres_findings(&health, Utc::now().timestamp_millis()));
                match store.schema_state().await {
                    Ok(state) => {
                        findings.extend(schema_findings(&state));
                        // An older schema may lack the tables of these checks.
                        if state.applied >= Some(state.known) {
                            findings
                                .extend(recovery::examine(&store, &installation.nats, &installation.secret_keys).await);
                        }
                    }
                    Err(error) => findings.push(failed("schema", error_chain(&error), "run relayctl migrate")),
                }
            }
        },
    }
    match relay_stream::admin::inspect(&installation.nats).await {
        Ok(health) => findings.extend(nats_findings(&health)),
        Err(error) => findings.push(Finding {
            check: "nats",
            // Not a failure: messages are accepted and delivered without NATS.
            verdict: Verdict::Warn,
            found: error_chain(&error),
            fix: Some("start NATS, or correct NATS_URL; until then delivery goes on from Postgres, later"),
        }),
    }
    findings
}

fn postgres_findings(health: &DatabaseHealth, own_clock_ms: i64) -> Vec<Finding> {
    let version = health.server_version_num;
    let skew = health.now.timestamp_millis() - own_clock_ms;
    let usable = i64::from(health.max_connections) - i64::from(health.reserved);
    let free = usable - health.connections;
    // Processes that are not running yet need connections too.
    let wanted = (MIN_CONNECTIONS - health.own).max(SPARE_CONNECTIONS);
    vec![
        checked(
            "postgres version",
            version >= MIN_POSTGRES,
            Verdict::Fail,
            version.to_string(),
            "upgrade to Postgres 15 or newer",
        ),
        checked(
            "postgres role",
            !health.in_recovery,
            Verdict::Fail,
            if health.in_recovery { "a standby" } else { "a primary" },
            "point DATABASE_URL at the primary",
        ),
        checked(
            "postgres encoding",
            health.encoding == "UTF8",
            Verdict::Fail,
            &health.encoding,
            "recreate the database with ENCODING 'UTF8'",
        ),
        checked(
            "postgres fsync",
            health.fsync == "on",
            Verdict::Fail,
            &health.fsync,
            "set fsync = on: a 2xx means that it is on disk",
        ),
        checked(
            "postgres full_page_writes",
            health.full_page_writes == "on",
            Verdict::Warn,
            &health.full_page_writes,
            "set full_page_writes = on, unless the file system writes pages whole",
        ),
        checked(
            "postgres synchronous_commit",
            health.synchronous_commit != "off",
            Verdict::Fail,
            &health.synchronous_commit,
            "set synchronous_commit = on: off answers before the disk has it",
        ),
        replication::finding(health),
        checked(
            "postgres connections",
            free >= wanted,
            Verdict::Warn,
            format!("{} of {usable} in use, {} of them the engine's", health.connections, health.own),
            "raise max_connections: 16 for each gateway, 8 for each worker, 16 more for upgrades, some for you",
        ),
        checked(
            "clocks",
            skew.abs() <= MAX_CLOCK_SKEW_MS,
            Verdict::Warn,
            format!("postgres is {skew} ms ahead of this machine"),
            "synchronise the clocks (NTP) of all hosts",
        ),
    ]
}

fn schema_findings(state: &SchemaState) -> Vec<Finding> {
    let Some(applied) = state.applied else {
        return vec![failed("schema", "there is none".into(), "run relayctl migrate")];
    };
    let newer = applied > state.known;
    let mut findings = vec![checked(
        "schema",
        applied >= state.known,
        Verdict::Fail,
        format!(
            "version {applied}, this program knows {}{}",
            state.known,
            if newer { ": the database is newer" } else { "" }
        ),
        "run relayctl migrate",
    )];
    findings.push(checked(
        "migrations",
        state.broken.is_empty(),
        Verdict::Fail,
        if state.broken.is_empty() {
            "as written".to_owned()
        } else {
            format!("{:?} failed or were changed", state.broken)
        },
        "use a relayctl of the version that migrated this database, or restore it",
    ));
    let days = state.partition_days.unwrap_or(0);
    findings.push(checked(
        "partitions",
        days >= MIN_PARTITION_DAYS,
        if days < 1 { Verdict::Fail } else { Verdict::Warn },
        format!("made for {days} days ahead"),
        "run a worker: it makes them each hour",
    ));
    findings.push(checked(
        "table owner",
        state.foreign_tables.is_empty(),
        Verdict::Fail,
        if state.foreign_tables.is_empty() {
            "this user".to_owned()
        } else {
            format!("another user owns {}", state.foreign_tables.join(", "))
        },
        "let the user of DATABASE_URL own the tables: workers make partitions",
    ));
    findings.push(checked(
        "gateways",
        state.gateways > 0,
        Verdict::Warn,
        format!("{} hold a lease", state.gateways),
        "start relay-gateway",
    ));
    if let Some(workers) = state.workers {
        findings.push(checked(
            "workers",
            workers > 0,
            Verdict::Warn,
            format!("{workers} hold a lease"),
            "start relay-worker: without one nothing is pushed, expires or is repaired",
        ));
    }
    findings.push(checked(
        "outbox",
        state.outbox_seconds <= MAX_OUTBOX_LAG_SECONDS,
        Verdict::Warn,
        format!("{} batches, the oldest {:.0} s", state.outbox, state.outbox_seconds),
        "see docs/operations/runbooks/outbox-lag.md",
    ));
    findings
}

fn nats_findings(health: &NatsHealth) -> Vec<Finding> {
    let mut findings = vec![
        checked(
            "nats version",
            parse_version(&health.version) >= MIN_NATS,
            Verdict::Fail,
            &health.version,
            "upgrade to NATS 2.12 or newer",
        ),
        checked(
            "nats max_payload",
            health.max_payload >= MIN_PAYLOAD_BYTES,
            Verdict::Warn,
            format!("{} bytes", health.max_payload),
            "set max_payload to 1MB or more",
        ),
    ];
    if let Some(error) = &health.jetstream_error {
        findings.push(Finding {
            check: "jetstream",
            verdict: Verdict::Warn,
            found: error.clone(),
            fix: Some("start nats-server with JetStream (-js), and allow the account to use it"),
        });
        // The streams cannot be read without JetStream.
        return findings;
    }
    let wanted: i64 = health.streams.iter().map(|stream| stream.max_bytes).sum();
    let missing = health.streams.iter().filter(|stream| stream.found.is_none()).count();
    if missing > 0 {
        findings.push(Finding {
            check: "jetstream streams",
            verdict: Verdict::Warn,
            found: format!("{missing} of {} are missing", health.streams.len()),
            fix: Some("start a gateway; if one runs, it logs why JetStream refuses them: 5 GiB of file storage are reserved on each server"),
        });
    }
    findings.push(checked(
        "jetstream storage",
        health.storage_limit.is_none_or(|limit| limit >= wanted),
        Verdict::Warn,
        match health.storage_limit {
            None => "no limit for the account".to_owned(),
            Some(limit) => format!("{limit} bytes for the account, the streams reserve {wanted}"),
        },
        "raise the account's limit of file storage to 5 GiB or more",
    ));
    for stream in &health.streams {
        let Some(found) = &stream.found else { continue };
        if stream.republishes {
            let state = if found.republishes { "on" } else { "off: observers get events late" };
            findings.push(checked(
                "jetstream republish",
                found.republishes,
                Verdict::Warn,
                format!("{}: {state}", stream.name),
                "remove the stream; gateways recreate it",
            ));
        }
        findings.push(checked(
            "jetstream bounds",
            found.max_age == stream.max_age && found.max_bytes == stream.max_bytes,
            Verdict::Warn,
            format!("{}: {} s, {} bytes at most", stream.name, found.max_age.as_secs(), found.max_bytes),
            "another age or size was set; a gateway that starts restores them",
        ));
        findings.push(checked(
            "jetstream copies",
            found.replicas >= 3 && found.current >= found.replicas,
            Verdict::Warn,
            format!(
                "{}: {} wanted, {} up to date; {} messages, {} bytes",
                stream.name, found.replicas, found.current, found.messages, found.bytes
            ),
            "in production run three servers with RELAY_NATS_REPLICAS=3; a loss costs latency, never a message",
        ));
    }
    findings
}

/// Parses major and minor; 0.0 for any other text.
fn parse_version(text: &str) -> (u32, u32) {
    let mut numbers = text.trim_start_matches('v').split('.').map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn checked(
    check: &'static str,
    good: bool,
    otherwise: Verdict,
    found: impl Into<String>,
    fix: &'static str,
) -> Finding {
    let verdict = if good { Verdict::Ok } else { otherwise };
    Finding { check, verdict, found: found.into(), fix: (!good).then_some(fix) }
}

fn failed(check: &'static str, found: String, fix: &'static str) -> Finding {
    Finding { check, verdict: Verdict::Fail, found, fix: Some(fix) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use relay_stream::admin::{FoundStream, StreamHealth};

    use super::*;

    pub(super) fn healthy() -> DatabaseHealth {
        DatabaseHealth {
            server_version_num: 150_018,
            encoding: "UTF8".into(),
            fsync: "on".into(),
            full_page_writes: "on".into(),
            synchronous_commit: "on".into(),
            synchronous_standby_names: String::new(),
            standbys: 0,
            synchronous_standbys: Some(0),
            max_connections: 100,
            reserved: 3,
            connections: 3,
            own: 1,
            in_recovery: false,
            now: chrono::DateTime::from_timestamp_millis(1_700_000_000_000).unwrap(),
        }
    }

    pub(super) fn worst(findings: &[Finding]) -> (Verdict, Vec<&'static str>) {
        let bad: Vec<_> = findings.iter().filter(|finding| finding.verdict > Verdict::Ok).collect();
        let worst = bad.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::Ok);
        (worst, bad.iter().map(|finding| finding.check).collect())
    }

    #[test]
    fn unsafe_postgres_settings_are_found() {
        let clock = 1_700_000_000_000;
        assert_eq!(worst(&postgres_findings(&healthy(), clock)), (Verdict::Ok, vec![]));
        let busy = |connections, own| DatabaseHealth { connections, own, ..healthy() };
        assert_eq!(worst(&postgres_findings(&busy(70, 64), clock)), (Verdict::Ok, vec![]));
        let cases: [(&str, Verdict, DatabaseHealth); 9] = [
            ("postgres version", Verdict::Fail, DatabaseHealth { server_version_num: 140_010, ..healthy() }),
            ("postgres role", Verdict::Fail, DatabaseHealth { in_recovery: true, ..healthy() }),
            ("postgres encoding", Verdict::Fail, DatabaseHealth { encoding: "SQL_ASCII".into(), ..healthy() }),
            ("postgres fsync", Verdict::Fail, DatabaseHealth { fsync: "off".into(), ..healthy() }),
            (
                "postgres synchronous_commit",
                Verdict::Fail,
                DatabaseHealth { synchronous_commit: "off".into(), ..healthy() },
            ),
            ("postgres connections", Verdict::Warn, DatabaseHealth { max_connections: 20, ..healthy() }),
            ("postgres connections", Verdict::Warn, busy(97, 64)),
            ("postgres connections", Verdict::Warn, busy(82, 64)),
            ("postgres connections", Verdict::Warn, busy(70, 1)),
        ];
        for (check, verdict, health) in cases {
            assert_eq!(worst(&postgres_findings(&health, clock)), (verdict, vec![check]));
        }
        assert_eq!(worst(&postgres_findings(&healthy(), clock + 5000)), (Verdict::Warn, vec!["clocks"]));
    }

    #[test]
    fn schema_problems_are_found() {
        let good = SchemaState {
            applied: Some(9),
            known: 9,
            broken: vec![],
            partition_days: Some(7),
            gateways: 1,
            workers: Some(1),
            outbox: 0,
            outbox_seconds: 0.0,
            foreign_tables: vec![],
        };
        assert_eq!(worst(&schema_findings(&good)), (Verdict::Ok, vec![]));
        assert_eq!(worst(&schema_findings(&SchemaState { applied: Some(10), ..good.clone() })), (Verdict::Ok, vec![]));
        for (check, verdict, state) in [
            ("schema", Verdict::Fail, SchemaState { applied: None, ..good.clone() }),
            ("schema", Verdict::Fail, SchemaState { applied: Some(8), ..good.clone() }),
            ("migrations", Verdict::Fail, SchemaState { broken: vec![3], ..good.clone() }),
            ("partitions", Verdict::Warn, SchemaState { partition_days: Some(2), ..good.clone() }),
            ("partitions", Verdict::Fail, SchemaState { partition_days: Some(0), ..good.clone() }),
            ("table owner", Verdict::Fail, SchemaState { foreign_tables: vec!["messages".into()], ..good.clone() }),
            ("gateways", Verdict::Warn, SchemaState { gateways: 0, ..good.clone() }),
            ("workers", Verdict::Warn, SchemaState { workers: Some(0), ..good.clone() }),
            ("outbox", Verdict::Warn, SchemaState { outbox: 4, outbox_seconds: 60.0, ..good.clone() }),
        ] {
            assert_eq!(worst(&schema_findings(&state)), (verdict, vec![check]));
        }
    }

    #[test]
    fn weak_durability_and_a_small_jetstream_are_found() {
        let (max_age, max_bytes) = (Duration::from_secs(4200), 4 << 30);
        let found = |replicas, current| FoundStream {
            replicas,
            current,
            republishes: true,
            max_age,
            max_bytes,
            messages: 0,
            bytes: 0,
        };
        let with = |found| StreamHealth { name: "RELAY_EVENTS", max_age, max_bytes, republishes: true, found };
        let stream = |replicas, current| with(Some(found(replicas, current)));
        let silent = with(Some(FoundStream { republishes: false, ..found(3, 3) }));
        let unbounded = |max_age, max_bytes| with(Some(FoundStream { max_age, max_bytes, ..found(3, 3) }));
        let good = NatsHealth {
            version: "2.15.1".into(),
            max_payload: 1 << 20,
            jetstream_error: None,
            storage_limit: None,
            storage_reserved: 0,
            streams: vec![stream(3, 3)],
        };
        assert_eq!(worst(&nats_findings(&good)), (Verdict::Ok, vec![]));
        for (check, verdict, health) in [
            ("nats version", Verdict::Fail, NatsHealth { version: "2.9.10".into(), ..good.clone() }),
            ("nats max_payload", Verdict::Warn, NatsHealth { max_payload: 65536, ..good.clone() }),
            ("jetstream", Verdict::Warn, NatsHealth { jetstream_error: Some("disabled".into()), ..good.clone() }),
            ("jetstream storage", Verdict::Warn, NatsHealth { storage_limit: Some(1 << 30), ..good.clone() }),
            ("jetstream copies", Verdict::Warn, NatsHealth { streams: vec![stream(1, 1)], ..good.clone() }),
            ("jetstream copies", Verdict::Warn, NatsHealth { streams: vec![stream(3, 2)], ..good.clone() }),
            ("jetstream streams", Verdict::Warn, NatsHealth { streams: vec![with(None)], ..good.clone() }),
            ("jetstream republish", Verdict::Warn, NatsHealth { streams: vec![silent], ..good.clone() }),
            (
                "jetstream bounds",
                Verdict::Warn,
                NatsHealth { streams: vec![unbounded(Duration::ZERO, max_bytes)], ..good.clone() },
            ),
            (
                "jetstream bounds",
                Verdict::Warn,
                NatsHealth { streams: vec![unbounded(max_age, 1 << 30)], ..good.clone() },
            ),
        ] {
            assert_eq!(worst(&nats_findings(&health)), (verdict, vec![check]));
        }
    }
}

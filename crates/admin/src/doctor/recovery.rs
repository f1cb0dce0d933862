//! Checks of recovery: is the database restored, being recovered or to be recovered, and does JetStream hold what it
//! should (ADR 0017)?

use std::time::Duration;

use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use relay_store::{Store, recovery::DatabaseState};
use relay_stream::{LogKind, LogState, NatsServers, Stream};
use tokio::time::Instant;

use super::{Finding, Verdict, failed};
use crate::restore::process_identity;
use relay_engine::{
    EngineResult, IdSource,
    access::secrets::{KeyList, load_frame_keys},
    error::error_chain,
    recovery::DatabaseRepair,
};

/// A recovery is reported for as long as its dead letters are kept.
const REPORTED_FOR: TimeDelta = TimeDelta::days(8);
/// Time to wait for NATS, whose absence is a finding of its own.
const NATS_TIMEOUT: Duration = Duration::from_secs(2);
const POLL_EVERY: Duration = Duration::from_millis(20);

const RECOVER: &str = "start a gateway or a worker, with NATS: it recovers by itself; or run relayctl restore \
                       (docs/operations/backup.md)";

/// State of recovery in Postgres.
struct DatabaseFacts {
    database: DatabaseState,
    /// Another process holds the recovery lock.
    under_way: bool,
    /// Mailboxes with unsettled deliveries.
    busy: i64,
    /// Time of the reading, by the database's clock.
    now: DateTime<Utc>,
}

/// State of the delivery log in JetStream.
struct LogFacts {
    state: Option<LogState>,
    is_rebuilt: bool,
    /// Its newest frames have numbers that the database has not assigned.
    is_ahead: bool,
}

/// Checks both. An unavailable NATS is left out: another check reports it.
pub(super) async fn examine(store: &Store, nats: &NatsServers, configured: &KeyList) -> Vec<Finding> {
    let known = match read_database(store).await {
        Ok(known) => known,
        Err(error) => return vec![failed("recovery", error_chain(&error), "start Postgres, or correct DATABASE_URL")],
    };
    let log = read_log(store, nats, configured, &known.database).await.ok().flatten();
    let mut findings = vec![database_finding(&known, log.as_ref())];
    findings.extend(identity_finding(&known.database.identity));
    findings.extend(log.map(|log| jetstream_finding(&known, &log)));
    findings
}

async fn read_database(store: &Store) -> EngineResult<DatabaseFacts> {
    Ok(DatabaseFacts {
        database: store.database_state().await?,
        under_way: store.is_recovery_running().await?,
        busy: store.count_busy_mailboxes().await?,
        now: store.now().await?,
    })
}

async fn read_log(
    store: &Store,
    nats: &NatsServers,
    configured: &KeyList,
    database: &DatabaseState,
) -> EngineResult<Option<LogFacts>> {
    let keys = load_frame_keys(store, configured).await?;
    let identity = process_identity(format!("relayctl-{}", std::process::id()), keys);
    let stream = Stream::connect(nats, identity).await?;
    let since = Instant::now();
    // The connection is made in the background: `connect` also succeeds without a server.
    while !stream.is_up() {
        if since.elapsed() >= NATS_TIMEOUT {
            return Ok(None);
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
    let Some(state) = stream.log_state(LogKind::Deliveries).await? else {
        return Ok(Some(LogFacts { state: None, is_rebuilt: false, is_ahead: false }));
    };
    // Reads only, and creates no ids.
    let is_ahead = DatabaseRepair::without_engine(store, &stream, &IdSource::new(0)).log_is_ahead(database).await?;
    Ok(Some(LogFacts { state: Some(state), is_rebuilt: stream.is_rebuilt().await?, is_ahead }))
}

/// Finds an identity that shows no failover: a managed service may hide the cluster, or its timeline.
fn identity_finding(identity: &str) -> Option<Finding> {
    // The first two parts are the cluster and its timeline; a part that the server hides is `-`.
    let is_hidden = identity.split('/').take(2).any(|part| part == "-");
    is_hidden.then(|| Finding {
        check: "database identity",
        verdict: Verdict::Fail,
        found: format!("{identity}: a failover would not be noticed"),
        fix: Some("grant the user EXECUTE on pg_control_system and pg_walfile_name"),
    })
}

fn database_finding(known: &DatabaseFacts, log: Option<&LogFacts>) -> Finding {
    let database = &known.database;
    let finding = |verdict, found: String, fix| Finding { check: "recovery", verdict, found, fix };
    // First: during a recovery the other facts are those of an unfinished repair.
    if known.under_way {
        let found = "a process recovers the database, or fills JetStream again".to_owned();
        return finding(Verdict::Warn, found, Some("wait; /ready of a gateway tells when it is done"));
    }
    if database.is_replaced() {
        let found = format!("needed: another database than the engine knew until {}", format_time(database.seen_at));
        return finding(Verdict::Fail, found, Some(RECOVER));
    }
    if log.is_some_and(|log| log.is_ahead) {
        let found = "needed: JetStream has numbers that this database never gave away, so it is older".to_owned();
        return finding(Verdict::Fail, found, Some(RECOVER));
    }
    match database.recovered_at {
        Some(at) if at > known.now - REPORTED_FOR => {
            let fix = "relayctl dead-letter list --workspace W, reason lost_in_restore; what is lost else: \
                       docs/operations/backup.md";
            finding(Verdict::Warn, format!("done {}{}", format_time(at), summarize_recovery(database)), Some(fix))
        }
        Some(at) => {
            finding(Verdict::Ok, format!("last done {}{}", format_time(at), summarize_recovery(database)), None)
        }
        None => finding(Verdict::Ok, "never needed".to_owned(), None),
    }
}

/// Describes the last recovery. The report is a `RepairReport` of this version or another.
fn summarize_recovery(database: &DatabaseState) -> String {
    let Some(report) = &database.report else { return String::new() };
    // Another version may have written other fields.
    let number = |name: &str| report[name].as_i64().unwrap_or_default();
    let mut text = String::new();
    if let Some(restored_to) = report["restored_to"].as_str() {
        text.push_str(&format!(", from the state of {restored_to}"));
    }
    text.push_str(&format!(": {} deliveries came back, {} were lost", number("recovered"), number("lost")));
    if number("jumped") > 0 {
        let (mailboxes, margin) = (number("jumped"), number("margin"));
        text.push_str(&format!("; JetStream could not tell all, {mailboxes} mailboxes jumped by {margin}"));
    }
    text
}

fn jetstream_finding(known: &DatabaseFacts, log: &LogFacts) -> Finding {
    let finding = |verdict, found: String, fix| Finding { check: "jetstream log", verdict, found, fix };
    let waiting = known.busy;
    match &log.state {
        None => finding(
            Verdict::Warn,
            format!("there is none; {waiting} mailboxes in Postgres hold something"),
            Some(
                "start a gateway: it makes the log and fills it. If Postgres was put back from a snapshot too: first \
                 relayctl restore --jump (docs/operations/backup.md)",
            ),
        ),
        Some(state) if !log.is_rebuilt => finding(
            Verdict::Warn,
            format!(
                "recreated {}, and not yet filled with what waits in {waiting} mailboxes in Postgres",
                DateTime::from_timestamp_millis(state.created_at_ms)
                    .map_or_else(|| "at an unknown time".to_owned(), format_time)
            ),
            Some("start a gateway or a worker: one of them fills it. Delivery goes on from Postgres meanwhile"),
        ),
        Some(state) => {
            let found =
                format!("frames {} to {}; {waiting} mailboxes in Postgres hold something", state.first, state.last);
            finding(Verdict::Ok, found, None)
        }
    }
}

fn format_time(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Secs, true)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn at(hours_ago: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(1_700_000_000, 0).unwrap() - TimeDelta::hours(hours_ago)
    }

    fn known() -> DatabaseFacts {
        let state = DatabaseState {
            identity: "a".into(),
            adopted_identity: Some("a".into()),
            epoch: 0,
            confirmations: 0,
            log_marks: None,
            is_standby: false,
            seen_at: at(1),
            recovered_at: None,
            report: None,
        };
        DatabaseFacts { database: state, under_way: false, busy: 3, now: at(0) }
    }

    fn recovered(hours_ago: i64) -> DatabaseFacts {
        let report =
            json!({ "restored_to": "2023-11-14T20:00:00Z", "recovered": 7, "lost": 2, "jumped": 4, "margin": 1000 });
        let mut known = known();
        (known.database.recovered_at, known.database.report) = (Some(at(hours_ago)), Some(report));
        known
    }

    #[test]
    fn recovery_is_reported_while_needed_running_or_recent() {
        let other = DatabaseFacts { database: DatabaseState { identity: "b".into(), ..known().database }, ..known() };
        let ahead = LogFacts { state: None, is_rebuilt: true, is_ahead: true };
        for (known, log, verdict, words) in [
            (known(), None, Verdict::Ok, "never"),
            (DatabaseFacts { under_way: true, ..known() }, None, Verdict::Warn, "recovers"),
            (other, None, Verdict::Fail, "needed: another"),
            (known(), Some(ahead), Verdict::Fail, "needed: JetStream"),
            (
                recovered(24),
                None,
                Verdict::Warn,
                "7 deliveries came back, 2 were lost; JetStream could not tell all, 4 mailboxes",
            ),
            (recovered(24 * 9), None, Verdict::Ok, "last done 2023-11-05"),
        ] {
            let found = database_finding(&known, log.as_ref());
            assert_eq!(found.verdict, verdict, "{found:?}");
            assert!(found.found.contains(words) && found.fix.is_some() == (verdict > Verdict::Ok), "{found:?}");
        }
    }

    #[test]
    fn an_identity_without_cluster_or_timeline_is_found() {
        assert!(identity_finding("7301234567890123456/00000001/16384/16500").is_none());
        for hidden in ["-/00000001/16384/16500", "7301234567890123456/-/16384/16500"] {
            assert_eq!(identity_finding(hidden).map(|finding| finding.verdict), Some(Verdict::Fail));
        }
    }

    #[test]
    fn missing_and_unfilled_logs_are_found() {
        let state = || Some(LogState { created_at_ms: 0, first: 1, first_at_ms: 0, last: 0, last_at_ms: 0 });
        for (log, verdict, words) in [
            (LogFacts { state: None, is_rebuilt: false, is_ahead: false }, Verdict::Warn, "there is none; 3 mailboxes"),
            (LogFacts { state: state(), is_rebuilt: false, is_ahead: false }, Verdict::Warn, "recreated 1970"),
            (LogFacts { state: state(), is_rebuilt: true, is_ahead: false }, Verdict::Ok, "frames 1 to 0"),
        ] {
            let found = jetstream_finding(&known(), &log);
            assert_eq!(found.verdict, verdict);
            assert!(found.found.contains(words), "{found:?}");
        }
    }
}

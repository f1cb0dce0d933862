//! Whether the database was restored, is being recovered or has to be, and whether JetStream holds what it should (ADR 0017).

use std::time::{Duration, Instant};

use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use relay_store::{Store, recovery::DatabaseState};
use relay_stream::{LogKind, LogState, Stream};

use super::{Finding, Verdict, chain, fail};
use crate::{EngineResult, IdSource, recovery::Mender};

/// A recovery is told of for this long: as long as the dead letters that it has left.
const LATELY: TimeDelta = TimeDelta::days(8);
/// How long to wait for NATS, whose absence is a finding of its own.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often to look whether it is there.
const LOOK_EVERY: Duration = Duration::from_millis(20);

const RECOVER: &str = "start a gateway or a worker, with NATS: it recovers by itself; or run relayctl restore \
                       (docs/operations/backup.md)";

/// What Postgres tells of recovery.
struct Known {
    database: DatabaseState,
    /// Somebody has the lock of recovery.
    under_way: bool,
    /// Mailboxes that hold something unsettled.
    busy: i64,
}

/// What JetStream tells.
struct Log {
    state: Option<LogState>,
    is_rebuilt: bool,
    /// It shows numbers that the database has not given away.
    is_ahead: bool,
}

/// Looks at both. What cannot be reached is left out: the other checks tell.
pub(super) async fn examine(store: &Store, nats_url: &str) -> Vec<Finding> {
    let known = match known(store).await {
        Ok(known) => known,
        Err(error) => return vec![fail("recovery", chain(&error), "start Postgres, or correct DATABASE_URL")],
    };
    let log = log(store, nats_url, &known.database).await.ok().flatten();
    let mut findings = vec![database(&known, log.as_ref(), Utc::now())];
    findings.extend(log.map(|log| jetstream(&known, &log)));
    findings
}

async fn known(store: &Store) -> EngineResult<Known> {
    Ok(Known {
        database: store.database_state().await?,
        under_way: store.recovery_is_under_way().await?,
        busy: store.count_busy_mailboxes().await?,
    })
}

async fn log(store: &Store, nats_url: &str, database: &DatabaseState) -> EngineResult<Option<Log>> {
    let stream = Stream::connect(nats_url, "relayctl", &format!("relayctl-{}", std::process::id())).await?;
    let since = Instant::now();
    while !stream.is_up() {
        if since.elapsed() >= PATIENCE {
            return Ok(None);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    let Some(state) = stream.log_state(LogKind::Deliveries).await? else {
        return Ok(Some(Log { state: None, is_rebuilt: false, is_ahead: false }));
    };
    // It only looks, and makes no ids.
    let is_ahead = Mender::by_hand(store, &stream, &IdSource::new(0)).log_is_ahead(database).await?;
    Ok(Some(Log { state: Some(state), is_rebuilt: stream.is_rebuilt().await?, is_ahead }))
}

fn database(known: &Known, log: Option<&Log>, now: DateTime<Utc>) -> Finding {
    let database = &known.database;
    let finding = |verdict, found: String, fix| Finding { check: "recovery", verdict, found, fix };
    if known.under_way {
        let found = "a process recovers the database, or fills JetStream again".to_owned();
        return finding(Verdict::Warn, found, Some("wait; /ready of a gateway tells when it is done"));
    }
    if database.is_another() {
        let found = format!("needed: another database than the engine knew until {}", time(database.seen_at));
        return finding(Verdict::Fail, found, Some(RECOVER));
    }
    if log.is_some_and(|log| log.is_ahead) {
        let found = "needed: JetStream has numbers that this database never gave away, so it is older".to_owned();
        return finding(Verdict::Fail, found, Some(RECOVER));
    }
    match database.recovered_at {
        Some(at) if at > now - LATELY => {
            let fix = "relayctl dead-letter list --workspace W, reason lost_in_restore; what is lost else: \
                       docs/operations/backup.md";
            finding(Verdict::Warn, format!("done {}{}", time(at), came_of(database)), Some(fix))
        }
        Some(at) => finding(Verdict::Ok, format!("last done {}{}", time(at), came_of(database)), None),
        None => finding(Verdict::Ok, "never needed".to_owned(), None),
    }
}

/// What came of the last recovery: the report is `Mended`, of this version or another.
fn came_of(database: &DatabaseState) -> String {
    let Some(report) = &database.report else { return String::new() };
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

fn jetstream(known: &Known, log: &Log) -> Finding {
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
                "made anew {}, and not filled yet with what waits in {waiting} mailboxes in Postgres",
                DateTime::from_timestamp_millis(state.created_at_ms).map(time).unwrap_or_default()
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

fn time(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Secs, true)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn at(hours_ago: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(1_700_000_000, 0).unwrap() - TimeDelta::hours(hours_ago)
    }

    fn known() -> Known {
        let state = DatabaseState {
            identity: "a".into(),
            known: Some("a".into()),
            seen_at: at(1),
            recovered_at: None,
            report: None,
        };
        Known { database: state, under_way: false, busy: 3 }
    }

    fn recovered(hours_ago: i64) -> Known {
        let report =
            json!({ "restored_to": "2023-11-14T20:00:00Z", "recovered": 7, "lost": 2, "jumped": 4, "margin": 1000 });
        let mut known = known();
        (known.database.recovered_at, known.database.report) = (Some(at(hours_ago)), Some(report));
        known
    }

    #[test]
    fn a_recovery_is_told_of_while_it_is_needed_under_way_or_new() {
        let other = Known { database: DatabaseState { identity: "b".into(), ..known().database }, ..known() };
        let ahead = Log { state: None, is_rebuilt: true, is_ahead: true };
        for (known, log, verdict, words) in [
            (known(), None, Verdict::Ok, "never"),
            (Known { under_way: true, ..known() }, None, Verdict::Warn, "recovers"),
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
            let found = database(&known, log.as_ref(), at(0));
            assert_eq!(found.verdict, verdict, "{found:?}");
            assert!(found.found.contains(words) && found.fix.is_some() == (verdict > Verdict::Ok), "{found:?}");
        }
    }

    #[test]
    fn a_log_that_lacks_what_waits_in_postgres_is_found() {
        let state = || Some(LogState { created_at_ms: 0, first: 1, first_at_ms: 0, last: 0 });
        for (log, verdict, words) in [
            (Log { state: None, is_rebuilt: false, is_ahead: false }, Verdict::Warn, "there is none; 3 mailboxes"),
            (Log { state: state(), is_rebuilt: false, is_ahead: false }, Verdict::Warn, "made anew 1970"),
            (Log { state: state(), is_rebuilt: true, is_ahead: false }, Verdict::Ok, "frames 1 to 0"),
        ] {
            let found = jetstream(&known(), &log);
            assert_eq!(found.verdict, verdict);
            assert!(found.found.contains(words), "{found:?}");
        }
    }
}

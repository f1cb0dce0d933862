//! Attempt rows are the same in batches of every size.

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{
    AttemptId, DeliveryId, NodeId, PushWorkerId, SourceId,
    events::Event,
    push::{
        attempt::{AttemptOutcome, HttpAttempt, PushAttempt, RecordingPass},
        mailbox::LeasedMailbox,
    },
};

use crate::fixture::Database;

const AGENT: i64 = 1;
const OWNER: PushWorkerId = PushWorkerId::new(5);

/// The attempts of these tests have no events of their own.
pub(crate) fn no_events(_: &PushAttempt) -> Vec<Event> {
    Vec::new()
}

/// Makes an attempt. A third of them has no answer; texts and bytes are of all kinds.
pub(crate) fn push_attempt(seq: i64, first_id: i64, at: DateTime<Utc>) -> PushAttempt {
    let (scope, agent_id) = Database::mailbox(AGENT);
    let (status, answer, error) = match seq % 3 {
        0 => (Some(204), None, None),
        1 => (Some(500), Some(vec![0, 255, b'\\', b'\n', b'x']), Some("HTTP 500 – größer\t\\N".to_owned())),
        _ => (None, None, Some("no connection".to_owned())),
    };
    PushAttempt {
        mailbox: LeasedMailbox {
            scope,
            agent_id,
            node_id: NodeId::new("hook"),
            agent_name: "ada".to_owned(),
            epoch: 1,
            pushed_seq: 0,
            recovery_epoch: None,
        },
        delivery_id: DeliveryId { source: SourceId::new(seq), agent: agent_id, redrive_no: 0 },
        seq,
        location: None,
        http: HttpAttempt {
            id: AttemptId::new(first_id + seq),
            // Rows of a batch may be of two days.
            started_at: at - TimeDelta::hours(if seq > 20 { 24 } else { 0 }) + TimeDelta::nanoseconds(seq * 1_000_999),
            latency_ms: i32::try_from(seq).unwrap(),
            status,
            answer,
            error,
        },
        outcome: AttemptOutcome::Acked,
        pushed_seq: None,
        sender: None,
    }
}

type Row = (i64, String, String, DateTime<Utc>, i32, Option<i16>, Option<Vec<u8>>, Option<String>);

async fn rows(db: &Database, ids: std::ops::Range<i64>) -> Vec<Row> {
    sqlx::query_as(
        "SELECT seq, created_on::text, node_id, attempted_at, latency_ms, status, answer, error
           FROM delivery_attempts WHERE workspace_id = 7 AND agent_id = 1 AND attempt_id >= $1 AND attempt_id < $2
          ORDER BY seq",
    )
    .bind(ids.start)
    .bind(ids.end)
    .fetch_all(&db.pool)
    .await
    .unwrap()
}

#[tokio::test]
async fn a_batch_of_attempts_leaves_the_same_rows_as_single_ones() {
    let db = Database::fresh().await;
    db.agent(AGENT, "ada").await;
    // Out of order, as attempts end.
    let order = (1..=40).map(|n| n * 7 % 41);
    let (single, many): (Vec<_>, Vec<_>) =
        order.map(|seq| (push_attempt(seq, 1000, db.now), push_attempt(seq, 2000, db.now))).unzip();
    for one in &single {
        db.store
            .record_attempts(OWNER, std::slice::from_ref(one), no_events, RecordingPass::First, db.now)
            .await
            .unwrap();
    }
    db.store.record_attempts(OWNER, &many, no_events, RecordingPass::First, db.now).await.unwrap();
    let (single_rows, batch_rows) = (rows(&db, 1000..2000).await, rows(&db, 2000..3000).await);
    assert_eq!(single_rows.len(), 40);
    assert_eq!(batch_rows, single_rows);
    let days: std::collections::BTreeSet<&str> = batch_rows.iter().map(|row| row.1.as_str()).collect();
    assert_eq!(days.len(), 2, "{days:?}");

    // A transaction whose commit outcome is unknown is written again, with others.
    let mut again = many;
    again.push(push_attempt(41, 2000, db.now));
    db.store.record_attempts(OWNER, &again, no_events, RecordingPass::Repeated, db.now).await.unwrap();
    assert_eq!(rows(&db, 2000..3000).await.len(), 41);

    // A first pass over rows that exist is refused as a whole, and the connection remains usable.
    again.push(push_attempt(42, 2000, db.now));
    db.store.record_attempts(OWNER, &again, no_events, RecordingPass::First, db.now).await.unwrap_err();
    assert_eq!(rows(&db, 2000..3000).await.len(), 41);
    db.store.record_attempts(OWNER, &again, no_events, RecordingPass::Repeated, db.now).await.unwrap();
    assert_eq!(rows(&db, 2000..3000).await.len(), 42);
}
